"""Saving in the format that the arguments ask for, and refusing before training what could not be saved in it."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from hf_megapack import MegaPackConfig
from hf_megapack.errors import ConfigError
from hf_megapack.saving import check_export, write_adapter
from hf_megapack.weights import read_peft_adapter, resolve_lora

EXPERTS = "model.layers.0.mlp.experts"
NAMES = ["model.layers.0.self_attn.q_proj", *(f"{EXPERTS}.{leaf}_proj" for leaf in ("gate", "up", "down")), "lm_head"]
BACKEND = SimpleNamespace(base_model_name="m", linear_names=NAMES, hf_config=SimpleNamespace(model_type="qwen3_moe"))


def arguments(tmp_path, **fields):
    return MegaPackConfig(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", **fields)


def random_state(peft_config):
    state = {}
    for name, spec in resolve_lora(peft_config, NAMES).items():
        stack = (3,) if EXPERTS in name else ()
        for factor, shape in (("A", (spec.rank, 6)), ("B", (6, spec.rank))):
            state[f"base_model.model.{name}.lora_{factor}.weight"] = torch.randn(*stack, *shape)
    return state


@pytest.mark.parametrize(("export_format", "num_modules"), [("peft", 3), ("per_expert", 1 + 3 * 3)])
def test_adapter_is_written_as_asked(tmp_path, export_format, num_modules):
    """Attention and two adapters of stacked experts, or attention and three projections of three experts."""
    args = arguments(tmp_path, export_format=export_format)
    peft_config = LoraConfig(target_modules="all-linear", r=2)
    check_export(args, peft_config, BACKEND)
    state = random_state(peft_config)
    write_adapter(tmp_path / "adapter", state, args, peft_config, BACKEND)
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * num_modules
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "m"
    _, back = read_peft_adapter(tmp_path / "adapter")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_modules": "all-linear", "rank_pattern": {"q_proj": 3}}, "one r and lora_alpha"),
        ({"target_modules": ["q_proj", "experts.down_proj"]}, "no adapter of gate_proj, up_proj"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_training(tmp_path, fields, words):
    peft_config = LoraConfig(**fields)
    check_export(arguments(tmp_path), peft_config, BACKEND)
    with pytest.raises(ConfigError, match=words):
        check_export(arguments(tmp_path, export_format="per_expert"), peft_config, BACKEND)


def test_another_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"export_format='vllm' is not allowed.*'per_expert'"):
        arguments(tmp_path, export_format="vllm")
