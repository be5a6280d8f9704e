"""One row to the ranks that share it: equal slots for each, attention even, and few keys that another rank holds.

Later slots of a row see more than earlier ones, and deep branches more than roots, so equal runs would load the ranks
unequally. Each rank gets a run of blocks that begins where the work in it comes out even instead. Runs keep branches
together: a rank then sees few slots of the others beyond the prefixes that they share, and only those travel. A row
without shared prefixes can also be cut sequence by sequence: each rank then gets an early and a late chunk of each.
"""

from dataclasses import dataclass

import numpy as np

from hf_megapack.errors import DataError
from hf_megapack.packing.alignment import CONTEXT_BLOCK

# Cost of a block of queries and keys, and what a mask adds to it: FlashAttention-4 on an H200.
_COST_OF_BLOCK, _COST_OF_MASK = 2, 1
# Runs are even up to a block. Blocks are then exchanged until the most loaded rank is this close to the mean.
_EVEN_ENOUGH = 1.0005


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowSplit:
    """Which slots of a row each context-parallel rank holds.

    Attributes:
        slots: Slots of each rank, ascending. int64, shape (num_ranks, slots per rank).
        seen: Slots that some slot of each rank sees, its own among them, ascending; where the row was cut into blocks,
            all slots of their blocks. int64, one array per rank.
        num_pairs: Visible pairs that each rank computes: slots that its own slots see. int64, shape (num_ranks,).
        work: What each rank's attention costs: blocks of queries and keys with visible pairs, those that hold other
            pairs too counted one and a half times; where sequences were cut, the pairs. int64, shape (num_ranks,).
    """

    slots: np.ndarray
    seen: tuple[np.ndarray, ...]
    num_pairs: np.ndarray
    work: np.ndarray

    @property
    def imbalance(self) -> float:
        """Work of the most loaded rank over the mean: the factor by which attention waits for it."""
        return float(self.work.max() / self.work.mean())


def split_row(subtree_end: np.ndarray, num_ranks: int) -> RowSplit:
    """Deal the slots of a row to the ranks that share it.

    Args:
        subtree_end: First slot after the subtree that begins at each slot. Integer, shape (num_slots,).
        num_ranks: Context-parallel ranks.

    Returns:
        The split; it depends on the row alone, so every rank finds the same.

    Raises:
        DataError: If the row is not a multiple of `CONTEXT_BLOCK` slots for each rank.

    Example:
        >>> split = split_row(np.full(512, 512), 2)
        >>> split.slots[:, ::128].tolist()  # first slot of each block
        [[128, 256], [0, 384]]
        >>> split.num_pairs.tolist(), split.imbalance
        ([65664, 65664], 1.0)
        >>> [seen.size for seen in split.seen]  # nobody but slots of the last block sees the last block
        [384, 512]
    """
    num_slots = subtree_end.size
    if num_slots % (CONTEXT_BLOCK * num_ranks):
        raise DataError(
            f"A row of {num_slots} slots cannot be shared by {num_ranks} context-parallel ranks in blocks of "
            f"{CONTEXT_BLOCK}; pack with packed_multiple {CONTEXT_BLOCK * num_ranks}, which MegaPackTrainer's own "
            "collator does."
        )
    ends = subtree_end.reshape(-1, CONTEXT_BLOCK)
    work = _work_of_blocks(ends)
    blocks = _deal_runs(work, num_ranks)
    _even_out(blocks, work)
    blocks.sort(axis=1)
    stop = _first_block_after(ends)
    # A slot is seen from itself on and by no slot from its subtree's end on.
    num_seen = np.cumsum(1 - np.bincount(subtree_end, minlength=num_slots + 1)[:num_slots])
    return RowSplit(
        slots=np.stack([_slots_of(own) for own in blocks]),
        seen=tuple(_slots_of(_seen_blocks(stop, own)) for own in blocks),
        num_pairs=num_seen.reshape(-1, CONTEXT_BLOCK).sum(axis=1)[blocks].sum(axis=1),
        work=work[blocks].sum(axis=1),
    )


def _slots_of(blocks: np.ndarray) -> np.ndarray:
    """Return the slots of some blocks, one block after the other."""
    return (blocks[:, None] * CONTEXT_BLOCK + np.arange(CONTEXT_BLOCK)).ravel()


def _first_block_after(ends: np.ndarray) -> np.ndarray:
    """Return for each block the first after those that see some of it; `ends` as for `_work_of_blocks`."""
    return (ends.max(axis=1) - 1) // CONTEXT_BLOCK + 1


def _work_of_blocks(ends: np.ndarray) -> np.ndarray:
    """Return what attention of each block's queries costs.

    Args:
        ends: First slot after the subtree that begins at each slot. Integer, shape (num_blocks, CONTEXT_BLOCK).

    Returns:
        int64, shape (num_blocks,).
    """
    num_blocks = len(ends)
    block = np.arange(num_blocks)
    # The blocks of queries that see some of a block of keys, then those that see all of it.
    some = _count_covering(block, _first_block_after(ends), num_blocks)
    whole = _count_covering(block + 1, np.maximum(ends.min(axis=1) // CONTEXT_BLOCK, block + 1), num_blocks)
    return _COST_OF_BLOCK * some + _COST_OF_MASK * (some - whole)


def _count_covering(start: np.ndarray, stop: np.ndarray, size: int) -> np.ndarray:
    """Return how many of the ranges from `start` to before `stop` hold each of the first `size` numbers."""
    begun, ended = (np.bincount(places, minlength=size + 1)[:size] for places in (start, stop))
    return np.cumsum(begun - ended)


def _deal_runs(work: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the blocks of each rank: a run of those that no rank before it has, with its equal part of their work.

    The blocks that are left count as a ring. Over all places where a run can begin, its work is that part on average,
    and from one place to the next it changes by the difference of two blocks: somewhere it is off by less than that.

    Args:
        work: Of each block. int64, shape (num_blocks,).
        num_ranks: A divisor of the number of blocks.

    Returns:
        int64, shape (num_ranks, blocks per rank).
    """
    left, size = np.arange(work.size), work.size // num_ranks
    dealt = []
    for num_left in range(num_ranks, 0, -1):
        before = np.concatenate(([0], np.cumsum(np.tile(work[left], 2))))
        work_of_run = before[size : size + left.size] - before[: left.size]
        begin = np.argmin(np.abs(work_of_run * num_left - before[left.size]))
        places = (begin + np.arange(size)) % left.size
        dealt.append(left[places])
        left = np.delete(left, places)
    return np.stack(dealt)


def _even_out(blocks: np.ndarray, work: np.ndarray) -> None:
    """Let the most loaded rank exchange a block with another while that helps, in place.

    Args:
        blocks: Blocks of each rank. int64, shape (num_ranks, blocks per rank).
        work: Of each block. int64, shape (num_blocks,).
    """
    # Each exchange brings two loads closer together, so there is an end; few are needed.
    while True:
        dealt = work[blocks]
        loads = dealt.sum(axis=1)
        most = int(loads.argmax())
        if loads[most] <= _EVEN_ENOUGH * loads.mean():
            return
        give, other, take = _best_exchange(dealt, most)
        if not 0 < dealt[most, give] - dealt[other, take] < loads[most] - loads[other]:
            return
        blocks[most, give], blocks[other, take] = blocks[other, take], blocks[most, give]


def _best_exchange(dealt: np.ndarray, most: int) -> tuple[int, int, int]:
    """Return the exchange of two blocks after which the higher load of the two ranks is lowest.

    Args:
        dealt: Work of the blocks of each rank. int64, shape (num_ranks, blocks per rank).
        most: The most loaded rank.

    Returns:
        Place of its block, the other rank, place of that one's block.
    """
    num_ranks, size = dealt.shape
    rank = np.arange(num_ranks)[:, None]
    loads = dealt.sum(axis=1, keepdims=True)
    order = dealt.argsort(axis=1, kind="stable")
    ascending = np.take_along_axis(dealt, order, axis=1)
    heaviest = int(ascending.max())
    # Best would be a block that is lighter by half of what the other rank has less: try its two neighbours in weight.
    ideal = (dealt[most] - (loads[most] - loads + 1) // 2).clip(-1, heaviest)
    # One look-up serves all ranks: the offset keeps their blocks apart.
    offset = rank * (heaviest + 2)
    place = np.searchsorted((ascending + offset).ravel(), ideal + offset, side="right") - rank * size
    places = np.stack((place - 1, place)).clip(0, size - 1)
    moved = dealt[most] - np.take_along_axis(ascending[None], places, axis=2)
    higher = np.maximum(loads[most] - moved, loads + moved)
    side, other, give = np.unravel_index(higher.argmin(), higher.shape)
    return int(give), int(other), int(order[other, places[side, other, give]])


def _seen_blocks(stop: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the blocks of keys of which a rank's blocks see something, ascending.

    Args:
        stop: For each block the first after those that see it, which are that block and all up to there.
        own: The rank's blocks.
    """
    # How many of the rank's blocks come before each; a block is seen if the number grows up to where it ends.
    num_before = np.zeros(stop.size + 1, dtype=np.int64)
    num_before[own + 1] = 1
    num_before = np.cumsum(num_before)
    return np.flatnonzero(num_before[stop] > num_before[:-1])


def moves_to_even(counts: np.ndarray) -> np.ndarray:
    """Return how many things each rank gives each other so that all have equally many, or one more than others.

    Args:
        counts: Things that each rank has. Integer, shape (num_ranks,).

    Returns:
        int64, shape (num_ranks, num_ranks): what the first gives the second. No rank gives and gets.

    Example:
        >>> moves_to_even(np.array([1, 8, 3])).tolist()
        [[0, 0, 0], [3, 0, 1], [0, 0, 0]]
    """
    num_ranks, total = counts.size, int(counts.sum())
    surplus = counts - (total // num_ranks + (np.arange(num_ranks) < total % num_ranks))
    moves = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for giver in np.flatnonzero(surplus > 0):
        for taker in np.flatnonzero(surplus < 0):
            moved = min(surplus[giver], -surplus[taker])
            moves[giver, taker] = moved
            surplus[giver] -= moved
            surplus[taker] += moved
    return moves


def sequence_boundaries(subtree_end: np.ndarray) -> np.ndarray:
    """Return the slot boundaries of the sequences of a row that shares nothing, its tail padding being one of them.

    Args:
        subtree_end: First slot after the subtree that begins at each slot. Integer, shape (num_slots,).

    Returns:
        int32, shape (num_sequences + 1,), first 0, last num_slots, increasing.

    Raises:
        DataError: If sequences of the row share a prefix.

    Example:
        >>> sequence_boundaries(np.array([3, 3, 3, 5, 5])).tolist()
        [0, 3, 5]
    """
    boundaries = np.append(0, np.unique(subtree_end)).astype(np.int32)
    if not np.array_equal(np.repeat(boundaries[1:], np.diff(boundaries)), subtree_end):
        raise DataError(
            "A row whose examples share prefixes cannot be attended sequence by sequence (attention='thd'); pack with "
            "packing_strategy 'ffd', 'mffd' or 'balanced', which MegaPackTrainer's own collator does."
        )
    return boundaries


def split_sequences(cu_seqlens: np.ndarray, num_ranks: int) -> RowSplit:
    """Cut every sequence into 2 x num_ranks chunks and give rank r chunk r and, as the heavier half, chunk -1 - r.

    Args:
        cu_seqlens: What `sequence_boundaries` returned.
        num_ranks: Context-parallel ranks.

    Returns:
        The split; every rank computes equally many pairs.

    Raises:
        DataError: If a sequence is not a multiple of twice the ranks.

    Source:
        The order that `transformer_engine...context_parallel.attn_forward_func_with_cp` asks for, 2.20.

    Example:
        >>> split_sequences(np.array([0, 8, 12]), 2).slots.tolist()
        [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    """
    sizes = np.diff(cu_seqlens)
    if (sizes % (2 * num_ranks)).any():
        size = int(sizes[np.flatnonzero(sizes % (2 * num_ranks))[0]])
        raise DataError(
            f"A sequence of {size} slots cannot be cut into {2 * num_ranks} equal chunks for {num_ranks} "
            f"context-parallel ranks; pack with sequence_multiple and packed_multiple {2 * num_ranks}, which "
            "MegaPackTrainer's own collator does."
        )
    position = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], sizes)
    chunk = position // np.repeat(sizes // (2 * num_ranks), sizes)
    owner = np.minimum(chunk, 2 * num_ranks - 1 - chunk)
    slots = np.argsort(owner, kind="stable").reshape(num_ranks, -1)
    # Each rank's later chunk sees all chunks before it.
    seen = tuple(np.flatnonzero(chunk < 2 * num_ranks - rank) for rank in range(num_ranks))
    num_pairs = (position + 1)[slots].sum(axis=1)
    return RowSplit(slots=slots, seen=seen, num_pairs=num_pairs, work=num_pairs)
