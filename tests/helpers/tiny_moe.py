"""Tiny random mixture-of-experts models of transformers, and the names that this package has for their projections."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# Every family but Mixtral has one dense layer; Qwen2 and GLM have shared experts too.
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, moe_intermediate_size=16, num_experts=4, mlp_only_layers=[1]),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_SIZES, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4, mlp_only_layers=[1]
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_SIZES, moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
}
FAMILIES = sorted(CONFIGS)
NUM_EXPERTS = 4


def tiny_moe(family: str, device: str = "cpu") -> PreTrainedModel:
    """Return a float32 model of three layers with four experts, the same weights at every call.

    Args:
        family: One of FAMILIES.
        device: "cpu", or "meta" for a model without weights.
    """
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()


def moe_linear_names(model: PreTrainedModel) -> list[str]:
    """Return the linear modules of a model, with the stacked experts of a layer as three of them.

    Args:
        model: A model whose experts hold `gate_up_proj` and `down_proj`, as in transformers 5.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            names.append(name)
        elif getattr(module, "gate_up_proj", None) is not None:
            names += [f"{name}.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")]
    return names
