"""Weights of models with experts: how checkpoints hold them, who reads what, and which configurations are refused."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from hf_megapack.errors import BackendError, ConfigError
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.families import family_of
from hf_megapack.weights.load import CheckpointReader, draw_parameters, load_parameters
from hf_megapack.weights.names import Part
from tests.helpers.backend_args import backend_args
from tests.helpers.moe_reference import MOE_CONFIGS, save_moe_model

ATTENTION = LoraConfig(r=2, target_modules=["q_proj"])


def weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return every frozen weight and bias under its name."""
    return {k: v for k, v in backend.model.whole_model_parameters().items() if not v.requires_grad}


@pytest.mark.parametrize("name", sorted(MOE_CONFIGS))
def test_fused_and_separate_experts_load_alike(name, tmp_path):
    """In transformers 5 the experts of a layer are one tensor; hubs hold each expert's."""
    loaded = []
    for is_fused in (False, True):
        folder = tmp_path / str(is_fused)
        save_moe_model(MOE_CONFIGS[name](), folder, is_fused=is_fused)
        stored = load_file(folder / "model.safetensors")
        assert any(".experts.0." in key for key in stored) is not is_fused
        assert any(key.endswith("experts.gate_up_proj") for key in stored) is is_fused
        backend = MegatronBackend(str(folder), backend_args(), ATTENTION)
        loaded.append(weights(backend))
        backend.close()
    separate, fused = loaded
    assert list(separate) == list(fused)
    assert any("experts.fc1" in key for key in separate)
    assert all(torch.equal(value, fused[key]) for key, value in separate.items())


def test_the_router_is_float32_in_a_bfloat16_model(tmp_path):
    save_moe_model(MOE_CONFIGS["glm4_moe"](), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    backend = MegatronBackend(str(tmp_path), backend_args(bf16=True), ATTENTION)
    held = weights(backend)
    assert held["decoder.layers.1.mlp.experts.fc1"].dtype == torch.bfloat16
    for ours, theirs in (("weight", "weight"), ("expert_bias", "e_score_correction_bias")):
        router = held[f"decoder.layers.1.mlp.router.{ours}"]
        assert router.dtype == torch.float32
        assert torch.equal(router, stored[f"model.layers.1.mlp.gate.{theirs}"])
    backend.close()


def test_layers_for_multi_token_prediction_are_left_unread_and_others_refused(tmp_path):
    save_moe_model(MOE_CONFIGS["glm4_moe"](), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2), "model.layers.3.mlp.gate.weight": torch.ones(2)}
    save_file(stored | extra, tmp_path / "model.safetensors")
    MegatronBackend(str(tmp_path), backend_args(), ATTENTION).close()
    save_file(stored | {"model.layers.4.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="holds 1 weights"):
        MegatronBackend(str(tmp_path), backend_args(), ATTENTION)


@pytest.mark.parametrize("leaf", ["gate.weight", "experts.gate_up_proj"])
def test_a_weight_under_two_names_is_refused(leaf, tmp_path):
    """Both were taken as read, and one of them was used; transformers uses the other, or fails."""
    save_moe_model(MOE_CONFIGS["mixtral"](), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shape = (4, 32) if leaf == "gate.weight" else (4, 96, 32)
    save_file(stored | {f"model.layers.0.mlp.{leaf}": torch.ones(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="holds the same weight as"):
        MegatronBackend(str(tmp_path), backend_args(), ATTENTION)


def test_a_missing_expert_is_named(tmp_path):
    save_moe_model(MOE_CONFIGS["mixtral"](), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(BackendError, match=name.replace(".", r"\.")):
        MegatronBackend(str(tmp_path), backend_args(), ATTENTION)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_rank_reads_its_own_experts_alone_and_all_ranks_together_read_all(is_fused, tmp_path, monkeypatch):
    config = save_moe_model(MOE_CONFIGS["qwen3_moe"](), tmp_path, is_fused=is_fused)
    family = family_of(config)
    rules = [rule for rule in family.rules(config) if rule.role == "experts"]
    whole = MegatronBackend(str(tmp_path), backend_args(), ATTENTION)
    expected = {rule.parameter: weights(whole)[rule.parameter] for rule in rules}
    total = sum(value.numel() for value in expected.values())
    read = []
    plain_read = CheckpointReader.read

    def counting_read(self, *args, **kwargs):
        value = plain_read(self, *args, **kwargs)
        read.append(value.numel())
        return value

    monkeypatch.setattr(CheckpointReader, "read", counting_read)
    parts = []
    for rank in range(4):
        local = {key: torch.empty(2, *value.shape[1:]) for key, value in expected.items()}
        part = Part(expert_rank=rank, expert_size=4)
        load_parameters(tmp_path, rules, local, family.heads(config), ignored=lambda _: True, part=part)
        parts.append(local)
    assert sum(read) == total
    for key, value in expected.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), value)
    whole.close()


def test_random_experts_are_the_same_in_every_layout():
    config = MOE_CONFIGS["qwen2_moe"]()
    family = family_of(config)
    rule = next(rule for rule in family.rules(config) if rule.role == "experts")
    drawn = []
    for size in (1, 2):
        local = [torch.empty(8 // size, 48, 32) for _ in range(size)]
        for rank, parameter in enumerate(local):
            part = Part(expert_rank=rank, expert_size=size)
            draw_parameters([rule], {rule.parameter: parameter}, family.heads(config), std=0.1, seed=3, part=part)
        drawn.append(torch.cat(local))
    assert torch.equal(*drawn)
    assert len({float(expert.sum()) for expert in drawn[0]}) == 8
    assert drawn[0].std() == pytest.approx(0.1, rel=0.02)


def refused(name: str, **changes):
    """Return a configuration of a family with some fields changed."""
    config = MOE_CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    return config


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (refused("mixtral", router_jitter_noise=0.1), {}, "router_jitter_noise=0.1"),
        (refused("qwen3_moe", output_router_logits=True), {}, "output_router_logits=True"),
        (refused("qwen3_moe", num_experts_per_tok=9), {}, "num_experts_per_tok=9 of 8"),
        (refused("qwen3_moe", num_experts_per_tok=1), {}, "num_experts_per_tok=1 with normalised"),
        (refused("glm4_moe", norm_topk_prob=False), {}, "norm_topk_prob=False with sigmoid"),
        (refused("glm4_moe", routed_scaling_factor=0.0), {}, "routed_scaling_factor=0"),
        (refused("qwen3_moe", decoder_sparse_step=0), {}, "decoder_sparse_step=0"),
        (refused("glm4_moe_groups", topk_group=3), {}, "topk_group=3"),
        (refused("glm4_moe_groups", n_group=3), {}, "n_group=3"),
        (refused("glm4_moe", n_group=3, topk_group=3), {}, "8 experts do not form n_group=3"),
        (refused("glm4_moe", n_group=2, topk_group=4, num_experts_per_tok=8), {}, "topk_group=4 of n_group=2"),
        (refused("qwen2_moe", layer_types=["sliding_attention"] * 4), {}, "sliding_window=0"),
        (refused("mixtral", sliding_window=0), {}, "sliding_window=0"),
        (refused("qwen2_moe", shared_expert_intermediate_size=0), {}, "shared_expert_intermediate_size=0"),
        (refused("qwen3_moe", hidden_act="gelu"), {}, "hidden_act"),
        (DeepseekV3Config(), {}, "latent attention"),
        (LlamaConfig(), {"expert_parallel_size": 2}, "the model has no experts"),
        (refused("qwen3_moe"), {"expert_parallel_size": 3}, "8 experts do not divide"),
        (refused("qwen3_moe"), {"expert_parallel_size": 2}, "expert_parallel_size=2 does not divide the 1 processes"),
        (refused("qwen3_moe"), {"tensor_parallel_size": 2}, "without sequence_parallel"),
        (refused("qwen3_moe"), {"fp8": "tensorwise"}, "fp8='tensorwise'"),
        (refused("qwen3_moe", quantization_config={}), {}, "quantization_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_could_not_be_exact_is_refused_by_name(config, options, message):
    with pytest.raises(ConfigError, match=message):
        MegatronBackend(config, backend_args(**options), ATTENTION)


def test_a_model_whose_layers_are_all_dense_has_no_experts():
    config = refused("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    backend = MegatronBackend(config, backend_args(), ATTENTION)
    assert not any("experts" in name for name in backend.linear_names)
    backend.close()


def test_a_family_without_a_shared_expert_ignores_its_size_as_transformers_does():
    config = refused("qwen3_moe", shared_expert_intermediate_size=40)
    assert not any("shared" in name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters())
    backend = MegatronBackend(config, backend_args(), ATTENTION)
    assert not any("shared" in name for name in backend.linear_names)
    backend.close()


def test_the_index_of_a_sharded_checkpoint_names_what_is_read(tmp_path):
    save_moe_model(MOE_CONFIGS["qwen2_moe"](), tmp_path, shard_size="50KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    MegatronBackend(str(tmp_path), backend_args(), ATTENTION).close()
