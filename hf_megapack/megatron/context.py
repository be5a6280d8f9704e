"""Context parallelism over a row: each rank computes its own slots, and holds keys and values of those that they see.

For tree attention each rank sends the others keys and values of the slots that theirs see, and gets back gradients of
what it sent. A rank then counts slots as if the row had no others than those that its own see: order and visibility
stay what they are. Attention over sequences passes keys and values from rank to rank itself.

Labels fall on some slots only, on those of one rank more than on another's: before the head, hidden states travel until
all ranks have equally many with a label.

Shapes: L slots of this rank, T slots that they see, S slots sent to other ranks, one counted for each of them, R slots
received, G key and value heads, D head size; N slots of this rank that have a label, M whose losses it computes, C
channels.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hf_megapack.megatron.host import integers_on_device
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.packing.context import RowSplit, moves_to_even, split_row, split_sequences


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ContextShare:
    """What one rank holds of a row, on its device.

    Attributes:
        slots: Where this rank's slots stand among those that they see, ascending. int64, shape (L,).
        pieces: The seen slots as runs, each of which follows the one before: whether it is of this rank's slots or of
            those received, its first place there and the one after its last.
        sent: Which of this rank's slots each other rank sees, one rank after the other. int64, shape (S,).
        received: Where what the others send stands among the seen slots, one rank after the other. int64, shape (R,).
        sent_sizes: How many go to each rank, none to this one.
        received_sizes: How many come from each rank.
        group: The ranks that share the row.
    """

    slots: torch.Tensor
    pieces: list[tuple[bool, int, int]]
    sent: torch.Tensor
    received: torch.Tensor
    sent_sizes: list[int]
    received_sizes: list[int]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, split: RowSplit, rank: int, group: dist.ProcessGroup | None) -> "ContextShare":
        """Return what a rank holds of a row.

        Args:
            split: Of the row.
            rank: Among those that share it.
            group: These ranks.
        """
        own, seen = split.slots[rank], split.seen[rank]
        sent = [_places_among(own, other, split.slots.size) for other in split.seen]
        received = [_places_among(seen, other, split.slots.size) for other in split.slots]
        sent[rank] = received[rank] = np.empty(0, dtype=np.int64)
        own_places = _places_among(seen, own, split.slots.size)
        return cls(
            slots=integers_on_device(own_places),
            pieces=_pieces(own_places, np.concatenate(received)),
            sent=integers_on_device(np.concatenate(sent)),
            received=integers_on_device(np.concatenate(received)),
            sent_sizes=[places.size for places in sent],
            received_sizes=[places.size for places in received],
            group=group,
        )


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LossShare:
    """Which losses one rank computes for others, or they for it.

    Attributes:
        num_kept: Of its own slots with a label, so many stay, the first ones.
        sent_sizes: How many go to each rank, one rank after the other.
        received_sizes: How many come from each.
        group: The ranks that share the row.
    """

    num_kept: int
    sent_sizes: list[int]
    received_sizes: list[int]
    group: dist.ProcessGroup | None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowPart:
    """What one rank needs to know of a row, on the host.

    Attributes:
        slots_by_rank: Slots of each rank that shares the row, in the row's count. int64, shape (num_ranks, L).
        slots: This rank's.
        position_ids: Depth in its example of each slot that they see. Integer, shape (T,).
        subtree_end: First of the seen slots after the subtree that begins at each, in their own count. Integer, shape
            (T,).
        share: Of the row, on the device; None where rows are not shared.
    """

    slots_by_rank: np.ndarray
    slots: np.ndarray
    position_ids: np.ndarray
    subtree_end: np.ndarray
    share: ContextShare | None


def part_of_row(
    position_ids: np.ndarray, subtree_end: np.ndarray, layout: ParallelLayout, cu_seqlens: np.ndarray | None = None
) -> RowPart:
    """Return what this rank has to do with a row.

    Args:
        position_ids: Depth of each slot of the row in its example. Integer, shape (num_slots,).
        subtree_end: First slot after the subtree that begins at each slot. Integer, same shape.
        layout: Where this rank stands.
        cu_seqlens: Boundaries of the row's sequences, to cut each of them; None deals blocks of the whole row.

    Raises:
        DataError: If the row, or one of its sequences, cannot be cut into equal parts.
    """
    if layout.context_size == 1:
        slots = np.arange(subtree_end.size)
        return RowPart(
            slots_by_rank=slots[None], slots=slots, position_ids=position_ids, subtree_end=subtree_end, share=None
        )
    if cu_seqlens is None:
        split = split_row(subtree_end, layout.context_size)
    else:
        split = split_sequences(cu_seqlens, layout.context_size)
    seen = split.seen[layout.context_rank]
    num_seen_before = np.zeros(subtree_end.size + 1, dtype=np.int64)
    num_seen_before[seen + 1] = 1
    num_seen_before = np.cumsum(num_seen_before)
    return RowPart(
        slots_by_rank=split.slots,
        slots=split.slots[layout.context_rank],
        position_ids=position_ids[seen],
        subtree_end=num_seen_before[subtree_end[seen]],
        share=ContextShare.of(split, layout.context_rank, layout.context_group),
    )


def share_losses(is_learned: np.ndarray, part: RowPart, layout: ParallelLayout) -> tuple[np.ndarray, LossShare | None]:
    """Return whose losses this rank computes.

    Args:
        is_learned: Which slots of the row have a label. bool, shape (num_slots,).
        part: What this rank has of the row.
        layout: Where this rank stands.

    Returns:
        The slots in the row's count, in the order in which `even_out` returns their hidden states, shape (M,); and the
        share, None where every rank computes its own.
    """
    learned = [slots[is_learned[slots]] for slots in part.slots_by_rank]
    rank = layout.context_rank
    moves = moves_to_even(np.array([slots.size for slots in learned]))
    if not moves.any():
        return learned[rank], None
    num_kept = [slots.size - moved for slots, moved in zip(learned, moves.sum(axis=1), strict=True)]
    given = [np.split(slots[kept:], np.cumsum(row)) for slots, kept, row in zip(learned, num_kept, moves, strict=True)]
    share = LossShare(
        num_kept=int(num_kept[rank]),
        sent_sizes=moves[rank].tolist(),
        received_sizes=moves[:, rank].tolist(),
        group=layout.context_group,
    )
    return np.concatenate([learned[rank][: share.num_kept], *(parts[rank] for parts in given)]), share


def _pieces(own: np.ndarray, received: np.ndarray) -> list[tuple[bool, int, int]]:
    """Return where each of the seen slots comes from, as runs: see `ContextShare`.

    Args:
        own: Places of this rank's slots among the seen ones, ascending.
        received: Places of those received, in the order in which they come.
    """
    is_own = np.zeros(own.size + received.size, dtype=bool)
    is_own[own] = True
    source = np.empty(is_own.size, dtype=np.int64)
    source[own], source[received] = np.arange(own.size), np.arange(received.size)
    starts = np.flatnonzero((np.diff(source, prepend=-1) != 1) | (np.diff(is_own, prepend=~is_own[:1])))
    sizes = np.diff(starts, append=is_own.size)
    return list(zip(is_own[starts].tolist(), source[starts].tolist(), (source[starts] + sizes).tolist(), strict=True))


def _places_among(slots: np.ndarray, others: np.ndarray, num_slots: int) -> np.ndarray:
    """Return where in `slots` those stand that are among others, of a row of so many slots."""
    is_among = np.zeros(num_slots, dtype=bool)
    is_among[others] = True
    return np.flatnonzero(is_among[slots])


class _FetchSlots(torch.autograd.Function):
    """Fetch two tensors: while one travels, the other is put together."""

    @staticmethod
    def forward(ctx, key, value, share):
        ctx.share = share
        travelling = [
            _exchange(local.index_select(0, share.sent), share.sent_sizes, share.received_sizes, share.group)
            for local in (key, value)
        ]
        return tuple(
            _put_together(local, _arrived(*one), share.pieces)
            for local, one in zip((key, value), travelling, strict=True)
        )

    @staticmethod
    def backward(ctx, *grads):
        share = ctx.share
        travelling = [
            _exchange(grad.index_select(0, share.received), share.received_sizes, share.sent_sizes, share.group)
            for grad in grads
        ]
        own = [grad.index_select(0, share.slots) for grad in grads]
        return *(_add(grad, _arrived(*one), share) for grad, one in zip(own, travelling, strict=True)), None


def _exchange(
    outgoing: torch.Tensor, sizes_out: list[int], sizes_in: list[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work]:
    incoming = outgoing.new_empty(sum(sizes_in), *outgoing.shape[1:])
    return incoming, dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=group, async_op=True)


def _arrived(tensor: torch.Tensor, work: dist.Work) -> torch.Tensor:
    work.wait()
    return tensor


def _put_together(own: torch.Tensor, received: torch.Tensor, pieces: list[tuple[bool, int, int]]) -> torch.Tensor:
    """Return the seen slots, by one copy of runs: copies of single slots take several times as long."""
    return torch.cat([(own if is_own else received)[start:stop] for is_own, start, stop in pieces])


def _add(own: torch.Tensor, returned: torch.Tensor, share: ContextShare) -> torch.Tensor:
    """Add what came back for the slots that were sent, in the order of the ranks, and round once."""
    is_one_sum = len(share.sent_sizes) == 2
    total = own if is_one_sum else own.to(torch.promote_types(own.dtype, torch.float32))
    parts = zip(share.sent.split(share.sent_sizes), returned.split(share.sent_sizes), strict=True)
    for places, part in parts:
        total.index_copy_(0, places, total.index_select(0, places) + part)
    return total.to(own.dtype)


def fetch_keys_and_values(
    key_LGD: torch.Tensor, value_LGD: torch.Tensor, share: ContextShare
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the slots that this rank's slots see, from those that each rank has. A collective.

    Args:
        key_LGD: Shape (L, G, D).
        value_LGD: Shape (L, G, D).
        share: What this rank holds.

    Returns:
        Both in the row's order, shape (T, G, D).
    """
    return _FetchSlots.apply(key_LGD, value_LGD, share)


class _EvenOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, share):
        ctx.share = share
        kept, sent = own.tensor_split([share.num_kept])
        return torch.cat((kept, _arrived(*_exchange(sent, share.sent_sizes, share.received_sizes, share.group))))

    @staticmethod
    def backward(ctx, grad):
        share = ctx.share
        kept, received = grad.tensor_split([share.num_kept])
        returned = _exchange(received.contiguous(), share.received_sizes, share.sent_sizes, share.group)
        return torch.cat((kept, _arrived(*returned))), None


def even_out(hidden_NC: torch.Tensor, share: LossShare) -> torch.Tensor:
    """Return hidden states of the slots whose losses this rank computes, from those of its own slots. A collective.

    Args:
        hidden_NC: Of this rank's slots with a label, ascending. Contiguous, shape (N, C).
        share: From `share_losses`.

    Returns:
        Shape (M, C).
    """
    return _EvenOut.apply(hidden_NC, share)
