"""The parts of a layer that move memory and multiply no matrices: norm, rotation and activation.

Each is one plain function. On the GPU torch.compile makes one kernel of it, forward and backward, for rows of any
length; on the CPU, and as the twin in tests, it runs as it is written.

Shapes: T slots, C channels, H query heads, G key and value heads, D head size, F half of the rotated dimensions.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import rms_norm, silu

# Kinds of dtype, gradient mode and head size that one process may meet; torch gives up, silently, at 8.
MAX_COMPILATIONS = 64


def allow_compilations(number: int = MAX_COMPILATIONS) -> None:
    """Let torch.compile keep at least this many versions of one function before it falls back to running it eagerly."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, number)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 16 * number)


def compiled_on_gpu(function: Callable) -> Callable:
    """Return the function, which runs as one compiled kernel when its first argument is on the GPU."""

    @functools.cache
    def kernel() -> Callable:
        allow_compilations()
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def dispatch(tensor: torch.Tensor, *args, **kwargs):
        # Inside a compiled region the compiler sees the plain function.
        if tensor.is_cuda and not torch.compiler.is_compiling():
            return kernel()(tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    dispatch.plain = function
    return dispatch


@compiled_on_gpu
def normalise(hidden_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm over the last dimension, computed in float32 for shorter types.

    Args:
        hidden_TC: Floating, shape (..., C).
        weight_C: Same dtype, shape (C,).
        eps: Added to the mean square.
    """
    return rms_norm(hidden_TC, weight_C.shape, weight_C, eps)


@compiled_on_gpu
def swiglu(gate_up_TC: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of a tensor whose last dimension holds the gate half, then the up half.

    Args:
        gate_up_TC: Floating, shape (..., 2 * C).

    Returns:
        Same dtype, shape (..., C).
    """
    gate, up = gate_up_TC.chunk(2, dim=-1)
    return silu(gate) * up


def _rotate(heads_THD: torch.Tensor, cosine_T1F: torch.Tensor, sine_T1F: torch.Tensor) -> torch.Tensor:
    half = cosine_T1F.shape[-1]
    accumulate = torch.promote_types(heads_THD.dtype, torch.float32)
    first, second = heads_THD[..., :half].to(accumulate), heads_THD[..., half : 2 * half].to(accumulate)
    parts = [first * cosine_T1F - second * sine_T1F, second * cosine_T1F + first * sine_T1F]
    rotated = torch.cat(parts, dim=-1).to(heads_THD.dtype)
    return rotated if 2 * half == heads_THD.shape[-1] else torch.cat((rotated, heads_THD[..., 2 * half :]), dim=-1)


@compiled_on_gpu
def split_heads(  # noqa: PLR0913 (one kernel)
    mixed_TC: torch.Tensor,
    rotation_2T1F: torch.Tensor,
    query_norm_D: torch.Tensor | None,
    key_norm_D: torch.Tensor | None,
    num_groups: int,
    head_dim: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take queries, keys and values out of the fused projection, normalise each head, and rotate by position.

    Args:
        mixed_TC: For each key and value head its query heads, key and value. Shape (T, G * (H / G + 2) * D).
        rotation_2T1F: Cosine and sine of each slot's angles. float32, shape (2, T, 1, F), 2 * F at most D: dimension i
            turns with dimension i + F, those from 2 * F on do not turn.
        query_norm_D: Weight of the RMS norm of each query head, None for no norm. Shape (D,).
        key_norm_D: The same for keys.
        num_groups: G.
        head_dim: D.
        eps: Of the norms.

    Returns:
        Queries of shape (T, H, D), keys and values of shape (T, G, D), contiguous.

    Source:
        Order of heads as in `megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors`, 0.19.2;
        rotation as in `transformers.models.llama.modeling_llama.apply_rotary_pos_emb`, 5.24.
    """
    cosine, sine = rotation_2T1F
    grouped = mixed_TC.unflatten(-1, (num_groups, -1, head_dim))
    query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if query_norm_D is not None:
        query = rms_norm(query, (head_dim,), query_norm_D, eps)
    if key_norm_D is not None:
        key = rms_norm(key, (head_dim,), key_norm_D, eps)
    return _rotate(query, cosine, sine).contiguous(), _rotate(key, cosine, sine).contiguous(), value.contiguous()
