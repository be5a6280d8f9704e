"""Bins: whole sequences side by side, and examples where they add least."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.errors import ConfigError, DataError
from hf_megapack.packing import Alignment, adjust_bin_count, build_forest, gather_examples, pack_sequences
from hf_megapack.packing.bins import place_examples
from tests.helpers.brute_force_tree import as_examples, random_examples


def test_each_example_is_placed_where_it_adds_least():
    """Replayed with sets of segments: no bin with room would have gained less, none as little with less room."""
    rng = random.Random(61)
    num_choices = 0
    for _ in range(100):
        examples = random_examples(rng, "all")
        lengths = [len(ids) for ids, _ in examples]
        forest = build_forest(gather_examples(as_examples(examples)), 4)
        sizes = (forest.end - forest.start).tolist()
        owners = [set(forest.order[first:stop].tolist()) for first, stop in zip(forest.first, forest.stop, strict=True)]
        paths = [{at for at, some in enumerate(owners) if index in some} for index in range(len(examples))]
        order = list(range(len(examples)))
        rng.shuffle(order)
        fill_limit = max(lengths) + rng.randint(0, 40)
        placement = place_examples(forest, [lengths[index] for index in forest.order], order, fill_limit)
        chosen = {position: bin_ for bin_, positions in enumerate(placement.bins) for position in positions}
        held: list[set[int]] = [set() for _ in placement.bins]
        num_open = 0
        for position in order:
            path = paths[forest.order[position]]
            options = []
            for bin_ in range(num_open):
                gain, filled = (sum(sizes[at] for at in some) for some in (path - held[bin_], path | held[bin_]))
                if filled <= fill_limit:
                    options.append((gain, -filled, bin_))
            expected = min(options)[-1] if options else num_open
            assert chosen[position] == expected
            num_open += not options
            num_choices += len(options) > 1
            held[expected] |= path
        assert placement.tokens == [sum(sizes[at] for at in bin_) for bin_ in held]
        pairs = [sum(sum(range(forest.start[at] + 1, forest.end[at] + 1)) for at in bin_) for bin_ in held]
        assert placement.pairs == pairs
    assert num_choices > 50


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
