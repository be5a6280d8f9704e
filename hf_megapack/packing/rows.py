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
    roots = np.flatnonzero(forest.parent < 0)
    root_sizes = np.add.reduceat(sizes, roots)
    boundaries = alignment.layout(root_sizes)
    # One run of slots for each root subtree with its padding, and one for the padding of the row.
    tail_start, num_slots = int(boundaries[-2]) + alignment.align_sequence(int(root_sizes[-1])), int(boundaries[-1])
    run_start = np.append(boundaries[:-1], tail_start)
    run_end = np.append(run_start[1:], num_slots)
    slot_start = compact + np.repeat(run_start[:-1] - compact[roots], np.diff(roots, append=sizes.size))
    slot_end = slot_start + sizes

    # Every owner of a segment has the same tokens, so the first speaks for all.
    source = examples.offsets[forest.order[forest.first]] + forest.start
    pieces = [slice(first, first + size) for first, size in zip(source.tolist(), sizes.tolist(), strict=True)]
    ids = [examples.tokens[piece] for piece in pieces]
    weights = [examples.is_learned[piece] for piece in pieces]
    labels_at_ends = _count_owners(examples, forest, weights) if examples.share_supervised else {}
    depth_less_slot = forest.start - slot_start
    subtree_ends = _segment_subtree_ends(forest.parent, slot_end, roots, run_end)
    gaps = run_end - run_start - np.append(root_sizes, 0)
    if gaps.any():
        at = np.append(roots[1:], [sizes.size, sizes.size])
        sizes = np.insert(sizes, at, gaps)
        depth_less_slot = np.insert(depth_less_slot, at, -run_start)
        subtree_ends = np.insert(subtree_ends, at, run_end)
        for position, gap in zip(reversed(at.tolist()), reversed(gaps.tolist()), strict=True):
            ids.insert(position, np.full(gap, pad_token_id, dtype=np.int32))
            weights.insert(position, np.zeros(gap, dtype=bool))

    input_ids = np.concatenate(ids)
    position_ids = np.repeat(depth_less_slot.astype(np.int32), sizes)
    position_ids += np.arange(num_slots, dtype=np.int32)
    loss_weights = np.concatenate(weights).astype(np.int32, copy=False)
    learned_slots = np.flatnonzero(loss_weights)
    labels = np.full(num_slots, IGNORE_LABEL, dtype=np.int32)
    # Inside a segment the next slot holds the next token; only a shared segment can be learned at its last slot.
    labels[learned_slots] = input_ids.take(learned_slots + 1, mode="clip")
    for segment, label in labels_at_ends.items():
        labels[slot_end[segment] - 1] = label
    return PackedRow(
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        loss_weights=loss_weights,
        subtree_end=np.repeat(subtree_ends.astype(np.int32), sizes),
        segments=_segment_table(forest, slot_start, slot_end),
        num_padding_slots=num_slots - tail_start,
    )


def _count_owners(examples: ExampleSet, forest: Forest, weights: list[np.ndarray]) -> dict[int, int]:
    """Replace the weights of shared segments by the number of owners that learn each slot.

    Args:
        examples: All examples of the update.
        forest: Segments of the row.
        weights: For each segment, where its first owner learns; changed in place.

    Returns:
        The labels of segments that are learned at their last slot: the next token of the owners that learn it.
    """
    labels: dict[int, int] = {}
    for segment in np.flatnonzero(forest.stop - forest.first > 1).tolist():
        owners = forest.order[forest.first[segment] : forest.stop[segment]]
        starts = examples.offsets[owners] + forest.start[segment]
        size = int(forest.end[segment] - forest.start[segment])
        count = np.zeros(size, dtype=np.int32)
        for start in starts.tolist():
            count += examples.is_learned[start : start + size]
        weights[segment] = count
        if count[-1]:
            last = starts + (size - 1)
            labels[segment] = int(examples.tokens[last[examples.is_learned[last]][0] + 1])
    return labels


def _segment_subtree_ends(
    parent: np.ndarray, slot_end: np.ndarray, roots: np.ndarray, run_end: np.ndarray
) -> np.ndarray:
    """Return the first slot after each segment's subtree; a root's includes the padding of its sequence."""
    ends, parents = slot_end.tolist(), parent.tolist()
    for segment in range(len(ends) - 1, -1, -1):
        above = parents[segment]
        if above >= 0 and ends[segment] > ends[above]:
            ends[above] = ends[segment]
    subtree_ends = np.asarray(ends, dtype=np.int64)
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
