"""The prefix forest against the radix walk, which it equals or undercuts."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.packing import build_forest, gather_examples
from hf_megapack.packing.tree import fewest_tokens, rebuild_forest, restrict_forest
from tests.helpers.brute_force_tree import as_examples, branch, radix_walk, random_examples, shareable_length, walk_size


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


def assert_as_short_as_walked(forest, examples, min_shared_tokens):
    """Segment for segment what the walk makes, or valid and shorter; return whether it is shorter."""
    assert_preorder(forest)
    segments = as_walked(forest)
    if segments == walked(examples, min_shared_tokens):
        return False
    for owners, start, end, _ in segments:
        assert len(owners) == 1 or end - start >= min_shared_tokens
        assert len(owners) == 1 or end <= min(shareable_length(examples[owner][1]) for owner in owners)
        assert len({tuple(examples[owner][0][:end]) for owner in owners}) == 1
    spelled = Counter(dict.fromkeys(range(len(examples)), 0))
    for owners, start, end, _ in segments:
        spelled.update(dict.fromkeys(owners, end - start))
    assert spelled == {owner: len(ids) for owner, (ids, _) in enumerate(examples)}
    assert forest.num_tokens < walk_size(examples, min_shared_tokens)
    return True


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
def test_forest_equals_the_radix_walk_or_is_shorter(assistant_mask):
    rng = random.Random(11)
    num_shared = num_shorter = 0
    for _ in range(300):
        examples = random_examples(rng, assistant_mask)
        min_shared_tokens = rng.randint(1, 6)
        forest = build_forest(gather_examples(as_examples(examples)), min_shared_tokens)
        num_shorter += assert_as_short_as_walked(forest, examples, min_shared_tokens)
        num_shared += sum(len(segment[0]) > 1 for segment in as_walked(forest))
    assert num_shared > 300
    assert 0 < num_shorter < 100


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(0, 8)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_forest_is_never_longer_than_the_radix_walk_on_tiny_alphabets(drafts, min_shared_tokens):
    """Nested prefixes, strict prefixes, duplicates and one-token examples are the rule here."""
    examples = [(ids, [int(at >= first) for at in range(len(ids))]) for ids, first in drafts]
    forest = build_forest(gather_examples(as_examples(examples)), min_shared_tokens)
    assert_as_short_as_walked(forest, examples, min_shared_tokens)


@pytest.mark.parametrize(("common", "cut", "num_tokens"), [(100, 86, 264), (117, 86, 281), (118, 118, 282)])
def test_a_run_is_cut_early_where_that_lets_a_part_be_shared(common, cut, num_tokens):
    """A and B share 150 tokens, C the first 100: cut there, 50 are too few to share, and 100 + 2 * 70 + 60 = 300.

    Cut at 86, A and B share [86, 150): 86 + 64 + 2 * 20 + 14 + 60 = 264. Where C has the first 118 in common, either
    way takes 282.
    """
    examples = [branch(150, 20, 150, 1), branch(150, 20, 150, 2), branch(common, 60, common, 3)]
    forest = build_forest(gather_examples(as_examples(examples)), 64)
    assert forest.num_tokens == num_tokens
    assert forest.end[0] == cut


@pytest.mark.parametrize("share_supervised", [False, True])
def test_no_forest_is_shorter_than_its_lower_bound(share_supervised):
    """Counted by brute force: the distinct prefixes that may be shared, and every token behind them."""
    rng = random.Random(15)
    num_reached = 0
    for _ in range(200):
        examples = random_examples(rng, "all")
        gathered = gather_examples(as_examples(examples), share_supervised=share_supervised)
        limits = [len(ids) if share_supervised else shareable_length(mask) for ids, mask in examples]
        shareable = [ids[:limit] for (ids, _), limit in zip(examples, limits, strict=True)]
        prefixes = {tuple(ids[:end]) for ids in shareable for end in range(1, len(ids) + 1)}
        behind = sum(len(ids) - limit for (ids, _), limit in zip(examples, limits, strict=True))
        bound = fewest_tokens(gathered)
        assert bound == len(prefixes) + behind
        sizes = [build_forest(gathered, min_shared_tokens).num_tokens for min_shared_tokens in (1, 2, 5)]
        assert bound <= min(sizes)
        num_reached += bound == sizes[0]
    assert num_reached == 200 if not share_supervised else 0 < num_reached < 200


def test_the_lower_bound_counts_a_common_prefix_once_per_row():
    """100 + 3 * 60 tokens; 200 slots hold 100 of the 180 behind the prefix, so it is needed twice."""
    examples = gather_examples(as_examples([branch(100, 60, 100, family) for family in (1, 2, 3)]))
    assert [fewest_tokens(examples, capacity) for capacity in (None, 280, 279, 190, 189, 160)] == [
        280,
        280,
        380,
        380,
        480,
        480,
    ]


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


def test_a_rebuilt_forest_equals_the_one_built_of_its_members_alone():
    rng = random.Random(13)
    for _ in range(150):
        examples = random_examples(rng, "all")
        gathered = gather_examples(as_examples(examples))
        forest = build_forest(gathered, 4)
        kept = sorted(rng.sample(range(len(examples)), rng.randint(1, len(examples))))
        rebuilt = rebuild_forest(forest, np.array(kept), gathered, 4)
        members = sorted(forest.order[kept].tolist())
        alone = build_forest(gather_examples(as_examples([examples[index] for index in members])), 4)
        expected = sorted(
            (tuple(members[at] for at in owners), start, end, tuple(members[at] for at in above))
            for owners, start, end, above in as_walked(alone)
        )
        assert as_walked(rebuilt) == expected
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
        held = [(start, end) for owners, start, end, _ in as_walked(forest) if members & set(owners)]
        assert restricted.num_tokens == sum(end - start for start, end in held)
        assert_preorder(restricted)
        for segment, parent in enumerate(restricted.parent.tolist()):
            same = parent >= 0 and restricted.first[segment] == restricted.first[parent]
            assert not (same and restricted.stop[segment] == restricted.stop[parent])
        num_joined += len(held) - restricted.parent.size
    assert num_joined > 0
