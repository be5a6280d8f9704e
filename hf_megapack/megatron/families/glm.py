"""GLM-4.5 and 4.6 with experts.

Source:
    `transformers.models.glm4_moe.modeling_glm4_moe`, 5.24.
"""

from transformers import PretrainedConfig

from hf_megapack.megatron.families.moe import ExpertSettings, MoeFamily


def _settings(config: PretrainedConfig) -> ExpertSettings:
    return ExpertSettings(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        has_experts=tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)),
        score="sigmoid",
        is_normalised=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=config.n_group,
        num_chosen_groups=config.topk_group,
        has_bias=True,
        shared_size=config.moe_intermediate_size * config.n_shared_experts or None,
    )


GLM4_MOE = MoeFamily(
    model_type="glm4_moe",
    has_qkv_bias=lambda config: config.attention_bias,
    wants_qk_norm=lambda config: config.use_qk_norm,
    settings=_settings,
    shared_name="shared_experts",
    num_extra_layers=lambda config: getattr(config, "num_nextn_predict_layers", 0) or 0,
)
