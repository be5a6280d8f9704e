"""Query, key and value heads where ranks share a row: each fetches keys and values that its own slots see.

On a GPU keys and values are made first, in their places among the seen ones, and queries while they travel; in the
backward pass the queries' gradient is taken back while those of keys and values do. Elsewhere one after the other.

Shapes: L slots of this rank, T slots that they see, H query heads, G key and value heads, D head size.
"""

import torch

from hf_megapack.kernels.pointwise import FUSED_DTYPES, HeadNorm, plain_split_heads
from hf_megapack.megatron.context import ContextShare, Fetch, GradientReturn, fetch_keys_and_values


# Collectives are not to be traced, nor what runs beside them to be moved.
@torch.compiler.disable
def split_and_fetch_heads(
    mixed_LC: torch.Tensor,
    rotation_2L1F: torch.Tensor,
    norm: HeadNorm | None,
    share: ContextShare,
    *,
    num_groups: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries of this rank's slots, and keys and values of the slots that they see. A collective.

    Args:
        mixed_LC: For each key and value head its query heads, key and value. Shape (L, G * (H / G + 2) * D).
        rotation_2L1F: As for `pointwise.split_heads`.
        norm: Norm of the heads, None for none.
        share: What this rank holds of the row.
        num_groups: G.
        head_dim: D.

    Returns:
        Shapes (L, H, D), (T, G, D) and (T, G, D).
    """
    if mixed_LC.is_cuda and mixed_LC.dtype in FUSED_DTYPES:
        return _SplitAndFetch.apply(mixed_LC, rotation_2L1F, norm, share, num_groups, head_dim)
    query, key, value = plain_split_heads(mixed_LC, rotation_2L1F, norm, num_groups=num_groups, head_dim=head_dim)
    return query, *fetch_keys_and_values(key, value, share)


class _SplitAndFetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, rotation, norm, share, num_groups, head_dim):  # noqa: PLR0913 (all that the caller has)
        from hf_megapack.kernels.fused_pointwise import HeadSplit

        mixed, rotation = mixed.contiguous(), rotation.contiguous()
        num_slots, group_size = mixed.shape[0], mixed.shape[1] // (num_groups * head_dim)
        query = mixed.new_empty(num_slots, num_groups * (group_size - 2), head_dim)
        key, value = mixed.new_empty(2, share.num_seen, num_groups, head_dim).unbind()
        ctx.share, ctx.split = share, HeadSplit(rotation, norm, (num_groups, group_size, head_dim), share.slots)
        ctx.mixed_shape = mixed.shape
        # Without a norm the gradient needs no more than the angles.
        ctx.save_for_backward(*([mixed] if norm is not None else []))
        ctx.split.forward(HeadSplit.KEYS, mixed, (query, key, value))
        fetch = Fetch((key, value), share)
        ctx.split.forward(HeadSplit.QUERIES, mixed, (query, key, value))
        fetch.wait()
        return query, key, value

    @staticmethod
    def backward(ctx, grad_query, grad_key, grad_value):
        from hf_megapack.kernels.fused_pointwise import HeadSplit

        mixed = ctx.saved_tensors[0] if ctx.saved_tensors else None
        grads = grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous()
        grad_mixed = grad_query.new_empty(ctx.mixed_shape)
        returned = GradientReturn(grads[1:], ctx.share)
        ctx.split.backward(HeadSplit.QUERIES, mixed, grads, grad_mixed)
        ctx.split.backward(HeadSplit.KEYS, mixed, (grads[0], *returned.wait()), grad_mixed)
        return grad_mixed, None, None, None, None, None
