"""Examples to an order that brings common prefixes together, without keeping their tokens.

Only what may be shared counts. Every run of `BLOCK_TOKENS` tokens is replaced by a 32-bit hash, so that sorting a whole
dataset needs a fraction of its size; two runs that hash alike cost sharing, never correctness, because the packing of
an update looks at the tokens themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_megapack.packing.examples import ExampleSet

BLOCK_TOKENS = 32
# Odd 64-bit factors: the upper half of the sum depends on every token and its place.
_FACTORS = np.random.Generator(np.random.PCG64(0)).integers(0, 2**63, BLOCK_TOKENS, dtype=np.uint64) * 2 + 1


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PrefixOrder:
    """The examples of a dataset, sorted by the prefixes that they may share.

    Attributes:
        rank: Place of each example in the sorted order. int64, shape (num_examples,).
        common: For each place, the tokens that its example has in common with the one before it, in whole blocks of
            `BLOCK_TOKENS`; 0 for the first. int64, same shape.
    """

    rank: np.ndarray
    common: np.ndarray


def order_by_prefix(parts: Iterable[ExampleSet]) -> PrefixOrder:
    """Sort the examples of a dataset by the prefixes that they may share.

    Args:
        parts: The dataset, in order, some examples at a time.

    Returns:
        The order; equal prefixes keep the order of the dataset.

    Example:
        >>> from hf_megapack.packing.examples import gather_examples
        >>> prompts = [[1] * 64, [2] * 32, [1] * 32]
        >>> examples = [{"input_ids": [*prompt, 9, 9], "loss_mask": [0] * len(prompt) + [0, 1]} for prompt in prompts]
        >>> order = order_by_prefix([gather_examples(examples)])
        >>> abs(order.rank[0] - order.rank[2]).item(), sorted(order.common.tolist())
        (1, [0, 0, 32])
    """
    keys = [key for part in parts for key in _prefix_keys(part)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = np.zeros(len(keys), dtype=np.int64)
    for place in range(1, len(keys)):
        before = np.frombuffer(keys[order[place - 1]], dtype=np.uint32)
        here = np.frombuffer(keys[order[place]], dtype=np.uint32)
        size = min(before.size, here.size)
        differs = np.flatnonzero(before[:size] != here[:size])
        common[place] = BLOCK_TOKENS * (int(differs[0]) if differs.size else size)
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys))
    return PrefixOrder(rank=rank, common=common)


def shuffle_by_prefix(order: PrefixOrder, members: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Walk the prefix tree of some examples depth first, the branches of every fork in random order.

    Args:
        order: Order of the dataset.
        members: Examples to walk, each once. int64.
        generator: Source of the randomness.

    Returns:
        `members` rearranged: examples that share a prefix of any length are one run. int64.
    """
    places = np.sort(order.rank[members])
    by_place = members[np.argsort(order.rank[members])]
    common = np.zeros(places.size, dtype=np.int64)
    if places.size > 1:
        between = order.common[places[0] + 1 : places[-1] + 1]
        common[1:] = np.minimum.reduceat(between, places[:-1] - places[0])
    return by_place[_random_walk(common, generator)]


def prefix_families(order: PrefixOrder, max_examples: int) -> np.ndarray:
    """Divide examples into families: the largest subtrees of the prefix tree that are not too large.

    Args:
        order: Order of the dataset.
        max_examples: Most examples of a family.

    Returns:
        Family of each example, numbered in sorted order. int64, shape (num_examples,).

    Example:
        >>> order = PrefixOrder(rank=np.array([0, 3, 1, 2]), common=np.array([0, 64, 32, 0]))
        >>> prefix_families(order, 4).tolist(), prefix_families(order, 2).tolist()
        ([0, 1, 0, 0], [0, 2, 0, 1])
    """
    begins = np.zeros(order.common.size, dtype=np.int64)
    stack = [(0, order.common.size)]
    while stack:
        first, stop = stack.pop()
        size = stop - first
        if size == 1 or (size <= max_examples and order.common[first + 1 : stop].min() > 0):
            begins[first] = 1
        else:
            stack.extend(_branches(order.common, first, stop))
    return (np.cumsum(begins) - 1)[order.rank]


def _prefix_keys(examples: ExampleSet) -> list[bytes]:
    """Return the hashed blocks of what each example may share: equal bytes up to the first block that differs."""
    keys = []
    for start, size in zip(examples.offsets[:-1].tolist(), examples.shareable.tolist(), strict=True):
        whole = size - size % BLOCK_TOKENS
        blocks = examples.tokens[start : start + whole].astype(np.uint64).reshape(-1, BLOCK_TOKENS)
        keys.append(((blocks * _FACTORS).sum(axis=1) >> np.uint64(32)).astype(np.uint32).tobytes())
    return keys


def _random_walk(common: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the places of a sorted run in a random depth-first order of its prefix tree.

    Args:
        common: What each place has in common with the one before it, shape (num_places,); the first means nothing.
        generator: Source of the randomness.

    Returns:
        A permutation of the places. int64.
    """
    walked: list[int] = []
    stack = [(0, common.size)]
    while stack:
        first, stop = stack.pop()
        if stop - first == 1:
            walked.append(first)
            continue
        branches = _branches(common, first, stop)
        stack.extend(branches[branch] for branch in generator.permutation(len(branches)))
    return np.asarray(walked, dtype=np.int64)


def _branches(common: np.ndarray, first: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts into which the places from `first` up to `stop` fall where they have least in common."""
    inside = common[first + 1 : stop]
    forks = (first + 1 + np.flatnonzero(inside == inside.min())).tolist()
    return list(pairwise([first, *forks, stop]))
