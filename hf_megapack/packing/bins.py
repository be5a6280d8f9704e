"""Examples to bins: which examples share a row.

`prefix_tree` places examples where they add fewest tokens; `ffd`, `mffd` and `balanced` put whole ones side by side.
All are deterministic, place every example exactly once and ask `Alignment` for every size.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hf_megapack.errors import ConfigError, DataError
from hf_megapack.packing.alignment import NO_ALIGNMENT, Alignment
from hf_megapack.packing.tree import Forest

Bins = list[list[int]]
_Depth = TypeVar("_Depth", int, np.ndarray)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Bins of a prefix forest and what they admitted.

    Attributes:
        bins: Positions in the forest's `order`, bin by bin, in the order of placing.
        tokens: Distinct tokens that each bin admitted.
        pairs: Visible (query, key) pairs of those tokens.
    """

    bins: Bins
    tokens: list[int]
    pairs: list[int]


def place_examples(forest: Forest, lengths: Sequence[int], placing_order: Sequence[int], fill_limit: int) -> Placement:
    """Put each example where it adds fewest tokens; among equals where least room is left, then in the oldest bin.

    A bin that holds a segment holds everything above it, so an example adds exactly what lies below the deepest segment
    of its path that the bin already holds. Walking up that path finds the bins in order of what they would gain.

    Args:
        forest: Forest of all examples.
        lengths: Tokens of the example at each position of `forest.order`.
        placing_order: Positions in `forest.order`, each once, in the order of placing.
        fill_limit: Most tokens of one bin; every example fits alone.

    Returns:
        The bins.
    """
    ends, parents = forest.end.tolist(), forest.parent.tolist()
    leaves = _last_segments(forest)
    bins: Bins = []
    tokens: list[int] = []
    pairs: list[int] = []
    holders: list[list[int]] = [[] for _ in ends]
    # (tokens, -bin) of every bin, sorted: the fullest bin that still has room is one bisection away.
    fullest: list[tuple[int, int]] = []
    for position in placing_order:
        segment, chosen, added = leaves[position], -1, lengths[position]
        while segment >= 0:
            gain = lengths[position] - ends[segment]
            room = [bin_ for bin_ in holders[segment] if tokens[bin_] + gain <= fill_limit]
            if room:
                chosen, added = max(room, key=lambda bin_: (tokens[bin_], -bin_)), gain
                break
            segment = parents[segment]
        else:
            at = bisect_right(fullest, (fill_limit - added, 1)) - 1
            chosen = -fullest[at][1] if at >= 0 else -1
        if chosen < 0:
            chosen = len(bins)
            bins.append([])
            tokens.append(0)
            pairs.append(0)
        else:
            del fullest[bisect_left(fullest, (tokens[chosen], -chosen))]
        bins[chosen].append(position)
        tokens[chosen] += added
        pairs[chosen] += num_path_pairs(lengths[position]) - num_path_pairs(lengths[position] - added)
        insort(fullest, (tokens[chosen], -chosen))
        held, segment = segment, leaves[position]
        while segment != held:
            holders[segment].append(chosen)
            segment = parents[segment]
    return Placement(bins=bins, tokens=tokens, pairs=pairs)


def num_path_pairs(depth: _Depth) -> _Depth:
    """Return the visible pairs of the first `depth` tokens of an example, or of each of several."""
    return depth * (depth + 1) // 2


def _last_segments(forest: Forest) -> list[int]:
    """Return the deepest segment of each example of a forest: the last in preorder that it owns."""
    leaves = [-1] * forest.order.size
    for segment, (first, stop) in enumerate(zip(forest.first.tolist(), forest.stop.tolist(), strict=True)):
        leaves[first:stop] = [segment] * (stop - first)
    return leaves


def pack_sequences(
    lengths: Sequence[int],
    *,
    strategy: str,
    capacity: int,
    alignment: Alignment = NO_ALIGNMENT,
) -> Bins:
    """Pack whole sequences side by side.

    Args:
        lengths: Tokens of each sequence, each at least 1.
        strategy: "ffd" (first fit decreasing, never above capacity), "mffd" (modified first fit decreasing) or
            "balanced" (least loaded bin); the latter two give an oversized sequence a bin of its own.
        capacity: Slots that a row may hold, `Alignment.capacity` already applied.
        alignment: The two multiples of a row.

    Returns:
        Sequence indices of each bin.

    Raises:
        ConfigError: If the strategy is unknown or the capacity is below 1.
        DataError: If a length is below 1, or "ffd" meets a sequence above capacity.

    Example:
        >>> pack_sequences([60, 55, 45, 40, 30, 25, 20, 10, 5], strategy="mffd", capacity=100)
        [[0, 3], [1, 2], [4, 5, 6, 7, 8]]
    """
    pack = FLAT_STRATEGIES.get(strategy.lower())
    if pack is None:
        raise ConfigError(f"packing_strategy is {strategy!r}; sequences are packed by {sorted(FLAT_STRATEGIES)}")
    if capacity < 1:
        raise ConfigError(f"the row capacity is {capacity}; it must be at least 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"example {index} has {length} tokens; each needs at least 1")
    sizes = [alignment.align_sequence(length) for length in lengths]
    return pack(sizes, capacity, alignment.fill_limit(capacity))


def _first_fit_decreasing(sizes: list[int], capacity: int, fill_limit: int) -> Bins:
    """Pack the largest first, each into the first bin that has room; equal sizes by falling index."""
    bins: Bins = []
    fill: list[int] = []
    for size, index in sorted(((size, index) for index, size in enumerate(sizes)), reverse=True):
        if size > fill_limit:
            raise DataError(
                f"example {index} takes {size} slots after alignment, but a row of {capacity} holds {fill_limit}; "
                'raise packed_sequence_length or use packing_strategy="mffd"'
            )
        _put_in_first_bin(index, size, bins, fill, fill_limit, start=0)
    return bins


def _put_in_first_bin(index: int, size: int, bins: Bins, fill: list[int], fill_limit: int, start: int) -> None:
    """Add to the first bin from `start` on that has room, or to a new one."""
    for bin_ in range(start, len(bins)):
        if fill[bin_] + size <= fill_limit:
            bins[bin_].append(index)
            fill[bin_] += size
            return
    bins.append([index])
    fill.append(size)


def _balanced(sizes: list[int], capacity: int, fill_limit: int) -> Bins:
    """Pack the largest first, each into the least loaded bin if it has room, else into a new one."""
    bins: Bins = []
    loads: list[tuple[int, int]] = []
    for index in _by_falling_size(sizes):
        if loads and loads[0][0] + sizes[index] <= fill_limit:
            fill, bin_ = loads[0]
            bins[bin_].append(index)
            heapq.heapreplace(loads, (fill + sizes[index], bin_))
        else:
            heapq.heappush(loads, (sizes[index], len(bins)))
            bins.append([index])
    return bins


def _by_falling_size(sizes: list[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


def _modified_first_fit_decreasing(sizes: list[int], capacity: int, fill_limit: int) -> Bins:
    """Pack by size classes relative to the capacity, so that large and medium sequences find partners first.

    Source: D. S. Johnson and M. R. Garey, "A 71/60 theorem for bin packing", 1985.
    """
    by_size = _by_falling_size(sizes)
    large = [index for index in by_size if 2 * sizes[index] > capacity]
    medium = [index for index in by_size if 2 * sizes[index] <= capacity < 3 * sizes[index]]
    small = [index for index in by_size if 3 * sizes[index] <= capacity < 6 * sizes[index]]
    tiny = [index for index in by_size if 6 * sizes[index] <= capacity]
    bins = [[index] for index in large]
    fill = [sizes[index] for index in large]

    def add_largest_that_fits(bin_: int, candidates: list[int]) -> bool:
        at = _first_that_fits(candidates, sizes, fill_limit - fill[bin_])
        if at < len(candidates):
            bins[bin_].append(candidates[at])
            fill[bin_] += sizes[candidates.pop(at)]
            return True
        return False

    has_medium = [add_largest_that_fits(bin_, medium) for bin_ in range(len(bins))]
    for bin_ in reversed(range(len(bins))):
        if has_medium[bin_] or len(small) < 2:
            continue
        smallest, others = small[-1], small[:-1]
        at = _first_that_fits(others, sizes, fill_limit - fill[bin_] - sizes[smallest])
        if at < len(others):
            bins[bin_] += [smallest, others[at]]
            fill[bin_] += sizes[smallest] + sizes[others.pop(at)]
            small = others
    rest = medium + small + tiny
    for bin_ in range(len(bins)):
        while add_largest_that_fits(bin_, rest):
            pass
    num_large = len(bins)
    for index in rest:
        _put_in_first_bin(index, sizes[index], bins, fill, fill_limit, start=num_large)
    return bins


def _first_that_fits(by_falling_size: list[int], sizes: list[int], room: int) -> int:
    """Return the position of the largest sequence of at most `room` slots, or the list's length if there is none."""
    return bisect_left(by_falling_size, -room, key=lambda index: -sizes[index])


FLAT_STRATEGIES: dict[str, Callable[[list[int], int, int], Bins]] = {
    "ffd": _first_fit_decreasing,
    "mffd": _modified_first_fit_decreasing,
    "balanced": _balanced,
}
PACKING_STRATEGIES = ("prefix_tree", *FLAT_STRATEGIES)


def adjust_bin_count(
    bins: Bins, *, min_bin_count: int = 0, bin_count_multiple: int = 1, allow_empty_bins: bool = False
) -> Bins:
    """Split bins until their number suits, moving one sequence at a time, which never breaks a capacity.

    Args:
        bins: Sequence indices of each bin.
        min_bin_count: Fewest bins to return.
        bin_count_multiple: The number of bins is a multiple of this.
        allow_empty_bins: Return empty bins where there are fewer sequences than bins wanted, instead of an error.

    Returns:
        The given bins, less what was moved, then the new ones.

    Raises:
        ConfigError: If a count is out of range.
        DataError: If there are fewer sequences than bins and empty bins are not allowed.
    """
    if min_bin_count < 0 or bin_count_multiple < 1:
        raise ConfigError(
            f"min_bin_count is {min_bin_count}, bin_count_multiple {bin_count_multiple}; "
            "they must be at least 0 and at least 1"
        )
    wanted = -(-max(len(bins), min_bin_count) // bin_count_multiple) * bin_count_multiple
    num_sequences = sum(map(len, bins))
    if num_sequences < wanted and not allow_empty_bins:
        raise DataError(f"{num_sequences} examples cannot fill {wanted} bins; give the update more examples")
    bins = [list(bin_) for bin_ in bins]
    donor = None
    for _ in range(min(wanted, num_sequences) - len(bins)):
        if donor is None or len(bins[donor]) < 2:
            donor = max(range(len(bins)), key=lambda bin_: (len(bins[bin_]), bin_))
        bins.append([bins[donor].pop()])
    return bins + [[] for _ in range(wanted - len(bins))]
