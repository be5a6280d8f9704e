"""One row to the ranks that share it: equal slots for each, and attention as even as the way of cutting allows.

Later slots of a row see more than earlier ones, and deep branches more than roots, so equal runs would load the ranks
unequally. Blocks of slots are dealt instead, the costliest first, each to the rank with least to do. A row without
shared prefixes can also be cut sequence by sequence: each rank then gets an early and a late chunk of every one.
"""

from dataclasses import dataclass

import numpy as np

from hf_megapack.errors import DataError
from hf_megapack.packing.alignment import CONTEXT_BLOCK


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowSplit:
    """Which slots of a row each context-parallel rank holds.

    Attributes:
        slots: Slots of each rank, ascending. int64, shape (num_ranks, slots per rank).
        num_pairs: Visible pairs that each rank computes: slots that its own slots see. int64, shape (num_ranks,).
    """

    slots: np.ndarray
    num_pairs: np.ndarray

    @property
    def imbalance(self) -> float:
        """Pairs of the most loaded rank over the mean: the factor by which attention waits for it."""
        return float(self.num_pairs.max() / self.num_pairs.mean())


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
        [[0, 384], [128, 256]]
        >>> split.num_pairs.tolist(), split.imbalance
        ([65664, 65664], 1.0)
    """
    num_slots = subtree_end.size
    if num_slots % (CONTEXT_BLOCK * num_ranks):
        raise DataError(
            f"A row of {num_slots} slots cannot be shared by {num_ranks} context-parallel ranks in blocks of "
            f"{CONTEXT_BLOCK}; pack with packed_multiple {CONTEXT_BLOCK * num_ranks}, which MegaPackTrainer's own "
            "collator does."
        )
    # A slot is seen from itself on and by no slot from its subtree's end on.
    change = np.ones(num_slots + 1, dtype=np.int64)
    np.subtract.at(change, subtree_end, 1)
    num_seen = np.cumsum(change[:num_slots])
    pairs = num_seen.reshape(-1, CONTEXT_BLOCK).sum(axis=1)
    blocks_per_rank = pairs.size // num_ranks
    loads = np.zeros(num_ranks, dtype=np.int64)
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for block in sorted(range(pairs.size), key=lambda block: (-pairs[block], block)):
        free = (rank for rank in range(num_ranks) if len(dealt[rank]) < blocks_per_rank)
        rank = min(free, key=lambda rank: (loads[rank], rank))
        dealt[rank].append(block)
        loads[rank] += pairs[block]
    blocks = np.sort(np.asarray(dealt, dtype=np.int64), axis=1)
    slots = (blocks[:, :, None] * CONTEXT_BLOCK + np.arange(CONTEXT_BLOCK)).reshape(num_ranks, -1)
    return RowSplit(slots=slots, num_pairs=loads)


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
    return RowSplit(slots=slots, num_pairs=(position + 1)[slots].sum(axis=1))
