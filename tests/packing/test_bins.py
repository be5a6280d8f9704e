"""Bins: nothing lost, nothing above capacity, and no more tokens than the geometry that was admitted."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.errors import ConfigError, DataError
from hf_megapack.packing import (
    NO_ALIGNMENT,
    Alignment,
    adjust_bin_count,
    build_forest,
    gather_examples,
    pack_sequences,
    plan_update,
)
from hf_megapack.packing.bins import place_examples
from hf_megapack.packing.tree import rebuild_forest, restrict_forest
from tests.helpers.brute_force_tree import (
    as_examples,
    branch,
    fill_by_remainder,
    fixture_examples,
    random_examples,
    walk_size,
)


def plan(examples, capacity, min_shared_tokens=64, alignment=NO_ALIGNMENT, strategy="prefix_tree"):
    return plan_update(
        gather_examples(as_examples(examples)),
        strategy=strategy,
        packed_sequence_length=capacity,
        min_shared_tokens=min_shared_tokens,
        alignment=alignment,
    ).rows


# 150 tokens in common for A and B, 100 of them with C, 64 with D.
A, B = branch(150, 20, 150, 1), branch(150, 20, 150, 2)
C, D = branch(100, 60, 100, 3), branch(64, 222, 64, 4)


@pytest.mark.parametrize(
    ("assistant_mask", "capacity", "rows"),
    [
        ("all", 384, [331, 205, 193]),
        ("all", 601, [397, 205]),
        ("all", 1024, [602]),
        ("last", 384, [330, 205, 193]),
        ("last", 599, [395, 205]),
        ("last", 1024, [600]),
    ],
)
def test_fixture_rows(assistant_mask, capacity, rows):
    """All but 205 share 127 tokens ("all": the first target is token 128) or 128: 651 - 2 * 127 = 397, or 395."""
    assert [row.num_tokens for row in plan(fixture_examples(assistant_mask), capacity)] == rows


def test_admitted_geometry_is_kept_where_rebuilding_would_be_longer():
    """Alone, A, B and C share [0, 100) and the run of A and B drops to 50: 300. As admitted, they take 286."""
    examples = [A, B, C, D]
    assert walk_size([A, B, C], 64) == 300
    rows = plan(examples, 286)
    assert sorted(row.num_tokens for row in rows) == [286, 286]
    members = sorted(tuple(sorted(row.order.tolist())) for row in rows)
    assert members == [(0, 1, 2), (3,)]
    row = next(row for row in rows if row.order.size == 3)
    owned = Counter()
    for start, end, first, stop in zip(row.start, row.end, row.first, row.stop, strict=True):
        for owner in row.order[first:stop].tolist():
            owned[owner] += int(end - start)
    assert owned == {0: 170, 1: 170, 2: 160}


def test_a_bin_is_rebuilt_where_that_is_shorter():
    """B and C alone share 100 tokens: 170 + 60 = 230; restricted to [0, 64) they would take 266."""
    gathered = gather_examples(as_examples([A, B, C, D]))
    forest = build_forest(gathered, 64)
    by_falling_length = sorted(range(4), key=lambda at: -gathered.lengths[forest.order[at]])
    placement = place_examples(forest, gathered.lengths[forest.order].tolist(), by_falling_length, 400)
    assert [sorted(forest.order[bin_].tolist()) for bin_ in placement.bins] == [[0, 3], [1, 2]]
    assert placement.tokens == [392, 266]
    second = np.sort(placement.bins[1])
    assert restrict_forest(forest, second).num_tokens == 266
    assert rebuild_forest(forest, second, gathered.lengths, 64).num_tokens == 230
    # Depth-first placing does better than either: A, B, C together (286) and D alone (286).
    assert sum(row.num_tokens for row in plan([A, B, C, D], 400)) == 572


def test_an_overlong_example_is_refused_by_name():
    with pytest.raises(DataError, match=r"example 0 has 100 tokens, a row holds 64; raise packed_sequence_length"):
        plan([(list(range(100)), [0] * 100)], 64)


@pytest.mark.parametrize("assistant_mask", ["all", "last"])
def test_fewer_tokens_than_placing_by_remainder(assistant_mask):
    rng = random.Random(21)
    ours = theirs = 0
    for _ in range(150):
        examples = random_examples(rng, assistant_mask)
        longest = max(len(ids) for ids, _ in examples)
        for capacity in (longest, longest + 7, 2 * longest):
            rows = plan(examples, capacity, 4)
            for row in rows:
                assert row.num_tokens <= min(capacity, walk_size([examples[index] for index in row.order], 4))
            assert sorted(itertools.chain(*(row.order.tolist() for row in rows))) == list(range(len(examples)))
            ours += sum(row.num_tokens for row in rows)
            theirs += sum(total for _, total in fill_by_remainder(examples, 4, capacity))
    assert ours < theirs


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=10), st.integers(0, 10)), min_size=1, max_size=8
    ),
    st.integers(-1, 1),
    st.sampled_from((1, 2, 4, 32)),
)
def test_capacity_holds_exactly_at_and_around_each_admitted_row(drafts, step, multiple):
    """Rows that were admitted once are admitted again at their own size, and nothing ever exceeds the capacity."""
    examples = [(ids, [int(at >= first) for at in range(len(ids))]) for ids, first in drafts]
    alignment = Alignment(packed_multiple=multiple)
    longest = max(len(ids) for ids, _ in examples)
    for row in plan(examples, 2 * longest, 2, alignment):
        capacity = max(longest, row.num_tokens + step)
        rows = plan(examples, capacity, 2, alignment)
        assert sorted(itertools.chain(*(row.order.tolist() for row in rows))) == list(range(len(examples)))
        for again in rows:
            within = alignment.footprint(again.num_tokens) <= alignment.capacity(capacity)
            # Overflow from alignment alone becomes a row of its own.
            assert within or (again.order.size == 1 and again.num_tokens <= capacity)


@pytest.mark.parametrize(
    ("sizes", "capacity", "alignment", "bins"),
    [
        ([60, 55, 45, 40, 30, 25, 20, 10, 5], 100, Alignment(), [[0, 3], [1, 2], [4, 5, 6, 7, 8]]),
        ([14, 91, 25, 37, 33, 22, 34, 99, 30], 100, Alignment(), [[7], [1], [3, 6, 2], [4, 8, 5, 0]]),
        ([17, 7], 31, Alignment(packed_multiple=8), [[0, 1]]),
        ([17, 8], 31, Alignment(packed_multiple=8), [[0], [1]]),
        ([9, 7], 16, Alignment(sequence_multiple=8), [[0], [1]]),
        ([9, 7], 16, Alignment(packed_multiple=16), [[0, 1]]),
        ([9], 15, Alignment(packed_multiple=16), [[0]]),
        ([9], 15, Alignment(sequence_multiple=8), [[0]]),
    ],
)
def test_mffd_values(sizes, capacity, alignment, bins):
    assert pack_sequences(sizes, strategy="MFFD", capacity=capacity, alignment=alignment) == bins


def test_ffd_takes_equal_sizes_by_falling_index():
    """8 and 8 (index 2 before 1), then 5 beside neither, then 2 beside the first 8."""
    assert pack_sequences([5, 8, 8, 2], strategy="ffd", capacity=10) == [[2, 3], [1], [0]]


def test_balanced_tries_only_the_least_loaded_bin():
    """9 | 9, 6: 15 > 14, so 6 opens a bin; 5 joins 6 (11); 3 goes to the least loaded, a 9; 3 to the other 9."""
    assert pack_sequences([9, 9, 6, 5, 3, 3], strategy="balanced", capacity=14) == [[0, 4], [1, 5], [2, 3]]


@pytest.mark.parametrize("alignment", [Alignment(packed_multiple=16), Alignment(sequence_multiple=8)])
def test_a_sequence_that_only_alignment_makes_too_long(alignment):
    with pytest.raises(DataError, match="example 0 takes"):
        pack_sequences([9], strategy="ffd", capacity=15, alignment=alignment)
    for strategy in ("mffd", "balanced"):
        assert pack_sequences([9], strategy=strategy, capacity=15, alignment=alignment) == [[0]]


@given(
    st.lists(st.integers(1, 60), max_size=20),
    st.sampled_from(("ffd", "mffd", "balanced")),
    st.sampled_from((1, 4, 8)),
    st.sampled_from((1, 2, 3)),
    st.integers(60, 100),
)
def test_flat_strategies_place_each_once_within_capacity(sizes, strategy, multiple, factor, capacity):
    alignment = Alignment(sequence_multiple=multiple, packed_multiple=multiple * factor)
    largest = max((alignment.align_sequence(size) for size in sizes), default=0)
    if strategy == "ffd" and largest > alignment.fill_limit(capacity):
        with pytest.raises(DataError, match="after alignment"):
            pack_sequences(sizes, strategy=strategy, capacity=capacity, alignment=alignment)
        return
    bins = pack_sequences(sizes, strategy=strategy, capacity=capacity, alignment=alignment)
    assert bins == pack_sequences(sizes, strategy=strategy, capacity=capacity, alignment=alignment)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    for bin_ in bins:
        assert len(bin_) == 1 or alignment.layout([sizes[index] for index in bin_])[-1] <= capacity


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"strategy": "best"}, ConfigError, "packing_strategy is 'best'"),
        ({"capacity": 0}, ConfigError, "capacity is 0"),
        ({"lengths": [3, 0]}, DataError, "example 1 has 0 tokens"),
    ],
)
def test_pack_sequences_refuses(arguments, error, says):
    arguments = {"lengths": [3], "strategy": "mffd", "capacity": 10, **arguments}
    with pytest.raises(error, match=says):
        pack_sequences(arguments.pop("lengths"), **arguments)


def test_bin_count_grows_from_the_bin_with_most_sequences():
    """[0..4] gives up 4, 3, 2, 1 in turn before the other bin is asked."""
    bins = [[0, 1, 2, 3, 4], [5, 6]]
    assert adjust_bin_count(bins, bin_count_multiple=4) == [[0, 1, 2], [5, 6], [4], [3]]
    assert adjust_bin_count(bins, min_bin_count=7) == [[0], [5], [4], [3], [2], [1], [6]]
    assert adjust_bin_count(bins) == bins
    # Equal numbers of sequences: the later bin gives.
    assert adjust_bin_count([[0, 1], [2, 3]], min_bin_count=3) == [[0, 1], [2], [3]]
    assert bins == [[0, 1, 2, 3, 4], [5, 6]]


def test_bin_count_beyond_the_sequences():
    with pytest.raises(DataError, match="2 examples cannot fill 4 bins"):
        adjust_bin_count([[0, 1]], bin_count_multiple=4)
    assert adjust_bin_count([[0, 1]], bin_count_multiple=4, allow_empty_bins=True) == [[0], [1], [], []]
    for arguments in ({"min_bin_count": -1}, {"bin_count_multiple": 0}):
        with pytest.raises(ConfigError, match="min_bin_count is"):
            adjust_bin_count([[0]], **arguments)
