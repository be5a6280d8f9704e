"""The oracle for experts: transformers' own models with a hand-made adapter for every expert and linear, unpacked.

Nothing here is peft's or Megatron-Core's: each adapter is B A x added where its module computes.
"""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from hf_megapack.weights.adapter import lora_spec
from tests.helpers.reference_model import example_loss

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
_QWEN = {
    **_SIZES,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_GLM = {
    **_SIZES,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
}

MOE_CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_QWEN, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_window_tied": lambda: Qwen3MoeConfig(
        **_QWEN,
        head_dim=16,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=60,
        tie_word_embeddings=True,
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_QWEN, shared_expert_intermediate_size=40, mlp_only_layers=[0]),
    "qwen2_moe_top1": lambda: Qwen2MoeConfig(
        **_QWEN | {"num_experts_per_tok": 1}, shared_expert_intermediate_size=40, qkv_bias=False
    ),
    "mixtral": lambda: MixtralConfig(
        **_SIZES,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_GLM,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.0,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4_moe_yarn": lambda: Glm4MoeConfig(
        **_GLM
        | {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "partial_rotary_factor": 0.5,
            }
        },
        n_routed_experts=8,
        num_experts_per_tok=2,
    ),
    "glm4_moe_groups": lambda: Glm4MoeConfig(
        **_GLM,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
    ),
}
"""Tiny models of every family with experts; between them every switch that a family has."""


def save_moe_model(
    config: PretrainedConfig, folder: Path, *, seed: int = 0, is_fused: bool = False, shard_size: str = "5GB"
) -> PretrainedConfig:
    """Save a random model, biases, norms and correction biases included, and return its configuration.

    Args:
        config: What to build.
        folder: Where.
        seed: Of the draws.
        is_fused: Whether the experts of a layer are stored in one tensor, as transformers 5 holds them, instead of one
            by one, as hubs do.
        shard_size: Largest file.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("bias"):
                tensor.normal_(0.0, 0.1)
            elif "norm" in key:
                tensor.normal_(1.0, 0.1)
            elif key.endswith("mlp.gate.weight"):
                tensor.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size, save_original_format=not is_fused)
    return model.config


class MoeReference:
    """A transformers model with the adapter of a backend.

    Args:
        folder: A saved model.
        peft_config: Says the scale of each adapter.
        state: The adapter under the backend's keys: 2-D factors of linears, 3-D factors of experts.
        dtype: To compute in.

    Attributes:
        model: The transformers model.
        factors: The adapter's factors under the same keys, to train or differentiate.
    """

    def __init__(
        self,
        folder: Path,
        peft_config: LoraConfig,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.model.requires_grad_(False)
        self.factors = {key: torch.nn.Parameter(value.to(dtype).clone()) for key, value in state.items()}
        adapters: dict[str, dict[str, tuple]] = {}
        for name in {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in state}:
            pair = [self.factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB"]
            path, _, leaf = name.rpartition(".")
            owner, leaf = (path, leaf) if path.endswith(".experts") else (name, "")
            adapters.setdefault(owner, {})[leaf] = (*pair, lora_spec(peft_config, name).scaling)
        for owner, pairs in adapters.items():
            module = self.model.get_submodule(owner)
            forward = _expert_forward if "" not in pairs else _linear_forward
            module.adapters = pairs
            module.forward = types.MethodType(forward, module)

    def step(self, examples: Sequence[Mapping], *, wants_grad: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the mean loss over all loss-bearing tokens of an update, and its gradient per factor."""
        total = sum(int(np.asarray(example["loss_mask"])[1:].sum()) for example in examples)
        loss_sum = 0.0
        for factor in self.factors.values():
            factor.grad = None
        with torch.set_grad_enabled(wants_grad):
            for example in examples:
                loss = example_loss(self.model, example)
                if wants_grad:
                    (loss / total).backward()
                loss_sum += loss.item()
        gradients = {
            key: torch.zeros_like(factor) if factor.grad is None else factor.grad.clone()
            for key, factor in self.factors.items()
        }
        return loss_sum / total, gradients


def _linear_forward(self, hidden: torch.Tensor) -> torch.Tensor:
    factor_a, factor_b, scaling = self.adapters[""]
    return linear(hidden, self.weight, self.bias) + linear(linear(hidden, factor_a), factor_b) * scaling


def _expert_forward(self, hidden_states: torch.Tensor, top_k_index, top_k_weights) -> torch.Tensor:
    """Every token through its experts; each expert's matrices have adapters of their own."""

    def update(leaf: str, expert: int, tokens: torch.Tensor) -> torch.Tensor | float:
        if leaf not in self.adapters:
            return 0.0
        factor_a, factor_b, scaling = self.adapters[leaf]
        return linear(linear(tokens, factor_a[expert]), factor_b[expert]) * scaling

    output = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        token, place = torch.where(top_k_index == expert)
        tokens = hidden_states[token]
        both = linear(tokens, self.gate_up_proj[expert]) + update("gate_up_proj", expert, tokens)
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate + update("gate_proj", expert, tokens), up + update("up_proj", expert, tokens)
        inner = self.act_fn(gate) * up
        down = linear(inner, self.down_proj[expert]) + update("down_proj", expert, inner)
        output.index_add_(0, token, down * top_k_weights[token, place, None].to(down.dtype))
    return output
