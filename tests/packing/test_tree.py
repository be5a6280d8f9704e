"""The prefix forest against the radix walk it must equal."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.packing import build_forest, gather_examples
from hf_megapack.packing.tree import rebuild_forest, restrict_forest
from tests.helpers.brute_force_tree import as_examples, branch, radix_walk, random_examples, walk_size


def as_walked(forest):
    """Return the forest's segments as a set of (owners, start, end, owners of the parent)."""
    owners = [
        tuple(sorted(forest.order[first:stop].tolist())) for first, stop in zip(forest.first, forest.stop, strict=True)
    ]
    return sorted(
        (owners[index], int(forest.start[index]), int(forest.end[index]), () if parent < 0 else owners[parent])
        for index, parent in enumerate(forest.parent.tolist())
    )


def walked(examples, min_shared_tokens):
    segments = radix_walk(examples, min_shared_tokens)
    return sorted(
        (
            tuple(sorted(segment.owners)),
            segment.start,
            segment.end,
            () if segment.parent < 0 else tuple(sorted(segments[segment.parent].owners)),
        )
        for segment in segments
    )


def assert_preorder(forest):
    """Parents precede children, and a segment's descendants follow it without interruption."""
    open_path = []
    for segment, parent in enumerate(forest.parent.tolist()):
        while open_path and open_path[-1] != parent:
            open_path.pop()
        assert parent == (open_path[-1] if open_path else -1)
        assert forest.start[segment] == (forest.end[parent] if parent >= 0 else 0)
        open_path.append(segment)


@pytest.mark.parametrize(("common", "num_tokens"), [(63, 146), (64, 84)])
def test_shorter_runs_than_the_minimum_are_repeated(common, num_tokens):
    """63 common tokens stay private: 2 * 73 = 146; 64 are shared: 64 + 2 * 10 = 84."""
    examples = [branch(common, 10, common, family) for family in (1, 2)]
    assert build_forest(gather_examples(as_examples(examples)), 64).num_tokens == num_tokens
    assert walk_size(examples, 64) == num_tokens


def test_a_target_at_index_one_shares_nothing():
    ids = list(range(100))
    mask = [0, 1] + [0] * 98
    assert build_forest(gather_examples(as_examples([(ids, mask)] * 2)), 1).num_tokens == 200


def test_identical_examples_without_targets_are_one_segment():
    forest = build_forest(gather_examples(as_examples([(list(range(100)), [0] * 100)] * 2)), 64)
    assert as_walked(forest) == [((0, 1), 0, 100, ())]


def test_duplicates_share_all_but_what_they_learn():
    """Eight times 100 + 20 tokens, the 20 learned: 99 shared + 8 * 21 private = 267."""
    example = (list(range(120)), [0] * 100 + [1] * 20)
    assert build_forest(gather_examples(as_examples([example] * 8)), 64).num_tokens == 267


@pytest.mark.parametrize("assistant_mask", ["all", "last"])
def test_forest_equals_the_radix_walk(assistant_mask):
    rng = random.Random(11)
    num_shared = 0
    for _ in range(300):
        examples = random_examples(rng, assistant_mask)
        min_shared_tokens = rng.randint(1, 6)
        forest = build_forest(gather_examples(as_examples(examples)), min_shared_tokens)
        assert as_walked(forest) == walked(examples, min_shared_tokens)
        assert_preorder(forest)
        num_shared += sum(len(segment[0]) > 1 for segment in as_walked(forest))
    assert num_shared > 300


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, 8)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_forest_equals_the_radix_walk_on_tiny_alphabets(drafts, min_shared_tokens):
    """Nested prefixes, strict prefixes, duplicates and one-token examples are the rule here."""
    examples = [(ids, [int(at >= first) for at in range(len(ids))]) for ids, first in drafts]
    forest = build_forest(gather_examples(as_examples(examples)), min_shared_tokens)
    assert as_walked(forest) == walked(examples, min_shared_tokens)
    assert_preorder(forest)


def test_every_path_spells_its_example():
    rng = random.Random(12)
    for _ in range(50):
        examples = random_examples(rng, "all")
        forest = build_forest(gather_examples(as_examples(examples)), 3)
        spelled = [0] * len(examples)
        for start, end, first, stop in zip(forest.start, forest.end, forest.first, forest.stop, strict=True):
            owners = forest.order[first:stop].tolist()
            runs = {tuple(examples[owner][0][start:end]) for owner in owners}
            assert len(runs) == 1
            for owner in owners:
                assert spelled[owner] == start
                spelled[owner] = int(end)
        assert spelled == [len(ids) for ids, _ in examples]


def test_a_rebuilt_forest_equals_the_walk_of_its_members():
    rng = random.Random(13)
    for _ in range(150):
        examples = random_examples(rng, "all")
        gathered = gather_examples(as_examples(examples))
        forest = build_forest(gathered, 4)
        kept = sorted(rng.sample(range(len(examples)), rng.randint(1, len(examples))))
        rebuilt = rebuild_forest(forest, np.array(kept), gathered, 4)
        members = forest.order[kept].tolist()
        expected = sorted(
            (tuple(sorted(members[at] for at in owners)), start, end, tuple(sorted(members[at] for at in above)))
            for owners, start, end, above in walked([examples[index] for index in members], 4)
        )
        assert as_walked(rebuilt) == expected
        assert rebuilt.num_tokens == walk_size([examples[index] for index in members], 4)
        assert_preorder(rebuilt)


def test_a_restricted_forest_is_as_long_as_its_segments():
    rng = random.Random(14)
    num_joined = 0
    for _ in range(150):
        examples = random_examples(rng, "all")
        forest = build_forest(gather_examples(as_examples(examples)), 4)
        kept = sorted(rng.sample(range(len(examples)), rng.randint(1, len(examples))))
        restricted = restrict_forest(forest, np.array(kept))
        members = set(forest.order[kept].tolist())
        held = [segment for segment in radix_walk(examples, 4) if members & set(segment.owners)]
        assert restricted.num_tokens == sum(segment.end - segment.start for segment in held)
        assert_preorder(restricted)
        for segment, parent in enumerate(restricted.parent.tolist()):
            same = parent >= 0 and restricted.first[segment] == restricted.first[parent]
            assert not (same and restricted.stop[segment] == restricted.stop[parent])
        num_joined += len(held) - restricted.parent.size
    assert num_joined > 0
