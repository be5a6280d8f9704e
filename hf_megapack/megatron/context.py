"""Context parallelism over a row: each rank computes its own slots, and holds keys and values of those that they see.

For tree attention each rank sends the others keys and values of the slots that theirs see, and gets back gradients of
what it sent. A rank then counts slots as if the row had no others than those that its own see: order and visibility
stay what they are. Attention over sequences passes keys and values from rank to rank itself.

Labels fall on some slots only, on those of one rank more than on another's: before the head, hidden states travel until
all ranks have equally many with a label.

Shapes: L slots of this rank, T slots that they see, G key and value heads, D head size; N slots of this rank that have
a label, M slots whose losses it computes, C channels.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hf_megapack.megatron.host import integers_on_device
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.packing.context import RowSplit, moves_to_even, split_row, split_sequences

# For each rank some runs of slots: the first and one after the last.
Places = list[list[tuple[int, int]]]


class Run(NamedTuple):
    """Some of the seen slots that follow one another.

    Attributes:
        rank: Which rank's they are, among those that share the row.
        first: Where they begin among what that rank sends; if it is this rank, among its own slots.
        size: How many they are.
    """

    rank: int
    first: int
    size: int


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ContextShare:
    """What one rank holds of a row.

    Attributes:
        slots: Where this rank's slots stand among those that they see, ascending. int64, shape (L,), on the device.
        rank: This rank, among those that share the row.
        runs: The seen slots in their order.
        places: Where each rank's slots stand among the seen ones.
        sent: Which of this rank's slots each rank sees; none for this rank.
        group: The ranks that share the row.
    """

    slots: torch.Tensor
    rank: int
    runs: list[Run]
    places: Places
    sent: Places
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, split: RowSplit, rank: int, group: dist.ProcessGroup | None) -> "ContextShare":
        """Return what a rank holds of a row.

        Args:
            split: Of the row.
            rank: Among those that share it.
            group: These ranks.
        """
        owner = np.empty(split.slots.size, dtype=np.int64)
        for index, slots in enumerate(split.slots):
            owner[slots] = index
        own, owner_of_seen = split.slots[rank], owner[split.seen[rank]]
        runs, places = [], [[] for _ in split.slots]
        num_sent = [0] * len(split.slots)
        for start, stop in _equal_runs(owner_of_seen):
            from_rank = int(owner_of_seen[start])
            # A rank sends its slots in their order, so one run begins where its last one ended.
            runs.append(Run(from_rank, num_sent[from_rank], stop - start))
            places[from_rank].append((start, stop))
            num_sent[from_rank] += stop - start
        sent = []
        for to_rank, seen in enumerate(split.seen):
            is_seen = np.zeros(owner.size, dtype=bool)
            if to_rank != rank:
                is_seen[seen] = True
            sent.append([(start, stop) for start, stop in _equal_runs(is_seen[own]) if is_seen[own[start]]])
        slots = integers_on_device(np.flatnonzero(owner_of_seen == rank))
        return cls(slots=slots, rank=rank, runs=runs, places=places, sent=sent, group=group)

    @property
    def received(self) -> Places:
        """Where the slots that each other rank sends stand among the seen ones."""
        return [[] if rank == self.rank else runs for rank, runs in enumerate(self.places)]


def _equal_runs(array: np.ndarray) -> list[tuple[int, int]]:
    """Return where the runs of equal entries begin and end."""
    breaks = (np.flatnonzero(array[1:] != array[:-1]) + 1).tolist()
    return list(itertools.pairwise([0, *breaks, array.size]))


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


class _FetchSlots(torch.autograd.Function):
    """Fetch two tensors in one exchange."""

    @staticmethod
    def forward(ctx, key, value, share):
        ctx.share, both = share, (key, value)
        seen = []
        for own, parts in zip(both, _exchange_both(both, share.sent, share.received, share.group), strict=True):
            parts[share.rank] = own
            seen.append(torch.cat([parts[run.rank][run.first : run.first + run.size] for run in share.runs]))
        return tuple(seen)

    @staticmethod
    def backward(ctx, *grads):
        share = ctx.share
        totals = []
        for grad, parts in zip(grads, _exchange_both(grads, share.received, share.sent, share.group), strict=True):
            own = torch.cat([grad[start:stop] for start, stop in share.places[share.rank]])
            totals.append(_add(own, parts, share.sent))
        return *totals, None


def _exchange_both(
    both: tuple[torch.Tensor, torch.Tensor], outgoing: Places, incoming: Places, group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Send each rank its runs of two tensors; return what comes of the first from each rank, then of the second."""
    sent = [x[start:stop] for places in outgoing for x in both for start, stop in places]
    sizes_out, sizes_in = (
        [sum(stop - start for start, stop in runs) for runs in places] for places in (outgoing, incoming)
    )
    # Where there is nothing to send, an empty tensor says of what.
    tensor = _exchange(torch.cat([both[0][:0], *sent]), [2 * n for n in sizes_out], [2 * n for n in sizes_in], group)
    parts = tensor.split([size for size in sizes_in for _ in both])
    return list(parts[::2]), list(parts[1::2])


def _exchange(
    outgoing: torch.Tensor, sizes_out: list[int], sizes_in: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    incoming = outgoing.new_empty(sum(sizes_in), *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=group)
    return incoming


def _add(own: torch.Tensor, parts: list[torch.Tensor], places: Places) -> torch.Tensor:
    """Add what came back from each rank for the slots that it was sent, in the order of the ranks, and round once."""
    is_one_sum = sum(bool(runs) for runs in places) < 2
    total = own if is_one_sum else own.to(torch.promote_types(own.dtype, torch.float32))
    for part, runs in zip(parts, places, strict=True):
        pieces = part.split([stop - start for start, stop in runs])
        for (start, stop), piece in zip(runs, pieces, strict=True):
            total[start:stop] += piece
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
        return torch.cat((kept, _exchange(sent, share.sent_sizes, share.received_sizes, share.group)))

    @staticmethod
    def backward(ctx, grad):
        share = ctx.share
        kept, received = grad.tensor_split([share.num_kept])
        returned = _exchange(received.contiguous(), share.received_sizes, share.sent_sizes, share.group)
        return torch.cat((kept, returned)), None


def even_out(hidden_NC: torch.Tensor, share: LossShare) -> torch.Tensor:
    """Return hidden states of the slots whose losses this rank computes, from those of its own slots. A collective.

    Args:
        hidden_NC: Of this rank's slots with a label, ascending. Contiguous, shape (N, C).
        share: From `share_losses`.

    Returns:
        Shape (M, C).
    """
    return _EvenOut.apply(hidden_NC, share)
