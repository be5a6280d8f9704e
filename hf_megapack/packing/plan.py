"""Examples to a plan: which rows there are, what each shares and which rank runs it.

Of several ways to fill the rows it keeps the one whose most loaded rank has least to do, because the whole update waits
for that rank; with one rank this is the plan that executes least. The choice depends on the examples alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from hf_megapack.batch import RowSchedule
from hf_megapack.errors import DataError
from hf_megapack.packing.alignment import NO_ALIGNMENT, Alignment
from hf_megapack.packing.bins import Placement, adjust_bin_count, num_path_pairs, pack_sequences, place_examples
from hf_megapack.packing.examples import ExampleSet, gather_examples
from hf_megapack.packing.schedule import SINGLE_RANK, RankLayout, heaviest_load, schedule_rows, slots_cost
from hf_megapack.packing.tree import Forest, build_forest, flat_forest, rebuild_forest, restrict_forest

# Row sizes that are tried to even out ranks: each this much of the one before.
_FILL_LIMIT_STEP = 0.75
# Halvings of the gap between the best size and the next smaller one.
_NUM_REFINEMENTS = 6


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class UpdatePlan:
    """The rows of one update before they are laid out.

    Attributes:
        rows: Segments of each row.
        schedule: Rows to ranks and microbatches.
    """

    rows: tuple[Forest, ...]
    schedule: RowSchedule


def plan_update(
    examples: ExampleSet,
    *,
    strategy: str,
    packed_sequence_length: int,
    min_shared_tokens: int = 64,
    alignment: Alignment = NO_ALIGNMENT,
    ranks: RankLayout = SINGLE_RANK,
) -> UpdatePlan:
    """Decide which examples share a row, which of their tokens are computed once and which rank runs what.

    Args:
        examples: The examples of an update.
        strategy: One of `PACKING_STRATEGIES`.
        packed_sequence_length: Row capacity.
        min_shared_tokens: Tokens below which a shared run is repeated instead ("prefix_tree" only).
        alignment: The two multiples of a row.
        ranks: The ranks that the rows are for.

    Returns:
        The plan, with at least as many rows as a microbatch of every rank needs where the examples allow it and that
        saves time.

    Raises:
        DataError: If an example is longer than a row.
    """
    capacity = alignment.capacity(packed_sequence_length)
    longest = int(examples.lengths.argmax())
    if examples.lengths[longest] > capacity:
        raise DataError(
            f"example {longest} has {examples.lengths[longest]} tokens, a row holds {capacity}; raise "
            "packed_sequence_length, or set max_length with overlong='drop', 'truncate_left' or 'truncate_right'"
        )
    if strategy == "prefix_tree":
        plan = _schedule(_tree_rows(examples, capacity, min_shared_tokens, alignment, ranks), alignment, ranks)
        if not examples.share_supervised:
            return plan
        # Longer runs can fall worse into rows and segments; then the default ones are kept.
        default = _share_unsupervised_only(examples)
        num_executed = _num_executed(plan, alignment)
        if num_executed <= int((default.lengths - default.shareable).sum() + default.shareable.max()):
            return plan
        other = _schedule(_tree_rows(default, capacity, min_shared_tokens, alignment, ranks), alignment, ranks)
        return plan if num_executed <= _num_executed(other, alignment) else other
    bins = pack_sequences(examples.lengths.tolist(), strategy=strategy, capacity=capacity, alignment=alignment)
    wanted = min(_num_microbatches(len(bins), ranks), examples.lengths.size)
    bins = adjust_bin_count(bins, min_bin_count=wanted)
    return _schedule([flat_forest(examples.lengths, np.asarray(bin_)) for bin_ in bins], alignment, ranks)


def _schedule(rows: list[Forest], alignment: Alignment, ranks: RankLayout) -> UpdatePlan:
    return UpdatePlan(rows=tuple(rows), schedule=schedule_rows([_row_cost(row, alignment) for row in rows], ranks))


def _num_executed(plan: UpdatePlan, alignment: Alignment) -> int:
    """Return the slots that a tree plan runs, padding and dummies included."""
    slots = np.array([alignment.footprint(row.num_tokens) for row in plan.rows])
    return int(slots[plan.schedule.row_index].sum())


def _share_unsupervised_only(examples: ExampleSet) -> ExampleSet:
    """Return the same examples as they are shared by default."""
    mask = np.zeros_like(examples.is_learned)
    mask[1:] = examples.is_learned[:-1]
    bounds = examples.offsets[1:-1]
    columns = zip(np.split(examples.tokens, bounds), np.split(mask, bounds), strict=True)
    return gather_examples([{"input_ids": ids, "loss_mask": learned} for ids, learned in columns])


def _num_microbatches(num_rows: int, ranks: RankLayout) -> int:
    """Return the microbatches of all ranks together."""
    return ranks.num_local_microbatches(num_rows) * ranks.data_parallel_size


def _row_cost(row: Forest, alignment: Alignment) -> float:
    """Return what a row costs once it is laid out."""
    pairs = num_path_pairs(row.end) - num_path_pairs(row.start)
    sizes = row.end - row.start
    roots = np.flatnonzero(row.parent < 0)
    return slots_cost(int(alignment.layout(np.add.reduceat(sizes, roots))[-1]), int(pairs.sum()))


def _tree_rows(
    examples: ExampleSet, capacity: int, min_shared_tokens: int, alignment: Alignment, ranks: RankLayout
) -> list[Forest]:
    """Return the rows of the best placement, each with the shorter of its two geometries."""
    forest = build_forest(examples, min_shared_tokens)
    fill_limit = alignment.fill_limit(capacity)
    if forest.num_tokens <= fill_limit and _num_microbatches(1, ranks) == 1:
        return [forest]
    placement = _best_placement(forest, examples.lengths, fill_limit, ranks)
    return [
        _tightest_forest(forest, np.sort(bin_), examples, min_shared_tokens, num_tokens)
        for bin_, num_tokens in zip(placement.bins, placement.tokens, strict=True)
    ]


def _best_placement(forest: Forest, lengths: np.ndarray, fill_limit: int, ranks: RankLayout) -> Placement:
    """Return the placement whose most loaded rank has least to do, by what its bins admitted.

    Tried are the longest examples first and depth first; where there are several microbatches to even out, each also
    with smaller rows.
    """
    sorted_lengths = lengths[forest.order]
    by_falling_length = np.lexsort((forest.order, -sorted_lengths)).tolist()
    depth_first = list(range(sorted_lengths.size))
    best: list[Placement] = []
    for placing_order in (by_falling_length, depth_first):
        place = partial(place_examples, forest, sorted_lengths.tolist(), placing_order)
        tried = {fill_limit: place(fill_limit)}
        if _num_microbatches(1, ranks) > 1:
            # No rank's share is below an even part of the whole, or below an example.
            limit = min(fill_limit, forest.num_tokens)
            smallest = max(int(sorted_lengths.max()), limit // _num_microbatches(1, ranks))
            while limit > smallest:
                limit = max(smallest, int(limit * _FILL_LIMIT_STEP))
                tried[limit] = place(limit)
            _refine(tried, place, ranks)
        best.append(min(tried.values(), key=lambda placement: _admitted_load(placement, ranks)))
    return min(best, key=lambda placement: _admitted_load(placement, ranks))


def _refine(tried: dict[int, Placement], place: Callable[[int], Placement], ranks: RankLayout) -> None:
    """Add smaller row sizes that need no more bins than the best size tried: the smallest one is the most even."""
    best = min(tried, key=lambda limit: (_admitted_load(tried[limit], ranks), limit))
    num_bins = len(tried[best].bins)
    too_small, enough = max((limit for limit in tried if limit < best), default=best), best
    for _ in range(_NUM_REFINEMENTS):
        middle = (too_small + enough) // 2
        if middle in tried:
            break
        tried[middle] = place(middle)
        if len(tried[middle].bins) <= num_bins:
            enough = middle
        else:
            too_small = middle


def _admitted_load(placement: Placement, ranks: RankLayout) -> float:
    costs = [slots_cost(*admitted) for admitted in zip(placement.tokens, placement.pairs, strict=True)]
    return heaviest_load(costs, schedule_rows(costs, ranks))


def _tightest_forest(
    forest: Forest, positions: np.ndarray, examples: ExampleSet, min_shared_tokens: int, admitted: int
) -> Forest:
    """Return a bin's forest rebuilt, or as it was admitted where rebuilding would make it longer."""
    rebuilt = rebuild_forest(forest, positions, examples, min_shared_tokens)
    if rebuilt.num_tokens <= admitted:
        return rebuilt
    restricted = restrict_forest(forest, positions)
    assert restricted.num_tokens == admitted, (restricted.num_tokens, admitted)
    return restricted
