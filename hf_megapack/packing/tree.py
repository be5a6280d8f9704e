"""Examples to prefix forest: which runs of tokens are computed once, and by whom.

Invariant: the path of every example, root to leaf, spells its tokens, and every slot has at most one label. By default
a run is shared only in front of the first loss-bearing token of each of its owners, one position short; where
supervised slots may be shared, a run ends in front of the slot that would need two labels.

Examples are sorted once by the part that may be shared; then every set that a radix walk could meet is one run of that
order, and the longest common prefix of a run is the smallest of its neighbours' common prefixes. Bins therefore rebuild
their own forests without looking at a token again.
"""

from dataclasses import dataclass

import numpy as np

from hf_megapack.packing.examples import ExampleSet


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
    """
    lengths = examples.lengths[order].tolist()
    left, right, root = _split_tree(common)
    segments: list[tuple[int, int, int, int, int]] = []
    stack = [(root, 0, len(lengths), 0, -1)]
    while stack:
        node, first, stop, start, parent = stack.pop()
        if not node:
            if lengths[first] > start:
                segments.append((start, lengths[first], parent, first, stop))
            continue
        end = common[node]
        if examples.share_supervised and end > start:
            end = _end_before_conflict(examples, order[first:stop], end)
        if end - start >= min_shared_tokens:
            segments.append((start, end, parent, first, stop))
            start, parent = end, len(segments) - 1
        stack.append((right[node], node, stop, start, parent))
        stack.append((left[node], first, node, start, parent))
    return segments


def _end_before_conflict(examples: ExampleSet, owners: np.ndarray, end: int) -> int:
    """Return where a run that `owners` share must end so that none of its slots needs two labels.

    Inside the run all owners go on with the same token, so only its last slot can: it predicts the tokens that follow,
    for those owners that learn them.
    """
    last = examples.offsets[owners] + (end - 1)
    labels = examples.tokens[last[examples.is_learned[last]] + 1]
    return end - 1 if labels.size and (labels != labels[0]).any() else end


def _split_tree(common: list[int]) -> tuple[list[int], list[int], int]:
    """Return left child, right child and root of the tree that splits a run of examples where they share least.

    Node `i` splits between the examples `i - 1` and `i`; 0 stands for a single example.
    """
    left, right = [0] * len(common), [0] * len(common)
    stack: list[int] = []
    for node in range(1, len(common)):
        below = 0
        while stack and common[stack[-1]] > common[node]:
            below = stack.pop()
        left[node] = below
        if stack:
            right[stack[-1]] = node
        stack.append(node)
    return left, right, stack[0] if stack else 0
