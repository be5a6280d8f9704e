"""Segments to slots: the only module that lays out a row and the only one that shifts labels.

Slots follow the forest's preorder, so a subtree is one run and `subtree_end` is the whole attention structure. Padding
of the row is a root run of its own at the tail; padding of a sequence follows its tokens and stays under its root.
"""

import numpy as np

from hf_megapack.batch import IGNORE_LABEL, PackedRow, SegmentTable
from hf_megapack.packing.alignment import Alignment
from hf_megapack.packing.examples import ExampleSet
from hf_megapack.packing.tree import Forest


def lay_out_row(examples: ExampleSet, forest: Forest, alignment: Alignment, pad_token_id: int) -> PackedRow:
    """Lay one bin's forest out in slots.

    Args:
        examples: All examples of the update.
        forest: Segments of the examples of this row.
        alignment: The two multiples of a row; each root subtree counts as one sequence.
        pad_token_id: Token of the slots that belong to no example.

    Returns:
        The row.
    """
    sizes = forest.end - forest.start
    compact = np.cumsum(sizes) - sizes
    is_root = forest.parent < 0
    roots = np.flatnonzero(is_root)
    boundaries = alignment.layout(np.add.reduceat(sizes, roots))
    run_start = np.append(boundaries[:-1], boundaries[-2] + alignment.align_sequence(int(sizes[roots[-1] :].sum())))
    num_slots, tail_start = int(boundaries[-1]), int(run_start[-1])
    run_end = np.append(run_start[1:], num_slots)
    slot_start = compact + (run_start[:-1] - compact[roots])[np.cumsum(is_root) - 1]
    slot_end = slot_start + sizes

    slots = np.arange(num_slots, dtype=np.int32)
    run_sizes = run_end - run_start
    input_ids = np.full(num_slots, pad_token_id, dtype=np.int32)
    position_ids = slots - np.repeat(run_start.astype(np.int32), run_sizes)
    subtree_end = np.repeat(run_end.astype(np.int32), run_sizes)
    labels = np.full(num_slots, IGNORE_LABEL, dtype=np.int32)
    loss_weights = np.zeros(num_slots, dtype=np.int32)

    # Of a shared run every owner has the same tokens and no label, so the first owner speaks for all.
    owner_offset = examples.offsets[forest.order[forest.first]]
    source = np.arange(int(sizes.sum())) + np.repeat(owner_offset + forest.start - compact, sizes)
    owned = _owned_slots(slot_start, compact, sizes)
    input_ids[owned] = examples.tokens[source]
    position_ids[owned] = source - np.repeat(owner_offset, sizes)
    subtree_end[owned] = np.repeat(_segment_subtree_ends(forest.parent, slot_end, roots, run_end), sizes)
    learned = np.flatnonzero(examples.is_learned[source])
    learned_slots = learned if isinstance(owned, slice) else owned[learned]
    labels[learned_slots] = examples.tokens[source[learned] + 1]
    loss_weights[learned_slots] = 1
    return PackedRow(
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        loss_weights=loss_weights,
        subtree_end=subtree_end,
        segments=_segment_table(forest, slot_start, slot_end),
        num_padding_slots=num_slots - tail_start,
    )


def _owned_slots(slot_start: np.ndarray, compact: np.ndarray, sizes: np.ndarray) -> slice | np.ndarray:
    """Return the slots that belong to examples: one run, unless padding lies between sequences."""
    shift = slot_start - compact
    if not shift.any():
        return slice(0, int(sizes.sum()))
    return np.arange(int(sizes.sum())) + np.repeat(shift, sizes)


def _segment_subtree_ends(
    parent: np.ndarray, slot_end: np.ndarray, roots: np.ndarray, run_end: np.ndarray
) -> np.ndarray:
    """Return the first slot after each segment's subtree; a root's includes the padding of its sequence."""
    ends, parents = slot_end.tolist(), parent.tolist()
    for segment in range(len(ends) - 1, -1, -1):
        above = parents[segment]
        if above >= 0 and ends[segment] > ends[above]:
            ends[above] = ends[segment]
    subtree_ends = np.asarray(ends, dtype=np.int32)
    subtree_ends[roots] = run_end[:-1]
    return subtree_ends


def _segment_table(forest: Forest, slot_start: np.ndarray, slot_end: np.ndarray) -> SegmentTable:
    """Return which examples own which run of slots."""
    num_owners = forest.stop - forest.first
    example_offsets = np.zeros(num_owners.size + 1, dtype=np.int64)
    np.cumsum(num_owners, out=example_offsets[1:])
    owners = np.arange(int(example_offsets[-1])) + np.repeat(forest.first - example_offsets[:-1], num_owners)
    return SegmentTable(
        start=slot_start.astype(np.int32),
        end=slot_end.astype(np.int32),
        parent=forest.parent.astype(np.int32),
        example_offsets=example_offsets.astype(np.int32),
        examples=forest.order[owners].astype(np.int32),
    )


def num_visible_pairs(subtree_end: np.ndarray) -> int:
    """Return how many (query, key) pairs of slots attention computes.

    Args:
        subtree_end: As in `PackedRow`. Integers, shape (num_slots,).

    Returns:
        The sum of `subtree_end[j] - j`.

    Example:
        >>> num_visible_pairs(np.array([4, 3, 3, 4]))
        8
    """
    size = subtree_end.size
    return int(subtree_end.sum(dtype=np.int64)) - size * (size - 1) // 2
