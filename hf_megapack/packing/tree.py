"""Examples to prefix forest: which runs of tokens are computed once, and by whom.

Invariant: the path of every example, root to leaf, spells its tokens, and every slot has at most one label. By default
a run is shared only in front of the first loss-bearing token of each of its owners, one position short; where
supervised slots may be shared, a run ends in front of the slot that would need two labels. Among the ways to cut, those
that make most of short runs shareable are preferred, never at the cost of slots.

Examples are sorted once by the part that may be shared; then every set that a radix walk could meet is one run of that
order, and the longest common prefix of a run is the smallest of its neighbours' common prefixes. Bins therefore rebuild
their own forests without looking at a token again.
"""

import operator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hf_megapack.packing.examples import ExampleSet

# Most early cuts that are tried in one run.
_MAX_EARLY_CUTS = 2


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Forest:
    """Segments in depth-first preorder; a segment's owners are one run of the sorted examples.

    Attributes:
        start: Depth at which each segment begins in its examples. int64, shape (num_segments,).
        end: Depth at which it ends. int64, shape (num_segments,).
        parent: Segment that it continues, -1 for a root. int64, shape (num_segments,).
        first: Position in `order` of its first owner. int64, shape (num_segments,).
        stop: Position in `order` after its last owner. int64, shape (num_segments,).
        order: Examples, sorted by their shareable tokens. int64, shape (num_examples of this forest,).
        common: Shareable tokens that each example of `order` has in common with the one before it; the first entry
            means nothing. int64, same shape.
        num_tokens: Tokens of all segments.
    """

    start: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    order: np.ndarray
    common: np.ndarray
    num_tokens: int


def build_forest(examples: ExampleSet, min_shared_tokens: int) -> Forest:
    """Build the prefix forest of all examples of an update.

    Args:
        examples: The examples.
        min_shared_tokens: Tokens below which a shared run is repeated instead; at least 1.

    Returns:
        The forest, the same for the same examples in the same order.

    Example:
        >>> from hf_megapack.packing.examples import gather_examples
        >>> pair = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0] * 4}, {"input_ids": [1, 2, 5], "loss_mask": [0] * 3}]
        >>> forest = build_forest(gather_examples(pair), min_shared_tokens=2)
        >>> list(zip(forest.start.tolist(), forest.end.tolist(), forest.parent.tolist()))
        [(0, 2, -1), (2, 4, 0), (2, 3, 0)]
    """
    order, common = sort_examples(examples)
    return _forest(examples, order, common, min_shared_tokens)


def sort_examples(examples: ExampleSet) -> tuple[np.ndarray, np.ndarray]:
    """Sort examples by their shareable tokens and measure what neighbours have in common.

    Args:
        examples: The examples.

    Returns:
        Example indices in order and, for each, the shareable tokens in common with the one before it (0 for the
        first). Both int64, shape (num_examples,).
    """
    # Any fixed order of tokens brings equal prefixes together and puts a prefix before what continues it. The order of
    # their bytes in memory is one, and comparing it is one memcmp instead of a loop over tokens.
    starts, sizes = examples.offsets[:-1].tolist(), examples.shareable.tolist()
    tokens = examples.tokens
    keys = [tokens[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = np.zeros(len(order), dtype=np.int64)
    for position in range(1, len(order)):
        before, here = order[position - 1], order[position]
        size = min(sizes[before], sizes[here])
        if size:
            differs = tokens[starts[before] : starts[before] + size] != tokens[starts[here] : starts[here] + size]
            at = int(differs.argmax())
            common[position] = at if differs[at] else size
    return np.asarray(order, dtype=np.int64), common


def fewest_tokens(examples: ExampleSet, row_capacity: int | None = None) -> int:
    """Return a number of slots that no packing of an update can go below, whatever its `min_shared_tokens`.

    Each prefix that may be shared needs a slot, and so does each token behind. Where that is more than a row holds,
    what all examples have in common is needed once per row.

    Args:
        examples: The examples of an update.
        row_capacity: Slots of a row, each example fits one; None for one row without end.

    Returns:
        The distinct shareable prefixes and all other tokens. Slots that need several labels count once, so with
        `share_supervised` the bound may be out of reach.

    Example:
        >>> from hf_megapack.packing.examples import gather_examples
        >>> rows = [[1, 2, 3, 4], [1, 2, 5], [1, 6]]
        >>> update = gather_examples([{"input_ids": ids, "loss_mask": [0] * len(ids)} for ids in rows])
        >>> fewest_tokens(update)  # 1, 12, 123, 1234, 125, 16
        6
        >>> fewest_tokens(update, row_capacity=4)  # Two rows, each with the 1 and up to three of the other five.
        7
    """
    _, common = sort_examples(examples)
    num_tokens = int(examples.lengths.sum() - common.sum())
    in_all = int(common[1:].min()) if common.size > 1 else 0
    if row_capacity is None or num_tokens <= row_capacity:
        return num_tokens
    num_rows = -(-(num_tokens - in_all) // (row_capacity - in_all))
    return num_tokens + (num_rows - 1) * in_all


def rebuild_forest(forest: Forest, positions: np.ndarray, examples: ExampleSet, min_shared_tokens: int) -> Forest:
    """Build the forest of some of a forest's examples afresh: longer shared runs where dropped examples cut them short.

    Args:
        forest: Forest of all examples.
        positions: Positions in `forest.order` of those to keep, increasing. int64.
        examples: All examples of the update.
        min_shared_tokens: As for `build_forest`.

    Returns:
        A forest of its own, which may be longer than the restricted one: a run may have become too short to share.
    """
    order = forest.order[positions]
    common = np.zeros(positions.size, dtype=np.int64)
    if positions.size > 1:
        between = forest.common[positions[0] + 1 : positions[-1] + 1]
        common[1:] = np.minimum.reduceat(between, positions[:-1] - positions[0])
    return _forest(examples, order, common, min_shared_tokens)


def restrict_forest(forest: Forest, positions: np.ndarray) -> Forest:
    """Keep the segments of some examples exactly where they were cut, joining runs that nothing branches off any more.

    Args:
        forest: Forest of all examples.
        positions: Positions in `forest.order` of those to keep, increasing. int64.

    Returns:
        A forest as long as the sum of the kept segments: what a bin admitted.
    """
    first = np.searchsorted(positions, forest.first)
    stop = np.searchsorted(positions, forest.stop)
    kept = np.flatnonzero(stop > first)
    parent = forest.parent[kept]
    continues = (parent >= 0) & (first[kept] == first[parent]) & (stop[kept] == stop[parent])
    chain = np.cumsum(~continues) - 1
    heads = np.flatnonzero(~continues)
    tails = np.append(heads[1:], kept.size) - 1
    chain_of = np.full(forest.parent.size + 1, -1, dtype=np.int64)
    chain_of[kept] = chain
    start, end = forest.start[kept[heads]], forest.end[kept[tails]]
    order = forest.order[positions]
    return Forest(
        start=start,
        end=end,
        parent=chain_of[parent[heads]],
        first=first[kept[heads]],
        stop=stop[kept[heads]],
        order=order,
        common=np.zeros(order.size, dtype=np.int64),
        num_tokens=int((end - start).sum()),
    )


def flat_forest(lengths: np.ndarray, order: np.ndarray) -> Forest:
    """Return the forest in which every example of `order` is a root of its own."""
    sizes = lengths[order]
    zeros, positions = np.zeros_like(sizes), np.arange(sizes.size)
    return Forest(
        start=zeros,
        end=sizes,
        parent=zeros - 1,
        first=positions,
        stop=positions + 1,
        order=order,
        common=zeros,
        num_tokens=int(sizes.sum()),
    )


def _forest(examples: ExampleSet, order: np.ndarray, common: np.ndarray, min_shared_tokens: int) -> Forest:
    """Cut sorted examples into segments."""
    segments = _cut_segments(examples, order, common.tolist(), min_shared_tokens)
    start, end, parent, first, stop = np.asarray(segments, dtype=np.int64).reshape(-1, 5).T
    return Forest(
        start=start,
        end=end,
        parent=parent,
        first=first,
        stop=stop,
        order=order,
        common=common,
        num_tokens=int((end - start).sum()),
    )


def _cut_segments(
    examples: ExampleSet, order: np.ndarray, common: list[int], min_shared_tokens: int
) -> list[tuple[int, int, int, int, int]]:
    """Return (start, end, parent, first, stop) of every segment, in depth-first preorder.

    A node of the split tree stands for a run of examples and the prefix that they share. Where that prefix is too short
    to be worth a segment, its parts start again from the same depth, so the short run is repeated in each of them.

    Of two parts that continue a shared run the one with more distinct prefixes comes first: the trunk of a tree is one
    run of slots, its leaves are behind it, so that attention's blocks are seen whole or not at all and few need a mask.
    """
    lengths = examples.lengths[order].tolist()
    tree = _split_tree(common)
    ends = _shared_ends(examples, order, common, tree) if examples.share_supervised else common
    segments: list[tuple[int, int, int, int, int]] = []
    # Prefixes that the examples in front of each position have and those before them do not.
    prefixes = list(accumulate(map(operator.sub, lengths, common), initial=0))
    stack = [(tree.root, 0, len(lengths), 0, -1)]
    while stack:
        node, first, stop, start, parent = stack.pop()
        if node < 0:
            if lengths[first] > start:
                segments.append((start, lengths[first], parent, first, stop))
            continue
        if ends[node] - start >= min_shared_tokens:
            end = _best_cut(tree, ends, node, start, min_shared_tokens)
            segments.append((start, end, parent, first, stop))
            start, parent = end, len(segments) - 1
        left, right = (tree.left[node], first, node, start, parent), (tree.right[node], node, stop, start, parent)
        size_left = prefixes[node] - prefixes[first] + common[first]
        size_right = prefixes[stop] - prefixes[node] + common[node]
        stack += (left, right) if parent >= 0 and size_right > size_left else (right, left)
    return segments


def _best_cut(tree: "_SplitTree", ends: list[int], node: int, start: int, min_shared_tokens: int) -> int:
    """Return where the run of a node is cut: at its end, or earlier where that saves slots.

    Cut early, the rest of the run is repeated in every part, but a part whose own run was a little too short to be
    shared reaches the minimum. What lies below is compared as if it were cut at its ends; cutting some of that early
    too can only save more, so the forest is never longer than without early cuts.
    """
    left, right = tree.left, tree.right
    end, least = ends[node], ends[node] + min_shared_tokens
    too_short = []
    parts = [left[node], right[node]]
    for part in parts:
        if part >= 0 and ends[part] < least:
            too_short.append(ends[part])
            parts += (left[part], right[part])
    best, saved = end, 0
    if too_short and max(too_short) > end:
        for cut in _promising_cuts(start, end, too_short, min_shared_tokens):
            saved_here = _saved_by_cut(tree, ends, node, cut, min_shared_tokens)
            if saved_here > saved:
                best, saved = cut, saved_here
    return best


def _saved_by_cut(tree: "_SplitTree", ends: list[int], node: int, cut: int, min_shared_tokens: int) -> int:
    """Return the slots that a subtree has fewer if its topmost run is cut early and all others at their ends."""
    left, right = tree.left, tree.right
    saved = ends[node] - cut
    # Each part with where it starts now and where it would.
    stack = [(left[node], ends[node], cut), (right[node], ends[node], cut)]
    while stack:
        part, now, then = stack.pop()
        if part < 0:
            saved += then - now
            continue
        end = ends[part]
        shared_now, shared_then = end - now >= min_shared_tokens, end - then >= min_shared_tokens
        if shared_now and shared_then:
            # Everything below starts at the same depth either way.
            saved += then - now
            continue
        if shared_now:
            saved, now = saved + end - now, end
        elif shared_then:
            saved, then = saved - (end - then), end
        stack += ((left[part], now, then), (right[part], now, then))
    return saved


def _promising_cuts(start: int, end: int, too_short: list[int], min_shared_tokens: int) -> list[int]:
    """Return the early cuts of a run that could save slots, the most promising first.

    A cut `c` repeats `end - c` tokens for every split below it, and saves at most `r - c` for every run that reaches
    the minimum by it, `r` being that run's end.
    """
    found = []
    reached = sum_of_ends = 0
    for run_end in sorted(too_short, reverse=True):
        cut = run_end - min_shared_tokens
        if run_end <= end or cut < start + min_shared_tokens:
            break
        reached, sum_of_ends = reached + 1, sum_of_ends + run_end
        saved = sum_of_ends - reached * cut - (len(too_short) + 1) * (end - cut)
        if saved > 0:
            found.append((-saved, cut))
    return [cut for _, cut in sorted(found)[:_MAX_EARLY_CUTS]]


def _shared_ends(examples: ExampleSet, order: np.ndarray, common: list[int], tree: "_SplitTree") -> list[int]:
    """Return where the run of each node must end so that no slot of it needs two labels."""
    ends = list(common)
    stack = [(tree.root, 0, len(common))]
    while stack:
        node, first, stop = stack.pop()
        if node >= 0:
            if common[node]:
                ends[node] = _end_before_conflict(examples, order[first:stop], common[node])
            stack += ((tree.left[node], first, node), (tree.right[node], node, stop))
    return ends


def _end_before_conflict(examples: ExampleSet, owners: np.ndarray, end: int) -> int:
    """Return where a run that `owners` share must end so that none of its slots needs two labels.

    Inside the run all owners go on with the same token, so only its last slot can: it predicts the tokens that follow,
    for those owners that learn them.
    """
    last = examples.offsets[owners] + (end - 1)
    labels = examples.tokens[last[examples.is_learned[last]] + 1]
    return end - 1 if labels.size and (labels != labels[0]).any() else end


@dataclass(frozen=True, eq=False, slots=True)
class _SplitTree:
    """How a run of examples splits where they share least.

    Node `i` splits between the examples `i - 1` and `i`; `~i` stands for example `i` alone.

    Attributes:
        left: What comes before each node's split.
        right: What comes after it.
        root: The whole run.
    """

    left: list[int]
    right: list[int]
    root: int


def _split_tree(common: list[int]) -> _SplitTree:
    """Return the split tree of sorted examples from what neighbours have in common."""
    left = [~(node - 1) for node in range(len(common))]
    right = [~node for node in range(len(common))]
    stack: list[int] = []
    for node in range(1, len(common)):
        below = left[node]
        while stack and common[stack[-1]] > common[node]:
            below = stack.pop()
        left[node] = below
        if stack:
            right[stack[-1]] = node
        stack.append(node)
    return _SplitTree(left, right, stack[0] if stack else ~0)
