"""Which models can be trained, and how each one's configuration and weights map to Megatron-Core."""

from transformers import PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.families.dense import DenseFamily
from hf_megapack.megatron.families.llama import LLAMA, MISTRAL
from hf_megapack.megatron.families.qwen import QWEN2, QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def family_of(config: PretrainedConfig) -> DenseFamily:
    """Return the family of a transformers configuration.

    Args:
        config: transformers configuration.

    Raises:
        ConfigError: If the model type is unknown, or the checkpoint is quantised.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {config.model_type!r} is not supported. Supported: {', '.join(sorted(FAMILIES))} (dense)."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "The model's config.json has a quantization_config. Quantised base weights are not supported: name the "
            "original checkpoint instead."
        )
    return FAMILIES[config.model_type]


__all__ = ["FAMILIES", "DenseFamily", "family_of"]
