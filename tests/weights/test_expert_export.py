"""Adapters of mixture-of-experts models: exact in peft, nothing dropped, and back in memory as they were."""

import re

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file

from hf_megapack.errors import ExportError
from hf_megapack.weights import export_peft_adapter, read_peft_adapter, resolve_lora, verify_with_peft
from hf_megapack.weights.export import check_holds_targets
from tests.helpers.moe_adapters import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    assert_same_adapter,
    logits,
    merged_logits,
    random_adapter,
    read_json,
)
from tests.helpers.tiny_moe import FAMILIES, moe_linear_names, tiny_moe

pytestmark = [
    # peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # peft looks for pattern keys among modules alone, and warns although parameters match them.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

TOGETHER = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATE_AND_UP = r"experts\.(gate|up)_proj"
CONFIGS = {
    "all-linear": {"target_modules": "all-linear", "r": 3, "lora_alpha": 6},
    "rslora": {"target_modules": "all-linear", "r": 3, "lora_alpha": 6, "use_rslora": True},
    "patterns": {
        "target_modules": "all-linear",
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {GATE_AND_UP: 2, r"2\.mlp\.experts\.down_proj": 5, "q_proj": 3},
        "alpha_pattern": {GATE_AND_UP: 7, r"\d\.mlp\.up_proj": 9, r"layers\.0\.mlp\.experts\.down_proj": 2.5},
    },
    "ranks of gate and up": {
        "target_modules": ["experts.gate_proj", "experts.up_proj"],
        "r": 2,
        "lora_alpha": 3,
        "rank_pattern": {"up_proj": 4},
        "alpha_pattern": {"up_proj": 6},
    },
    "gate alone": {"target_modules": ["experts.gate_proj", "q_proj"], "r": 2},
    "up and down": {"target_modules": ["experts.up_proj", "experts.down_proj"], "r": 2, "use_rslora": True},
    "down alone": {"target_modules": ["down_proj"], "r": 2},
    "experts alone": {"target_modules": r".*\.experts\..*", "r": 2},
    "one layer": {"target_modules": ["q_proj", "up_proj", "gate_proj"], "layers_to_transform": [2], "r": 2},
    "attention alone": {"target_modules": ["q_proj", "o_proj"], "r": 2},
    "no experts": {"target_modules": "all-linear", "exclude_modules": r".*\.experts\..*", "r": 2},
    "one A": {
        "target_modules": "all-linear",
        "target_parameters": TOGETHER,
        "r": 4,
        "rank_pattern": {"mlp.up_proj": 3},
    },
    "one A, rslora": {"target_modules": [], "target_parameters": TOGETHER[:1], "r": 3, "use_rslora": True},
    "both kinds": {
        "target_modules": ["gate_proj", "up_proj"],
        "target_parameters": ["layers.2.mlp.experts.gate_up_proj"],
        "r": 2,
    },
}


def config_for(name, family):
    """One of CONFIGS, without the pattern keys that match nothing in a family."""
    fields = dict(CONFIGS[name])
    names = moe_linear_names(tiny_moe(family, "meta"))
    for field in fields.keys() & {"rank_pattern", "alpha_pattern"}:
        fields[field] = {
            key: value
            for key, value in fields[field].items()
            if any(re.fullmatch(rf"(.*\.)?({key})", name) for name in names)
        }
    return LoraConfig(**fields)


CASES = [
    (family, name, with_names)
    for family in FAMILIES
    for name in sorted(CONFIGS)
    for with_names in (True, False)
    # Without names, nothing in a state of dense layers alone says that the model has experts: Qwen2's has shared ones.
    if with_names or family == "qwen2_moe"
]


@pytest.mark.parametrize(("family", "name", "with_names"), CASES)
def test_peft_computes_what_was_exported(tmp_path, family, name, with_names):
    """Every tensor of the file is in the loaded model, logits are those of merged weights, and reading undoes it."""
    peft_config = config_for(name, family)
    names = moe_linear_names(tiny_moe(family, "meta"))
    state = random_adapter(peft_config, family)
    export_peft_adapter(
        state, peft_config, tmp_path / "adapter", base_model_name="m", linear_names=names if with_names else None
    )
    verify_with_peft(tmp_path / "adapter", tiny_moe(family))
    loaded = PeftModel.from_pretrained(tiny_moe(family), tmp_path / "adapter")
    expected = merged_logits(family, peft_config, state)
    assert (expected - logits(tiny_moe(family))).abs().max() > 1e-2
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)

    saved, back = read_peft_adapter(tmp_path / "adapter")
    check_holds_targets(tmp_path / "adapter", back, names)
    assert_same_adapter(back, state)
    assert resolve_lora(saved, names) == resolve_lora(peft_config, names)
    export_peft_adapter(
        back, saved, tmp_path / "again", base_model_name="m", linear_names=names if with_names else None
    )
    for file in (WEIGHTS, CONFIG):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()


def test_written_config_names_parameters(tmp_path):
    names = moe_linear_names(tiny_moe("qwen2_moe", "meta"))
    peft_config = LoraConfig(target_modules="all-linear", r=4, lora_alpha=6)
    state = random_adapter(peft_config, "qwen2_moe")
    export_peft_adapter(state, peft_config, tmp_path, base_model_name=None, linear_names=names)
    written = read_json(tmp_path)
    assert written["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert written["target_parameters"] == [
        *("mlp.down_proj.weight", "mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate_proj.weight"),
        *(f"mlp.shared_expert.{leaf}_proj.weight" for leaf in ("down", "gate", "up")),
        "mlp.up_proj.weight",
    ]
    # Twice the rank for gate and up, and twice the alpha for the same scale.
    assert (written["r"], written["rank_pattern"]) == (4, {"gate_up_proj": 8})
    assert (written["lora_alpha"], written["alpha_pattern"]) == (6, {"gate_up_proj": 12})
    shapes = {key.removeprefix(PREFIX): tuple(tensor.shape) for key, tensor in load_file(tmp_path / WEIGHTS).items()}
    experts = "model.layers.0.mlp.experts"
    # Four experts, gate and up of 16 rows each, 32 hidden channels.
    assert shapes[f"{experts}.base_layer.lora_A.weight"] == (4 * 8, 32)
    assert shapes[f"{experts}.base_layer.lora_B.weight"] == (2 * 16, 4 * 8)
    assert shapes[f"{experts}.lora_A.weight"] == (4 * 4, 16)
    assert shapes[f"{experts}.lora_B.weight"] == (32, 4 * 4)
    assert sum("lora_A" in key for key in shapes) == 3 * 4 + 2 * 2 + 2 * 3 + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_adapter_comes_back_as_it_was(tmp_path, family):
    """With lora_B zero, nothing but the mark in the header tells two adapters from one."""
    for name in ("all-linear", "one A"):
        peft_config = config_for(name, family)
        state = {key: tensor * ("lora_A" in key) for key, tensor in random_adapter(peft_config, family).items()}
        export_peft_adapter(state, peft_config, tmp_path / name, base_model_name=None)
        assert_same_adapter(read_peft_adapter(tmp_path / name)[1], state)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
def test_verification_notices_what_peft_drops_silently(tmp_path):
    """Dense layers of such a model, selected by target_modules as usual: peft loads the adapter without them."""
    peft_config = config_for("no experts", "qwen3_moe")
    state = random_adapter(peft_config, "qwen3_moe")
    export_peft_adapter(state, peft_config, tmp_path, base_model_name=None)
    with pytest.raises(ExportError, match=r"6 in the file only: .*layers\.1\.mlp\.down_proj\.lora_A"):
        verify_with_peft(tmp_path, tiny_moe("qwen3_moe"))


def test_verification_notices_another_scale(tmp_path, monkeypatch):
    export = LoraConfig(target_modules=["experts.down_proj"], r=2)
    state = random_adapter(export, "mixtral")
    export_peft_adapter(state, export, tmp_path, base_model_name=None)
    verify_with_peft(tmp_path, tiny_moe("mixtral"))
    real = PeftModel.from_pretrained

    def loaded_with_another_scale(*args, **kwargs):
        model = real(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, ParamWrapper):
                module.scaling["default"] *= 1.01
        return model

    monkeypatch.setattr(PeftModel, "from_pretrained", loaded_with_another_scale)
    with pytest.raises(ExportError, match="computes something else: logits differ by"):
        verify_with_peft(tmp_path, tiny_moe("mixtral"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verification_gives_the_base_model_back(tmp_path, dtype):
    peft_config = LoraConfig(target_modules="all-linear", r=2)
    export_peft_adapter(random_adapter(peft_config, "glm4_moe"), peft_config, tmp_path, base_model_name=None)
    model = tiny_moe("glm4_moe").to(dtype)
    model.lm_head.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        verify_with_peft(tmp_path, model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)
    assert [name for name, module in model.named_modules() if module.training] == ["lm_head"]


def test_state_that_is_no_stack_of_experts_is_refused(tmp_path):
    peft_config = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], r=2)
    good = random_adapter(peft_config, "mixtral")
    key = f"{PREFIX}model.layers.1.mlp.experts.up_proj"
    both = f"{PREFIX}model.layers.1.mlp.experts.gate_up_proj"
    damages = {
        r"up_proj has lora_A \(8, 32\).*\(experts, 2, in\)": {
            f"{key}.lora_A.weight": good[f"{key}.lora_A.weight"].flatten(0, 1)
        },
        r"up_proj has lora_A \(3, 2, 32\) and lora_B \(4, 48, 2\)": {
            f"{key}.lora_A.weight": good[f"{key}.lora_A.weight"][:3]
        },
        r"up_proj has .* its rank is 2": {f"{key}.lora_B.weight": torch.zeros(4, 48, 3)},
        "different numbers of experts": {
            f"{key}.lora_{factor}.weight": good[f"{key}.lora_{factor}.weight"][:3] for factor in "AB"
        },
        r"differ in scale or in size.*\(32, 24\)": {f"{key}.lora_B.weight": torch.zeros(4, 24, 2)},
        "gate_up_proj and others of gate_proj, up_proj": {
            f"{both}.lora_A.weight": torch.zeros(4, 2, 32),
            f"{both}.lora_B.weight": torch.zeros(4, 96, 2),
        },
        "experts.0.up_proj is a name of experts in files": {
            f"{PREFIX}model.layers.1.mlp.experts.0.up_proj.lora_{factor}.weight": torch.zeros(2, 2) for factor in "AB"
        },
        "experts.base_layer is a name of experts in files": {
            f"{PREFIX}model.layers.1.mlp.experts.base_layer.lora_{factor}.weight": torch.zeros(2, 2) for factor in "AB"
        },
    }
    for words, changes in damages.items():
        with pytest.raises(ExportError, match=words):
            export_peft_adapter(good | changes, peft_config, tmp_path / "new", base_model_name=None)
    assert not (tmp_path / "new").exists()


def test_scales_that_one_parameter_cannot_have_are_refused_without_names_too(tmp_path):
    peft_config = LoraConfig(target_modules=["gate_proj", "up_proj"], r=2)
    state = random_adapter(peft_config, "mixtral")
    peft_config.alpha_pattern = {"up_proj": 5}
    with pytest.raises(ExportError, match="differ in scale"):
        export_peft_adapter(state, peft_config, tmp_path / "new", base_model_name=None)
