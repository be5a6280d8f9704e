"""Experts one by one, for inference engines: names, values, and what such readers would misread."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from hf_megapack.errors import ExportError
from hf_megapack.weights import export_peft_adapter, read_peft_adapter, resolve_lora, verify_with_peft
from hf_megapack.weights.export import check_holds_targets
from tests.helpers.moe_adapters import (
    PREFIX,
    WEIGHTS,
    assert_same_adapter,
    edit_json,
    logits,
    merged_logits,
    random_adapter,
    read_json,
    single_expert_keys,
)
from tests.helpers.tiny_moe import FAMILIES, NUM_EXPERTS, moe_linear_names, tiny_moe

pytestmark = [
    # peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # peft looks for pattern keys among modules alone, and warns although parameters match them.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]

TOGETHER = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", r".*(self_attn\.q_proj|\.experts\..*)"])
def test_experts_are_written_one_by_one(tmp_path, family, targets):
    peft_config = LoraConfig(target_modules=targets, r=3, lora_alpha=4)
    names = moe_linear_names(tiny_moe(family, "meta"))
    state = random_adapter(peft_config, family)
    export_peft_adapter(
        state,
        peft_config,
        tmp_path / "adapter",
        base_model_name=None,
        linear_names=names,
        export_format="per_expert",
        model_type=family,
    )
    expected, leaves = single_expert_keys(state, family)
    assert_same_adapter(load_file(tmp_path / "adapter" / WEIGHTS), expected)
    written = read_json(tmp_path / "adapter")
    assert (written["r"], written["lora_alpha"], written["rank_pattern"], written["alpha_pattern"]) == (3, 4, {}, {})
    assert {"q_proj", "experts", *leaves} <= set(written["target_modules"])
    config, back = read_peft_adapter(tmp_path / "adapter")
    check_holds_targets(tmp_path / "adapter", back, names)
    assert_same_adapter(back, state)
    assert resolve_lora(config, names) == resolve_lora(peft_config, names)
    with pytest.raises(ExportError, match="for inference engines"):
        verify_with_peft(tmp_path / "adapter", tiny_moe(family))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
@pytest.mark.parametrize("family", ["glm4_moe", "mixtral", "qwen3_moe"])
def test_experts_one_by_one_have_the_values_that_names_say(tmp_path, family):
    """Without the entry for engines, peft converts a file of attention and experts; it is a reader of these names."""
    peft_config = LoraConfig(target_modules=r".*(self_attn\.q_proj|\.experts\..*)", r=3, lora_alpha=4)
    state = random_adapter(peft_config, family)
    export_peft_adapter(
        state, peft_config, tmp_path, base_model_name=None, export_format="per_expert", model_type=family
    )
    targets = read_json(tmp_path)["target_modules"]
    with pytest.raises(ValueError, match="Experts"):
        PeftModel.from_pretrained(tiny_moe(family), tmp_path)
    edit_json(tmp_path, target_modules=[target for target in targets if target != "experts"])
    model = PeftModel.from_pretrained(tiny_moe(family), tmp_path)
    torch.testing.assert_close(logits(model), merged_logits(family, peft_config, state), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("glm4_moe", {"mlp.gate_proj", "mlp.shared_experts.gate_proj"}),
        ("mixtral", set()),
        ("qwen2_moe", {f"mlp.experts.{expert}.gate_proj" for expert in range(NUM_EXPERTS)}),
        ("qwen3_moe", {"mlp.gate_proj"}),
    ],
)
def test_what_peft_would_drop_without_an_error(tmp_path, family, lost):
    """Why verification refuses this format, and why peft should stop at "experts"; fails when peft mends it."""
    peft_config = LoraConfig(target_modules="all-linear", r=2)
    state = random_adapter(peft_config, family)
    options = {"base_model_name": None, "export_format": "per_expert", "model_type": family}
    export_peft_adapter(state, peft_config, tmp_path, **options)
    edit_json(tmp_path, target_modules=[name for name in read_json(tmp_path)["target_modules"] if name != "experts"])
    loaded = PeftModel.from_pretrained(tiny_moe(family), tmp_path).state_dict()
    modules = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in loaded if ".lora_" in key}
    written = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in load_file(tmp_path / WEIGHTS)}
    fused = {name for name in written if ".experts." in name} if family != "qwen2_moe" else set()
    dropped = {".".join(name.split(".")[3:]) for name in written - modules - fused}
    assert {name for name in dropped if name.endswith("gate_proj")} == lost


def test_one_a_for_gate_and_up_survives_being_written_one_by_one(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj"], target_parameters=TOGETHER, r=3)
    state = random_adapter(peft_config, "qwen3_moe")
    options = {"base_model_name": None, "export_format": "per_expert", "model_type": "qwen3_moe"}
    export_peft_adapter(state, peft_config, tmp_path, **options)
    tensors = load_file(tmp_path / WEIGHTS)
    experts = f"{PREFIX}model.layers.0.mlp.experts"
    for expert in range(NUM_EXPERTS):
        factor_a, factor_b = (state[f"{experts}.gate_up_proj.lora_{factor}.weight"][expert] for factor in "AB")
        for half, leaf in zip(factor_b.chunk(2), ("gate_proj", "up_proj"), strict=True):
            assert torch.equal(tensors[f"{experts}.{expert}.{leaf}.lora_A.weight"], factor_a)
            assert torch.equal(tensors[f"{experts}.{expert}.{leaf}.lora_B.weight"], half)
    config, back = read_peft_adapter(tmp_path)
    assert_same_adapter(back, state)
    names = moe_linear_names(tiny_moe("qwen3_moe", "meta"))
    assert resolve_lora(config, names) == resolve_lora(peft_config, names)


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({"target_modules": "all-linear"}, {"model_type": None}, "model_type None .* not known.*mixtral"),
        ({"target_modules": "all-linear"}, {"model_type": "qwen5_moe"}, "model_type 'qwen5_moe'"),
        ({"target_modules": ["gate_proj", "down_proj"]}, {}, "no adapter of up_proj.*all three"),
        ({"target_modules": "all-linear", "rank_pattern": {"q_proj": 4}}, {}, "one r and lora_alpha.*q_proj has r=4"),
        ({"target_modules": "all-linear", "alpha_pattern": {"o_proj": 9}}, {}, "o_proj has r=8, lora_alpha=9"),
        ({"target_modules": "all-linear"}, {"export_format": "vllm"}, "'vllm' is not allowed.*'per_expert'"),
    ],
)
def test_what_engines_would_misread_is_refused(tmp_path, fields, options, words):
    peft_config = LoraConfig(**fields)
    state = random_adapter(peft_config, "qwen3_moe")
    options = {"export_format": "per_expert", "model_type": "qwen3_moe", **options}
    with pytest.raises(ExportError, match=words):
        export_peft_adapter(state, peft_config, tmp_path / "new", base_model_name=None, **options)
    assert not (tmp_path / "new").exists()
