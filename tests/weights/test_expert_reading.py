"""Adapters of experts from other writers are read and written again exactly; files in disagreement are refused."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_megapack.errors import ExportError
from hf_megapack.weights import export_peft_adapter, read_peft_adapter, resolve_lora, verify_with_peft
from hf_megapack.weights.export import check_holds_targets
from tests.helpers.moe_adapters import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    assert_same_adapter,
    edit_json,
    logits,
    merged_logits,
    random_adapter,
    read_json,
    write_version_4,
)
from tests.helpers.tiny_moe import FAMILIES, moe_linear_names, tiny_moe

pytestmark = [
    # peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # peft looks for pattern keys among modules alone, and warns although parameters match them.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

TOGETHER = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def written_by_peft(directory, family, dtype=torch.float32, **fields):
    """What a run with peft leaves, all factors random; returns the tensors of its file."""
    torch.manual_seed(5)
    model = get_peft_model(tiny_moe(family), LoraConfig(**fields, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory, save_embedding_layers=False)
    return load_file(directory / WEIGHTS)


USUAL = ["q_proj", "gate_proj", "up_proj", "down_proj"]
NATIVE = {
    "parameters": {"target_modules": ["q_proj"], "target_parameters": TOGETHER, "r": 3, "lora_alpha": 5},
    "gate_up alone": {"target_modules": ["o_proj"], "target_parameters": TOGETHER[:1], "r": 2, "use_rslora": True},
    "weights": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj", "k_proj.weight"], "r": 2},
    "patterns": {
        "target_modules": ["q_proj"],
        "target_parameters": ["gate_up_proj", "down_proj"],
        "rank_pattern": {"gate_up_proj": 5, r"layers\.2\..*down_proj": 3},
        "alpha_pattern": {"gate_up_proj": 2.5},
        "r": 2,
    },
    # peft itself turns these into target_parameters where it knows the model type, and leaves the experts out else.
    "projections": {"target_modules": USUAL, "r": 2},
    "projections of Mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"], "r": 2},
}


@pytest.mark.parametrize(("dtype", "with_names"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("name", sorted(NATIVE))
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_of_peft_is_read_and_written_again(tmp_path, family, name, dtype, with_names):
    """Third-party adapter in, the same tensors out, with the same logits; one A for gate and up stays one."""
    theirs = written_by_peft(tmp_path / "theirs", family, dtype, **NATIVE[name])
    names = moe_linear_names(tiny_moe(family, "meta"))
    config, state = read_peft_adapter(tmp_path / "theirs")
    check_holds_targets(tmp_path / "theirs", state, names)
    specs = resolve_lora(config, names)
    assert state.keys() == {f"{PREFIX}{module}.lora_{factor}.weight" for module in specs for factor in "AB"}
    assert not any(module.endswith("experts.gate_proj") for module in specs)
    expected = logits(PeftModel.from_pretrained(tiny_moe(family), tmp_path / "theirs"))
    torch.testing.assert_close(merged_logits(family, config, state), expected, rtol=1e-5, atol=1e-5)

    export_peft_adapter(
        state, config, tmp_path / "ours", base_model_name=None, linear_names=names if with_names else None
    )
    ours = load_file(tmp_path / "ours" / WEIGHTS)
    assert_same_adapter(ours, {key: tensor.float() for key, tensor in theirs.items()})
    verify_with_peft(tmp_path / "ours", tiny_moe(family))
    ours = logits(PeftModel.from_pretrained(tiny_moe(family), tmp_path / "ours"))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_of_single_experts_is_read(tmp_path, family, use_rslora):
    ours, state = write_version_4(tmp_path / "old", family, r=3, lora_alpha=4, use_rslora=use_rslora)
    names = moe_linear_names(tiny_moe(family, "meta"))
    config, back = read_peft_adapter(tmp_path / "old")
    assert_same_adapter(back, state)
    assert resolve_lora(config, names) == resolve_lora(ours, names)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
@pytest.mark.parametrize("family", ["glm4_moe", "mixtral", "qwen3_moe"])
def test_single_experts_mean_what_they_mean_in_peft(tmp_path, family):
    """Such files are converted by peft for these model types: to the same logits, and back in two when read again."""
    ours, state = write_version_4(tmp_path / "old", family, r=3, lora_alpha=4)
    model = PeftModel.from_pretrained(tiny_moe(family), tmp_path / "old")
    expected = merged_logits(family, ours, state)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "converted", save_embedding_layers=False)
    with safe_open(tmp_path / "converted" / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert any(key.endswith("experts.base_layer.lora_B.weight") for key in file.keys())  # noqa: SIM118 (a handle)
    config, back = read_peft_adapter(tmp_path / "converted")
    assert_same_adapter(back, state)
    names = moe_linear_names(tiny_moe(family, "meta"))
    assert resolve_lora(config, names) == resolve_lora(ours, names)


def test_blocks_without_an_exact_alpha_stay_one_adapter(tmp_path):
    """With use_rslora half the rank has no exact alpha; what peft's conversion has made of the scale is what counts."""
    write_version_4(tmp_path / "old", "mixtral", r=3, lora_alpha=4, use_rslora=True)
    model = PeftModel.from_pretrained(tiny_moe("mixtral"), tmp_path / "old")
    model.save_pretrained(tmp_path / "converted", save_embedding_layers=False)
    config, state = read_peft_adapter(tmp_path / "converted")
    assert f"{PREFIX}model.layers.0.mlp.experts.gate_up_proj.lora_A.weight" in state
    torch.testing.assert_close(merged_logits("mixtral", config, state), logits(model), rtol=1e-5, atol=1e-5)


def test_names_of_dense_and_shared_layers_do_not_reach_experts_afterwards(tmp_path):
    """Under such targets peft leaves the experts of Qwen2 out; read here, the config must not ask for them either."""
    written_by_peft(tmp_path, "qwen2_moe", target_modules=USUAL, r=2)
    config, state = read_peft_adapter(tmp_path)
    modules = resolve_lora(config, moe_linear_names(tiny_moe("qwen2_moe", "meta")))
    assert len(modules) == 3 + 2 * 3 + 3 == len(state) // 2
    assert not any(".experts." in module for module in modules)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_a_layer_that_the_file_lacks_are_named(tmp_path, family):
    config, names = LoraConfig(target_modules="all-linear", r=2), moe_linear_names(tiny_moe(family, "meta"))
    export_peft_adapter(random_adapter(config, family), config, tmp_path, base_model_name=None, linear_names=names)
    tensors = load_file(tmp_path / WEIGHTS)
    kept = {key: tensor for key, tensor in tensors.items() if "layers.2.mlp.experts." not in key}
    assert len(kept) == len(tensors) - 4
    save_file(kept, tmp_path / WEIGHTS)
    with pytest.raises(ExportError, match=r"selects 2 modules that .* lacks, as model\.layers\.2\.mlp\.experts\."):
        check_holds_targets(tmp_path, read_peft_adapter(tmp_path)[1], names)


def test_adapter_of_a_router_is_refused(tmp_path):
    written_by_peft(tmp_path, "qwen3_moe", target_modules="all-linear", r=2)
    with pytest.raises(ExportError, match="a router, which stays frozen"):
        read_peft_adapter(tmp_path)


def test_rescaling_in_the_config_is_honoured(tmp_path):
    """The mark keeps alphas for exact resumption, but the config has the last word."""
    peft_config = LoraConfig(target_modules=["gate_proj", "up_proj"], r=2, lora_alpha=4)
    export_peft_adapter(random_adapter(peft_config, "mixtral"), peft_config, tmp_path, base_model_name=None)
    assert read_json(tmp_path)["alpha_pattern"] == {"gate_up_proj": 8}
    edit_json(tmp_path, alpha_pattern={"gate_up_proj": 24})
    saved, _ = read_peft_adapter(tmp_path)
    specs = resolve_lora(saved, moe_linear_names(tiny_moe("mixtral", "meta")))
    assert {(spec.rank, spec.alpha, spec.scaling) for spec in specs.values()} == {(2, 12, 6.0)}


# Files whose parts do not belong together


@pytest.fixture(scope="module")
def damaged_sources(tmp_path_factory):
    """One good adapter of each kind of file: of ours, and of experts one by one."""
    root = tmp_path_factory.mktemp("sources")
    peft_config = LoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], r=2)
    export_peft_adapter(random_adapter(peft_config, "mixtral"), peft_config, root / "ours", base_model_name=None)
    write_version_4(root / "single", "qwen3_moe", r=2)
    return root


FUSED = f"{PREFIX}model.layers.0.mlp.experts.base_layer"
ONE = f"{PREFIX}model.layers.0.mlp.experts.3.up_proj"
DAMAGES = {
    "no target_parameters": ("ours", {}, {"target_parameters": None}, "target_parameters select none there"),
    "one parameter": ("ours", {}, {"target_parameters": ["experts.down_proj"]}, r"holds 2 adapters .* select \["),
    "rank": ("ours", {}, {"rank_pattern": {"gate_up_proj": 3}}, r"\(experts \* 3, in\)"),
    "another rank": ("ours", {}, {"rank_pattern": {"gate_up_proj": 8}}, "different numbers of experts"),
    "not of blocks": ("ours", {f"{FUSED}.lora_B.weight": torch.ones(96, 16)}, {}, "lora_B is not made of"),
    "one expert less": ("single", {f"{ONE}.lora_A.weight": None, f"{ONE}.lora_B.weight": None}, {}, "different numb"),
    "a gap": (
        "single",
        {f"{ONE.replace('.3.', '.1.')}.lora_{factor}.weight": None for factor in "AB"},
        {},
        r"up_proj has adapters for 3 experts, but none for expert 1",
    ),
    "another shape": ("single", {f"{ONE}.lora_A.weight": torch.ones(2, 5)}, {}, "differ in rank, alpha or shape"),
    "alpha of one": ("single", {}, {"alpha_pattern": {r"experts\.2\.up_proj": 3}}, "differ in rank, alpha or shape"),
    "not selected": ("single", {}, {"target_modules": ["q_proj", "o_proj", "up_proj"]}, "does not select 16 modules"),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_file_whose_parts_do_not_belong_together_is_refused(tmp_path, damaged_sources, name):
    source, changes, fields, words = DAMAGES[name]
    shutil.copytree(damaged_sources / source, tmp_path / "adapter")
    read_peft_adapter(tmp_path / "adapter")
    edit_json(tmp_path / "adapter", **fields)
    with safe_open(tmp_path / "adapter" / WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    assert tensors.keys() >= changes.keys()
    kept = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
    save_file(kept, tmp_path / "adapter" / WEIGHTS, metadata=metadata)
    with pytest.raises(ExportError, match=words):
        read_peft_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"model.layers.9.mlp.experts": {"up_proj": [2, 8]}}, "a mark for model.layers.9.mlp.experts, but no adapter"),
        ({"model.layers.0.mlp.experts": {"gate_proj": [3, 8], "up_proj": [3, 8]}}, "is not made of their blocks"),
        ({"model.layers.0.mlp.experts": {"gate_up_proj": [2, 8]}}, "marked as having one lora_A"),
        ({"model.layers.0.mlp.experts": 5}, "hf_megapack_experts cannot be read"),
        ("{", "hf_megapack_experts cannot be read"),
    ],
)
def test_mark_that_does_not_fit_is_refused(tmp_path, damaged_sources, mark, words):
    shutil.copytree(damaged_sources / "ours", tmp_path / "adapter")
    text = mark if isinstance(mark, str) else json.dumps(mark)
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file(tensors, tmp_path / "adapter" / WEIGHTS, metadata={"hf_megapack_experts": text})
    with pytest.raises(ExportError, match=words):
        read_peft_adapter(tmp_path / "adapter")


def test_reader_notices_that_marks_are_replaced_under_it(tmp_path, monkeypatch):
    """Two adapters with equal configs and shapes: independent gate and up of rank 2, and one A of rank 4."""
    apart = LoraConfig(target_modules=["gate_proj", "up_proj", "q_proj"], r=2, lora_alpha=4)
    together = LoraConfig(
        target_modules=["q_proj"],
        target_parameters=TOGETHER[:1],
        r=2,
        lora_alpha=4,
        rank_pattern={"gate_up_proj": 4},
        alpha_pattern={"gate_up_proj": 8},
    )
    folders = {"apart": apart, "together": together}
    for name, config in folders.items():
        export_peft_adapter(random_adapter(config, "mixtral"), config, tmp_path / name, base_model_name=None)
    configs = [(tmp_path / name / CONFIG).read_bytes() for name in folders]
    assert configs[0] == configs[1]

    def replaced_before_loading(path):
        shutil.copy(tmp_path / "together" / WEIGHTS, tmp_path / "apart" / WEIGHTS)
        return load_file(path)

    monkeypatch.setattr("hf_megapack.weights.export.load_file", replaced_before_loading)
    with pytest.raises(ExportError, match="was replaced while it was read"):
        read_peft_adapter(tmp_path / "apart")
