"""Slow, independent oracles for the packing room: plain Python over tokens, written from the rules.

Nothing here sorts examples, compares neighbours or imports `hf_megapack`.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Example = tuple[list[int], list[int]]


@dataclass(frozen=True)
class WalkedSegment:
    """One segment of the radix walk: owners, depth range and the segment it hangs from (-1 for a root)."""

    owners: tuple[int, ...]
    start: int
    end: int
    parent: int


def shareable_length(loss_mask: Sequence[int]) -> int:
    """Return how many leading tokens predict nothing that is learned; index 0 never counts."""
    for index in range(1, len(loss_mask)):
        if loss_mask[index]:
            return index - 1
    return len(loss_mask)


def radix_walk(examples: Sequence[Example], min_shared_tokens: int) -> list[WalkedSegment]:
    """Cut examples into segments, group by group, comparing token by token."""
    tokens = [ids for ids, _ in examples]
    limits = [shareable_length(mask) for _, mask in examples]
    segments: list[WalkedSegment] = []

    def tail(index: int, start: int, parent: int) -> None:
        segments.append(WalkedSegment((index,), start, len(tokens[index]), parent))

    def walk(group: list[int], start: int, parent: int) -> None:
        group = [index for index in group if len(tokens[index]) > start]
        for index in group:
            if limits[index] <= start:
                tail(index, start, parent)
        group = [index for index in group if limits[index] > start]
        if len(group) < 2:
            for index in group:
                tail(index, start, parent)
            return
        end = start
        stop = min(limits[index] for index in group)
        while end < stop and len({tokens[index][end] for index in group}) == 1:
            end += 1
        if end - start >= min_shared_tokens:
            segments.append(WalkedSegment(tuple(group), start, end, parent))
            walk(group, end, len(segments) - 1)
            return
        parts: dict[int, list[int]] = {}
        for index in group:
            if end > start and (len(tokens[index]) <= end or limits[index] <= end):
                tail(index, start, parent)
            else:
                parts.setdefault(tokens[index][end], []).append(index)
        for part in parts.values():
            walk(part, start, parent)

    walk(list(range(len(examples))), 0, -1)
    return segments


def walk_size(examples: Sequence[Example], min_shared_tokens: int) -> int:
    """Return the slots of the walk's segments."""
    return sum(segment.end - segment.start for segment in radix_walk(examples, min_shared_tokens))


def fill_by_remainder(examples: Sequence[Example], min_shared_tokens: int, capacity: int) -> list[tuple[set[int], int]]:
    """Place the longest first where least room is left, in bins that keep the walk's segments: what we must not exceed.

    Returns:
        Examples and slots of each bin.
    """
    segments = radix_walk(examples, min_shared_tokens)
    paths = [
        {index for index, segment in enumerate(segments) if example in segment.owners}
        for example in range(len(examples))
    ]
    size = [segment.end - segment.start for segment in segments]
    bins: list[tuple[set[int], set[int]]] = []
    filled: list[int] = []
    for example in sorted(range(len(examples)), key=lambda index: -len(examples[index][0])):
        after = [
            total + sum(size[index] for index in paths[example] - held)
            for total, (_, held) in zip(filled, bins, strict=True)
        ]
        fitting = [bin_ for bin_ in range(len(bins)) if after[bin_] <= capacity]
        if fitting:
            chosen = max(fitting, key=lambda bin_: (after[bin_], -bin_))
            filled[chosen] = after[chosen]
        else:
            chosen = len(bins)
            bins.append((set(), set()))
            filled.append(sum(size[index] for index in paths[example]))
        bins[chosen][0].add(example)
        bins[chosen][1].update(paths[example])
    return [(members, total) for (members, _), total in zip(bins, filled, strict=True)]


def learned_pairs(examples: Sequence[Example]) -> Counter[tuple[tuple[int, ...], int]]:
    """Return every (context, target) that the examples teach, with multiplicity."""
    return Counter(
        (tuple(ids[:index]), ids[index]) for ids, mask in examples for index in range(1, len(ids)) if mask[index]
    )


def row_pairs(row: Any) -> Counter[tuple[tuple[int, ...], int]]:
    """Return every (context, target) that a packed row teaches, its contexts read only through `subtree_end`."""
    pairs: Counter[tuple[tuple[int, ...], int]] = Counter()
    for slot in np.flatnonzero(row.loss_weights).tolist():
        seen = row.subtree_end[: slot + 1] > slot
        context = tuple(row.input_ids[: slot + 1][seen].tolist())
        pairs[context, int(row.labels[slot])] += int(row.loss_weights[slot])
    return pairs


def ancestor_mask(segments: Any, num_slots: int) -> np.ndarray:
    """Return which slot (first axis) sees which, by following parents; unowned slots see back to the last owned."""
    mask = np.zeros((num_slots, num_slots), dtype=bool)
    owned = np.zeros(num_slots, dtype=bool)
    for segment, (start, end) in enumerate(zip(segments.start, segments.end, strict=True)):
        owned[start:end] = True
        for slot in range(start, end):
            mask[slot, start : slot + 1] = True
            above = segments.parent[segment]
            while above >= 0:
                mask[slot, segments.start[above] : segments.end[above]] = True
                above = segments.parent[above]
    for slot in np.flatnonzero(~owned).tolist():
        seen = slot
        while seen >= 0 and not owned[seen]:
            mask[slot, seen] = True
            seen -= 1
    return mask


def as_examples(pairs: Sequence[Example]) -> list[dict[str, np.ndarray]]:
    """Return the examples in the form that the collator reads."""
    return [{"input_ids": np.array(ids), "loss_mask": np.array(mask)} for ids, mask in pairs]


def random_examples(rng: random.Random, assistant_mask: str, max_tokens: int = 60) -> list[Example]:
    """Return two to twelve examples that branch off one another, some of them duplicates or strict prefixes.

    Args:
        rng: Where chance comes from.
        assistant_mask: "all" supervises several stretches, "last" the final one.
        max_tokens: Longest example.
    """
    stories: list[list[int]] = [[]]
    examples: list[Example] = []
    for _ in range(rng.randint(2, 12)):
        story = rng.choice(stories)
        cut = rng.randint(0, len(story))
        ids = story[:cut] + [rng.randrange(3) for _ in range(rng.randint(0, max_tokens - cut))]
        ids = ids or [rng.randrange(3)]
        stories.append(ids)
        stretches = sorted(rng.randint(0, len(ids)) for _ in range(2 * rng.randint(1, 3)))
        if assistant_mask == "last":
            stretches = [stretches[-1], len(ids)]
        mask = [0] * len(ids)
        for start, end in zip(stretches[::2], stretches[1::2], strict=True):
            mask[start:end] = [1] * (end - start)
        examples.append((ids, mask))
    if rng.random() < 0.3:
        examples.append(rng.choice(examples))
    return examples


def fixture_examples(assistant_mask: str) -> list[Example]:
    """Return four examples of 193, 217, 241 and 205 tokens: 128 in common, the last with its first 64 reversed."""
    examples = []
    for index, length in enumerate((193, 217, 241, 205)):
        ids = list(range(128)) + [1000 * (index + 1) + at for at in range(128, length)]
        if index == 3:
            ids[:64] = ids[63::-1]
        mask = [0] * length
        mask[176:] = [1] * (length - 176)
        if assistant_mask == "all":
            mask[128:144] = [1] * 16
        examples.append((ids, mask))
    return examples


def branch(common: int, own: int, shareable: int, family: int) -> Example:
    """Return an example whose first `common` tokens all branches share and whose first `shareable` may be shared."""
    ids = list(range(common)) + [10_000 * family + at for at in range(own)]
    mask = [0] * len(ids)
    mask[shareable + 1] = 1
    return ids, mask
