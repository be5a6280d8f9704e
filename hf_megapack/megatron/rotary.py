"""Rotary angles by position, so that a branch of a prefix tree starts again at the depth of its parent.

Frequencies come from transformers, as the model's own code computes them. Scalings that depend on the length of a
sequence are refused: a shared prefix belongs to sequences of several lengths at once.
"""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_megapack.errors import ConfigError

LENGTH_DEPENDENT = ("dynamic", "longrope")


def rotary_frequencies(config: PretrainedConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies of a model and the factor on its rotated queries and keys.

    Args:
        config: transformers 5 configuration, whose `rope_parameters` name the scaling.
        head_dim: Size of one attention head.

    Returns:
        Inverse frequencies, float32, shape (head_dim / 2,), in radians per position, and the attention factor by which
        transformers multiplies both the cosine and the sine (1.0 for most scalings).

    Raises:
        ConfigError: If the scaling is unknown, depends on sequence length, or rotates only part of a head.

    Source:
        `transformers.models.llama.modeling_llama.LlamaRotaryEmbedding`, 5.24.
    """
    parameters = config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type in LENGTH_DEPENDENT:
        raise ConfigError(
            f"rope_type {rope_type!r} changes its frequencies with the length of each sequence, so a prefix shared by "
            "sequences of different lengths has no single value. Allowed: default and every type of transformers' "
            f"ROPE_INIT_FUNCTIONS except {', '.join(LENGTH_DEPENDENT)}. Use a model with yarn, llama3 or linear."
        )
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        frequencies, factor = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    elif rope_type in ROPE_INIT_FUNCTIONS:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config)
    else:
        raise ConfigError(
            f"rope_type {rope_type!r} is unknown to the installed transformers, which has "
            f"{', '.join(['default', *ROPE_INIT_FUNCTIONS])}."
        )
    if frequencies.numel() * 2 != head_dim:
        raise ConfigError(
            f"The model rotates {frequencies.numel() * 2} of {head_dim} dimensions of a head. Only fully rotated heads "
            "are supported (partial_rotary_factor 1.0)."
        )
    return frequencies.float(), float(factor)


def rotation(position_ids: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return cosine and sine of every slot's rotation angles.

    Args:
        position_ids: Depth of each slot in its example. Integer, shape (T,).
        frequencies: Inverse frequencies in radians per position. float32, shape (F,).

    Returns:
        float32, shape (2, T, 1, F): what `kernels.pointwise.split_heads` takes.
    """
    angles = position_ids.float()[:, None, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))
