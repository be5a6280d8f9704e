"""Llama, Mistral and Mixtral.

Source:
    `transformers.models.llama.modeling_llama`, `transformers.models.mistral.modeling_mistral`,
    `transformers.models.mixtral.modeling_mixtral`, 5.24.
"""

from transformers import PretrainedConfig

from hf_megapack.megatron.families.dense import DenseFamily
from hf_megapack.megatron.families.moe import ExpertSettings, MoeFamily

LLAMA = DenseFamily(
    model_type="llama",
    has_qkv_bias=lambda config: config.attention_bias,
    has_output_bias=lambda config: config.attention_bias,
    has_mlp_bias=lambda config: config.mlp_bias,
)


def _one_window(config: PretrainedConfig) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


MISTRAL = DenseFamily(model_type="mistral", windows=_one_window)

MIXTRAL = MoeFamily(
    model_type="mixtral",
    windows=_one_window,
    settings=lambda config: ExpertSettings(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        has_experts=(True,) * config.num_hidden_layers,
    ),
    old_block="block_sparse_moe",
    old_projections=("w1", "w3", "w2"),
)
