"""What a layer does to its tensors between two matrix products: norm, activation, heads normalised and rotated.

On a GPU each is one Triton kernel forward and one backward; elsewhere, and for other dtypes, the plain PyTorch here.

Shapes: T slots, C channels, H query heads, G key and value heads, D head size, F half of the rotated dimensions.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class HeadNorm(NamedTuple):
    """The RMS norm of each query and key head.

    Attributes:
        query_D: Frozen weight for queries. Shape (D,).
        key_D: Frozen weight for keys. Shape (D,).
        eps: Added to the mean square.
    """

    query_D: torch.Tensor
    key_D: torch.Tensor
    eps: float


def swiglu(gate_up_TC: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of a tensor whose last dimension holds the gate half, then the up half.

    Args:
        gate_up_TC: Floating, shape (..., 2 * C).

    Returns:
        Same dtype, shape (..., C).
    """
    if gate_up_TC.is_cuda and gate_up_TC.dtype in FUSED_DTYPES:
        from hf_megapack.kernels.fused_pointwise import FusedSwiglu

        return FusedSwiglu.apply(gate_up_TC)
    return plain_swiglu(gate_up_TC)


def plain_swiglu(gate_up_TC: torch.Tensor) -> torch.Tensor:
    """Do what `swiglu` says in plain PyTorch."""
    gate, up = gate_up_TC.chunk(2, dim=-1)
    return silu(gate) * up


def norm_and_residual(hidden_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of a residual stream and the stream itself, to be read on in its place.

    Whoever reads the stream through the second result leaves the sum of both gradients to one pass of the norm's.

    Args:
        hidden_TD: Floating, shape (..., D).
        weight_D: Frozen weight, shape (D,).
        eps: Added to the mean square.

    Returns:
        Two tensors of the same dtype and shape.

    Source:
        `torch.nn.functional.rms_norm`, torch 2.13: float32 inside, rounded once.
    """
    # In a compiled layer inductor joins the plain form with what stands around it.
    if hidden_TD.is_cuda and hidden_TD.dtype in FUSED_DTYPES and not torch.compiler.is_compiling():
        from hf_megapack.kernels.fused_pointwise import FusedNormAndResidual

        return FusedNormAndResidual.apply(hidden_TD, weight_D, eps)
    return plain_norm_and_residual(hidden_TD, weight_D, eps)


def plain_norm_and_residual(
    hidden_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `norm_and_residual` says in plain PyTorch."""
    return rms_norm(hidden_TD, weight_D.shape, weight_D, eps), hidden_TD


def split_heads(
    mixed_TC: torch.Tensor, rotation_2T1F: torch.Tensor, norm: HeadNorm | None, *, num_groups: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take queries, keys and values out of the fused projection, normalise each head, and rotate by position.

    Args:
        mixed_TC: For each key and value head its query heads, key and value. Shape (T, G * (H / G + 2) * D).
        rotation_2T1F: Cosine and sine of each slot's angles. float32, shape (2, T, 1, F), 2 * F at most D: dimension i
            turns with dimension i + F, those from 2 * F on do not turn.
        norm: Norm of the heads, None for none.
        num_groups: G.
        head_dim: D.

    Returns:
        Queries of shape (T, H, D), keys and values of shape (T, G, D), contiguous.

    Source:
        Order of heads as in `megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors`, 0.19.2;
        rotation as in `transformers.models.llama.modeling_llama.apply_rotary_pos_emb`, 5.24.
    """
    if mixed_TC.is_cuda and mixed_TC.dtype in FUSED_DTYPES:
        from hf_megapack.kernels.fused_pointwise import FusedSplitHeads

        return FusedSplitHeads.apply(mixed_TC, rotation_2T1F, norm, num_groups, head_dim)
    return plain_split_heads(mixed_TC, rotation_2T1F, norm, num_groups=num_groups, head_dim=head_dim)


def plain_split_heads(
    mixed_TC: torch.Tensor, rotation_2T1F: torch.Tensor, norm: HeadNorm | None, *, num_groups: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `split_heads` says in plain PyTorch."""
    grouped = mixed_TC.unflatten(-1, (num_groups, -1, head_dim))
    query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if norm is not None:
        query = rms_norm(query, (head_dim,), norm.query_D, norm.eps)
        key = rms_norm(key, (head_dim,), norm.key_D, norm.eps)
    return _rotate(query, rotation_2T1F), _rotate(key, rotation_2T1F), value.contiguous()


def _rotate(heads_THD: torch.Tensor, rotation_2T1F: torch.Tensor) -> torch.Tensor:
    cosine, sine = rotation_2T1F.to(torch.promote_types(heads_THD.dtype, torch.float32))
    half = cosine.shape[-1]
    first, second = heads_THD[..., :half], heads_THD[..., half : 2 * half]
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads_THD.dtype)
    return turned if 2 * half == heads_THD.shape[-1] else torch.cat((turned, heads_THD[..., 2 * half :]), dim=-1)
