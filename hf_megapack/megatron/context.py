"""Context parallelism over a row: each rank computes its own slots and sees the keys and values of all.

For tree attention keys and values are gathered over the ranks that share the row and put in the row's order, so that
masks use slot numbers of the whole row; their gradients go back the same way and are summed. Attention over sequences
passes them from rank to rank itself.

Shapes: T slots of the row, L slots of this rank, G key and value heads, D head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hf_megapack.megatron.host import integers_on_device
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.packing.context import split_row, split_sequences


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ContextShare:
    """What one rank holds of a row, on its device.

    Attributes:
        slots: Slots of this rank, ascending. int64, shape (L,).
        slots_by_rank: Slots of all ranks, one rank after the other. int64, shape (T,).
        place_of_slot: Where each slot stands in `slots_by_rank`. int64, shape (T,).
        group: The ranks that share the row.
    """

    slots: torch.Tensor
    slots_by_rank: torch.Tensor
    place_of_slot: torch.Tensor
    group: dist.ProcessGroup


def share_row(
    subtree_end: np.ndarray, layout: ParallelLayout, cu_seqlens: np.ndarray | None = None
) -> tuple[np.ndarray, ContextShare | None]:
    """Return this rank's slots of a row, on the host and on the device.

    Args:
        subtree_end: First slot after the subtree that begins at each slot. Integer, shape (T,).
        layout: Where this rank stands.
        cu_seqlens: Boundaries of the row's sequences, to cut each of them; None deals blocks of the whole row.

    Returns:
        int64, shape (L,), and the share, None where rows are not shared.

    Raises:
        DataError: If the row, or one of its sequences, cannot be cut into equal parts.
    """
    if layout.context_size == 1:
        return np.arange(subtree_end.size), None
    if cu_seqlens is None:
        slots = split_row(subtree_end, layout.context_size).slots
    else:
        slots = split_sequences(cu_seqlens, layout.context_size).slots
    slots_by_rank = slots.ravel()
    place_of_slot = np.empty_like(slots_by_rank)
    place_of_slot[slots_by_rank] = np.arange(slots_by_rank.size)
    share = ContextShare(
        slots=integers_on_device(slots[layout.context_rank]),
        slots_by_rank=integers_on_device(slots_by_rank),
        place_of_slot=integers_on_device(place_of_slot),
        group=layout.context_group,
    )
    return slots[layout.context_rank], share


class _GatherSlots(torch.autograd.Function):
    """Gather two tensors at once: while one travels the other is put in order."""

    @staticmethod
    def forward(ctx, key, value, share):
        ctx.share = share
        travelling = [_start_gather(local, share) for local in (key, value)]
        return tuple(_arrived(*one).index_select(0, share.place_of_slot) for one in travelling)

    @staticmethod
    def backward(ctx, *grads):
        share = ctx.share
        travelling = [_start_sum(grad.index_select(0, share.slots_by_rank), share) for grad in grads]
        return *(_arrived(*one) for one in travelling), None


def _start_gather(local: torch.Tensor, share: ContextShare) -> tuple[torch.Tensor, dist.Work]:
    gathered = local.new_empty(share.slots_by_rank.numel(), *local.shape[1:])
    return gathered, dist.all_gather_into_tensor(gathered, local.contiguous(), group=share.group, async_op=True)


def _start_sum(grad_by_rank: torch.Tensor, share: ContextShare) -> tuple[torch.Tensor, dist.Work]:
    local = grad_by_rank.new_empty(share.slots.numel(), *grad_by_rank.shape[1:])
    return local, dist.reduce_scatter_tensor(local, grad_by_rank, group=share.group, async_op=True)


def _arrived(tensor: torch.Tensor, work: dist.Work) -> torch.Tensor:
    work.wait()
    return tensor


def gather_keys_and_values(
    key_LGD: torch.Tensor, value_LGD: torch.Tensor, share: ContextShare
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the whole row, from those of this rank.

    Args:
        key_LGD: Shape (L, G, D).
        value_LGD: Shape (L, G, D).
        share: What this rank holds.

    Returns:
        Both in the row's order, shape (T, G, D).
    """
    return _GatherSlots.apply(key_LGD, value_LGD, share)
