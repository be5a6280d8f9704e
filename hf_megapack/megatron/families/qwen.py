"""Qwen2 (and 2.5) and Qwen3, dense and with experts.

Source:
    `transformers.models.qwen2.modeling_qwen2`, `transformers.models.qwen3.modeling_qwen3`,
    `transformers.models.qwen2_moe.modeling_qwen2_moe`, `transformers.models.qwen3_moe.modeling_qwen3_moe`, 5.24.
"""

import dataclasses

from transformers import PretrainedConfig

from hf_megapack.megatron.families.dense import DenseFamily, sliding_windows
from hf_megapack.megatron.families.moe import ExpertSettings, MoeFamily, sparse_steps

QWEN2 = DenseFamily(model_type="qwen2", has_qkv_bias=lambda config: True, windows=sliding_windows)

QWEN3 = DenseFamily(
    model_type="qwen3",
    has_qkv_bias=lambda config: config.attention_bias,
    has_output_bias=lambda config: config.attention_bias,
    has_qk_norm=True,
    windows=sliding_windows,
)


def _settings(config: PretrainedConfig) -> ExpertSettings:
    return ExpertSettings(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        has_experts=sparse_steps(config),
        is_normalised=config.norm_topk_prob,
    )


def _shared_settings(config: PretrainedConfig) -> ExpertSettings:
    size = config.shared_expert_intermediate_size
    return dataclasses.replace(_settings(config), shared_size=size, has_shared_gate=True)


QWEN2_MOE = MoeFamily(
    model_type="qwen2_moe",
    has_qkv_bias=lambda config: config.qkv_bias,
    windows=sliding_windows,
    settings=_shared_settings,
)

QWEN3_MOE = MoeFamily(
    model_type="qwen3_moe",
    has_qkv_bias=lambda config: config.attention_bias,
    has_output_bias=lambda config: config.attention_bias,
    has_qk_norm=True,
    windows=lambda config: [config.sliding_window] * config.num_hidden_layers,
    settings=_settings,
)
