"""Llama and Mistral.

Source:
    `transformers.models.llama.modeling_llama`, `transformers.models.mistral.modeling_mistral`, 5.24.
"""

from hf_megapack.megatron.families.dense import DenseFamily

LLAMA = DenseFamily(
    model_type="llama",
    has_qkv_bias=lambda config: config.attention_bias,
    has_output_bias=lambda config: config.attention_bias,
    has_mlp_bias=lambda config: config.mlp_bias,
)

MISTRAL = DenseFamily(
    model_type="mistral",
    windows=lambda config: [config.sliding_window] * config.num_hidden_layers,
)
