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

import numpy as np
import torch
import torch.distributed as dist

from hf_megapack.megatron.host import integers_on_device
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.packing.context import RowSplit, moves_to_even, split_row, split_sequences

# For each rank some runs of slots: the first and one after the last.
Places = list[list[tuple[int, int]]]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ContextShare:
    """What one rank holds of a row.

    Attributes:
        slots: Where this rank's slots stand among those that they see, ascending. int64, shape (L,), on the device.
        num_seen: How many they see.
        sent: Where the slots that this rank sends each other one stand among the seen ones.
        received: Where those stand that each other rank sends.
        group: The ranks that share the row.
    """

    slots: torch.Tensor
    num_seen: int
    sent: Places
    received: Places
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
        seen = split.seen[rank]
        owner_of_seen = owner[seen]
        sent, received = [[] for _ in split.slots], [[] for _ in split.slots]
        for other, seen_by_other in enumerate(split.seen):
            if other != rank:
                is_seen_by_other = np.zeros(owner.size, dtype=bool)
                is_seen_by_other[seen_by_other] = True
                sent[other] = _runs_of(is_seen_by_other[seen] & (owner_of_seen == rank))
                received[other] = _runs_of(owner_of_seen == other)
        slots = integers_on_device(np.flatnonzero(owner_of_seen == rank))
        return cls(slots=slots, num_seen=seen.size, sent=sent, received=received, group=group)


def _runs_of(is_inside: np.ndarray) -> list[tuple[int, int]]:
    """Return where the runs of true entries begin and end."""
    breaks = np.flatnonzero(np.diff(is_inside.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(breaks[::2], breaks[1::2], strict=True))


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


class Fetch:
    """Keys and values that are under way between the ranks that share a row; work that needs none can be queued now.

    Args:
        both: Keys and values of the slots that this rank's slots see, shape (T, G, D) each: its own have been made, the
            others are filled in by `wait`.
        share: What this rank holds.
    """

    def __init__(self, both: tuple[torch.Tensor, torch.Tensor], share: ContextShare):
        self._both, self._places = both, share.received
        self._exchange = _Exchange(both, share.sent, share.received, share.group)

    def wait(self) -> None:
        """Fill in what the others sent."""
        for tensor, pieces in zip(self._both, self._exchange.wait(), strict=True):
            for (start, stop), piece in zip(itertools.chain(*self._places), pieces, strict=True):
                tensor[start:stop] = piece


class GradientReturn:
    """Gradients of keys and values under way to the ranks that these came from.

    Args:
        both: Gradients of what `Fetch` filled in and of the rank's own, shape (T, G, D) each.
        share: What this rank holds.
    """

    def __init__(self, both: tuple[torch.Tensor, torch.Tensor], share: ContextShare):
        self._both, self._places = both, share.sent
        self._exchange = _Exchange(both, share.received, share.sent, share.group)

    def wait(self) -> list[torch.Tensor]:
        """Return the sums, shape (T, G, D) each; they are complete for this rank's own slots.

        What came back is added in the order of the ranks, and rounded once.
        """
        is_one_sum = sum(bool(runs) for runs in self._places) < 2
        totals = []
        for tensor, pieces in zip(self._both, self._exchange.wait(), strict=True):
            dtype = tensor.dtype if is_one_sum else torch.promote_types(tensor.dtype, torch.float32)
            total = tensor.to(dtype, copy=True)
            for (start, stop), piece in zip(itertools.chain(*self._places), pieces, strict=True):
                total[start:stop] += piece
            totals.append(total.to(tensor.dtype))
        return totals


class _Exchange:
    """Runs of slots of two tensors that travel at once, without the host or the device waiting for them."""

    def __init__(
        self,
        both: tuple[torch.Tensor, torch.Tensor],
        outgoing: Places,
        incoming: Places,
        group: dist.ProcessGroup | None,
    ):
        self._incoming = incoming
        sent = [x[start:stop] for runs in outgoing for x in both for start, stop in runs]
        sizes_out, sizes_in = (
            [2 * sum(stop - start for start, stop in runs) for runs in places] for places in (outgoing, incoming)
        )
        # Where there is nothing to send, an empty tensor says of what.
        self._received, self._work = _exchange(torch.cat([both[0][:0], *sent]), sizes_out, sizes_in, group)

    def wait(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what came of the first tensor, run by run, and of the second."""
        self._work.wait()
        sizes = [[stop - start for start, stop in runs] for runs in self._incoming]
        pieces = iter(self._received.split([size for of_rank in sizes for _ in range(2) for size in of_rank]))
        first, second = [], []
        for of_rank in sizes:
            first += itertools.islice(pieces, len(of_rank))
            second += itertools.islice(pieces, len(of_rank))
        return first, second


def _exchange(
    outgoing: torch.Tensor, sizes_out: list[int], sizes_in: list[int], group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, dist.Work]:
    incoming = outgoing.new_empty(sum(sizes_in), *outgoing.shape[1:])
    return incoming, dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=group, async_op=True)


class _FetchSlots(torch.autograd.Function):
    """Fetch two tensors in one exchange."""

    @staticmethod
    def forward(ctx, key, value, share):
        ctx.share = share
        seen = tuple(x.new_empty(share.num_seen, *x.shape[1:]).index_copy_(0, share.slots, x) for x in (key, value))
        Fetch(seen, share).wait()
        return seen

    @staticmethod
    def backward(ctx, *grads):
        totals = GradientReturn(grads, ctx.share).wait()
        return *(total.index_select(0, ctx.share.slots) for total in totals), None


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
        received, work = _exchange(sent, share.sent_sizes, share.received_sizes, share.group)
        work.wait()
        return torch.cat((kept, received))

    @staticmethod
    def backward(ctx, grad):
        share = ctx.share
        kept, received = grad.tensor_split([share.num_kept])
        returned, work = _exchange(received.contiguous(), share.received_sizes, share.sent_sizes, share.group)
        work.wait()
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
