"""Qwen2 (and 2.5) and Qwen3, dense.

Source:
    `transformers.models.qwen2.modeling_qwen2`, `transformers.models.qwen3.modeling_qwen3`, 5.24.
"""

from hf_megapack.megatron.families.dense import DenseFamily, sliding_windows

QWEN2 = DenseFamily(model_type="qwen2", has_qkv_bias=lambda config: True, windows=sliding_windows)

QWEN3 = DenseFamily(
    model_type="qwen3",
    has_qkv_bias=lambda config: config.attention_bias,
    has_output_bias=lambda config: config.attention_bias,
    has_qk_norm=True,
    windows=sliding_windows,
)
