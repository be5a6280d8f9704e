"""Rotary angles by position, so that a branch of a prefix tree starts again at the depth of its parent.

Frequencies come from transformers, as the model's own code computes them. Scalings that depend on the length of a
sequence are refused: a shared prefix belongs to sequences of several lengths at once.
"""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_megapack.errors import ConfigError

LENGTH_DEPENDENT = ("dynamic", "longrope")
# The others ignore partial_rotary_factor, or cannot compute with it.
PARTLY_ROTATED = ("glm4_moe",)


def rotary_frequencies(config: PretrainedConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies of a model and the factor on its rotated queries and keys.

    Args:
        config: transformers 5 configuration, whose `rope_parameters` name the scaling.
        head_dim: Size of one attention head.

    Returns:
        Inverse frequencies, float32, shape (head_dim / 2,), or fewer where only the first dimensions of a head are
        rotated, in radians per position, and the attention factor by which transformers multiplies both the cosine and
        the sine (1.0 for most scalings).

    Raises:
        ConfigError: If the scaling is unknown or depends on sequence length, its parameters differ by type of layer
            or give no frequencies, or the model would rotate part of a head and its transformers class cannot.

    Source:
        `transformers.models.llama.modeling_llama.LlamaRotaryEmbedding` and
        `transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeRotaryEmbedding`, 5.24.
    """
    parameters = config.rope_parameters
    if "rope_type" not in parameters:
        raise ConfigError(
            f"rope_parameters of the model's config has no rope_type, only {', '.join(map(str, parameters))}. "
            f"{config.model_type} rotates all its layers alike, in transformers too: give one set of parameters, not "
            "one for each type of layer."
        )
    rope_type = parameters["rope_type"]
    if rope_type in LENGTH_DEPENDENT:
        raise ConfigError(
            f"rope_type {rope_type!r} changes its frequencies with the length of each sequence, so a prefix shared by "
            "sequences of different lengths has no single value. Allowed: default and every type of transformers' "
            f"ROPE_INIT_FUNCTIONS except {', '.join(LENGTH_DEPENDENT)}. Use a model with yarn, llama3 or linear."
        )
    is_partial = config.model_type in PARTLY_ROTATED
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) if is_partial else head_dim
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"rope_type {rope_type!r} is unknown to the installed transformers, which has "
            f"{', '.join(['default', *ROPE_INIT_FUNCTIONS])}."
        )
    try:
        if rope_type == "default":
            exponents = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
            frequencies, factor = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"The model's config gives no rotary frequencies, in transformers neither: {error!r}; "
            f"rope_parameters={dict(parameters)!r} and head_dim={getattr(config, 'head_dim', None)!r}. Give them "
            "numbers; yarn needs a head_dim."
        ) from error
    # Where a class rotates part of a head, it takes as many frequencies as there are: an odd part is rounded up, and
    # "proportional" gives all.
    fits = frequencies.numel() * 2 <= head_dim if is_partial else frequencies.numel() * 2 == rotated
    if not fits:
        raise ConfigError(
            f"The model rotates {frequencies.numel() * 2} of {head_dim} dimensions of a head; {config.model_type} is "
            f"supported with {rotated} (partial_rotary_factor)."
        )
    return frequencies.float(), float(factor)


def rotation(position_ids: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return cosine and sine of every slot's rotation angles.

    Args:
        position_ids: Depth of each slot in its example. Integer, shape (T,).
        frequencies: Inverse frequencies in radians per position. float32, shape (F,).
        factor: On both, as `rotary_frequencies` returns it.

    Returns:
        float32, shape (2, T, 1, F): what `kernels.pointwise.split_heads` takes.
    """
    angles = position_ids.float()[:, None, None] * frequencies
    return torch.stack((angles.cos() * factor, angles.sin() * factor))
