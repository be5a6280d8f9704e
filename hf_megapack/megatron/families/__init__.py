"""Which models can be trained, and how each one's configuration and weights map to Megatron-Core."""

from transformers import PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.families.dense import DenseFamily
from hf_megapack.megatron.families.glm import GLM4_MOE
from hf_megapack.megatron.families.llama import LLAMA, MISTRAL, MIXTRAL
from hf_megapack.megatron.families.moe import ExpertSettings, MoeFamily
from hf_megapack.megatron.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from hf_megapack.weights.load import SINGLE_FILE

FAMILIES = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE)
}


def family_of(config: PretrainedConfig) -> DenseFamily:
    """Return the family of a transformers configuration.

    Args:
        config: transformers configuration.

    Raises:
        ConfigError: If the model type is unknown, its attention is latent, its layers differ in their fields, or the
            checkpoint is quantised or in a file of another name.
    """
    # transformers reads other values for such a layer, or refuses to read any. Older releases keep the field as it is.
    varied = config.to_dict().get("per_layer_config")
    if varied:
        raise ConfigError(
            f"per_layer_config in the model's config sets fields of single layers ({', '.join(map(str, varied))}), "
            "which is not supported: every layer is built alike. Take it out if the layers do not differ."
        )
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(
            f"model_type {config.model_type!r} has multi-head latent attention (kv_lora_rank={config.kv_lora_rank}), "
            "which is not supported."
        )
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {config.model_type!r} is not supported. Supported: {', '.join(sorted(FAMILIES))}."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "The model's config.json has a quantization_config. Quantised base weights are not supported: name the "
            "original checkpoint instead."
        )
    weights = getattr(config, "transformers_weights", None)
    if weights not in (None, SINGLE_FILE):
        raise ConfigError(
            f"transformers_weights={weights!r} in the model's config.json names the file that transformers reads; here "
            f"{SINGLE_FILE} and its shards are read. Load the model with transformers and save it with save_pretrained."
        )
    return FAMILIES[config.model_type].resolved(config)


__all__ = ["FAMILIES", "DenseFamily", "ExpertSettings", "MoeFamily", "family_of"]
