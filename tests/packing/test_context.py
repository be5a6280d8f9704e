"""Rows dealt or cut for the ranks that share them: every slot once, equal counts, pairs as a plain loop counts them."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import DataError
from hf_megapack.packing import (
    Alignment,
    moves_to_even,
    num_visible_pairs,
    sequence_boundaries,
    split_row,
    split_sequences,
)
from hf_megapack.packing.context import _best_exchange


def tree_row(num_slots: int, multiple: int, seed: int) -> np.ndarray:
    """Return the subtree ends of a row of conversations with shared prefixes."""
    generator = np.random.default_rng(seed)
    prefix = generator.integers(0, 99, num_slots // 3)
    examples = []
    while sum(example["input_ids"].size for example in examples) < num_slots:
        shared = prefix[: int(generator.integers(64, prefix.size))]
        ids = np.concatenate([shared, generator.integers(0, 99, int(generator.integers(20, num_slots // 4)))])
        examples.append({"input_ids": ids, "loss_mask": np.arange(ids.size) >= shared.size})
    collator = PrefixTreeCollator(packed_sequence_length=10**6, alignment=Alignment(packed_multiple=multiple))
    (row,) = collator(examples).rows
    return row.subtree_end


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_slot_belongs_to_one_rank_and_pairs_are_what_a_loop_counts(num_ranks, seed):
    ends = tree_row(1500, 128 * num_ranks, seed)
    split = split_row(ends, num_ranks)
    assert split.slots.shape == (num_ranks, ends.size // num_ranks)
    assert np.array_equal(np.sort(split.slots.ravel()), np.arange(ends.size))
    assert (np.diff(split.slots, axis=1) > 0).all()
    blocks = split.slots.reshape(num_ranks, -1, 128)
    assert (blocks[:, :, 0] % 128 == 0).all()
    assert (np.diff(blocks, axis=2) == 1).all()
    for rank in range(num_ranks):
        seen = sum(int((ends[: slot + 1] > slot).sum()) for slot in split.slots[rank])
        assert seen == split.num_pairs[rank]
    assert split.num_pairs.sum() == num_visible_pairs(ends)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rank_sees_the_blocks_of_which_one_of_its_slots_sees_a_slot(num_ranks, seed):
    ends = tree_row(1500, 128 * num_ranks, seed)
    split = split_row(ends, num_ranks)
    for own, seen in zip(split.slots, split.seen, strict=True):
        is_seen = [bool(((own >= slot) & (own < end)).any()) for slot, end in enumerate(ends)]
        blocks = np.flatnonzero(np.reshape(is_seen, (-1, 128)).any(axis=1))
        assert seen.tolist() == (blocks[:, None] * 128 + np.arange(128)).ravel().tolist()
        assert np.isin(own, seen).all()


def test_branches_stay_together_so_that_ranks_see_little_of_each_other():
    """A prefix of two blocks under which six conversations of four blocks stand, or hang."""
    six = 128 * np.repeat(np.arange(2, 27, 4)[1:], 4 * 128)
    ends = np.concatenate([np.full(256, 26 * 128), six])
    split = split_row(ends, 2)
    assert split.imbalance < 1.02
    of_others = [np.setdiff1d(seen, own).size // 128 for own, seen in zip(split.slots, split.seen, strict=True)]
    assert sum(of_others) <= 8, "the prefix, and what two cuts leave"


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_do_nearly_equal_work_where_a_row_has_many_blocks(num_ranks):
    """Equal runs of a single long example would load the last rank with 2 - 1/n times the mean."""
    for num_slots in (2048, 4096, 16_384):
        assert split_row(np.full(num_slots, num_slots), num_ranks).imbalance < 1.005, "as docs/parallelism.md says"
    for seed in range(3):
        assert split_row(tree_row(16_000, 128 * num_ranks, seed), num_ranks).imbalance < 1.03


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 60), st.integers(0, 10**6))
def test_no_exchange_of_two_blocks_is_better_than_the_one_that_is_looked_up(num_ranks, size, most_work, seed):
    dealt = np.random.default_rng(seed).integers(1, most_work, (num_ranks, size), endpoint=True)
    loads = dealt.sum(axis=1)
    most = int(loads.argmax())

    def higher(give, other, take):
        moved = dealt[most, give] - dealt[other, take]
        return max(loads[most] - moved, loads[other] + moved)

    best = min(itertools.starmap(higher, itertools.product(range(size), range(num_ranks), range(size))))
    assert higher(*_best_exchange(dealt, most)) == best


def test_a_long_row_is_dealt_without_a_table_of_all_pairs_of_blocks():
    """A table for two ranks would have 1,024 x 2,048 entries of 8 bytes; it took a fifth of a second."""
    sizes = np.random.default_rng(0).integers(1000, 9000, 40)
    sizes[-1] += 2**18 - sizes.sum()
    ends = np.repeat(np.cumsum(sizes), sizes)
    tracemalloc.start()
    split = split_row(ends, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * ends.nbytes
    assert split.imbalance <= 1.0005, "blocks were exchanged: runs alone are at 1.0019"


def test_a_row_that_does_not_divide_is_refused_with_its_size():
    with pytest.raises(DataError, match="A row of 384 slots cannot be shared by 2"):
        split_row(np.full(384, 384), 2)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(deadline=None)
def test_moves_even_out_with_as_few_as_there_must_be(counts):
    counts = np.array(counts)
    moves = moves_to_even(counts)
    after = counts - moves.sum(axis=1) + moves.sum(axis=0)
    assert (moves >= 0).all()
    assert after.sum() == counts.sum()
    assert after.max() - after.min() <= 1
    assert not ((moves.sum(axis=1) > 0) & (moves.sum(axis=0) > 0)).any(), "nobody gives and gets"


def flat_row(multiple: int, seed: int) -> np.ndarray:
    """Return the subtree ends of a row of six examples side by side, each padded, and then the row."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 70, 6)
    examples = [{"input_ids": np.arange(1, 2 + n), "loss_mask": np.ones(n + 1)} for n in sizes]
    alignment = Alignment(sequence_multiple=multiple, packed_multiple=16 * multiple)
    collator = PrefixTreeCollator(packed_sequence_length=10**6, packing_strategy="ffd", alignment=alignment)
    (row,) = collator(examples).rows
    return row.subtree_end


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_sequence_is_cut_into_chunks_that_ranks_take_from_both_ends(num_ranks, seed):
    ends = flat_row(2 * num_ranks, seed)
    boundaries = sequence_boundaries(ends)
    assert boundaries.size - 1 in (6, 7), "six examples and, unless they fill the row, its padding"
    split = split_sequences(boundaries, num_ranks)
    expected = [[] for _ in range(num_ranks)]
    for start, stop in itertools.pairwise(boundaries):
        chunks = np.split(np.arange(start, stop), 2 * num_ranks)
        for rank in range(num_ranks):
            expected[rank] += [*chunks[rank], *chunks[2 * num_ranks - 1 - rank]]
    assert split.slots.tolist() == expected
    for rank in range(num_ranks):
        assert split.num_pairs[rank] == sum(int((ends[: slot + 1] > slot).sum()) for slot in split.slots[rank])
        own = split.slots[rank]
        is_seen = [bool(((own >= slot) & (own < end)).any()) for slot, end in enumerate(ends)]
        assert split.seen[rank].tolist() == np.flatnonzero(is_seen).tolist()
    assert split.num_pairs.sum() == num_visible_pairs(ends)
    assert split.imbalance == 1.0


def test_boundaries_are_the_starts_of_sequences_and_a_row_of_trees_has_none():
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 9, rng.integers(1, 6))
        ends = np.repeat(np.cumsum(sizes), sizes)
        assert sequence_boundaries(ends).tolist() == [0, *np.cumsum(sizes)]
    assert sequence_boundaries(np.array([3, 3, 3])).dtype == np.int32
    # Prefix of 3 slots with children of 2 and 1; then two examples, the second a tree whose child is its last.
    for ends in ([6, 6, 6, 5, 5, 6], [2, 2, 7, 7, 6, 6, 7]):
        with pytest.raises(DataError, match=r"share prefixes.*packing_strategy 'ffd'"):
            sequence_boundaries(np.array(ends))
    # A prefix that one example alone continues is one sequence, whatever its segments.
    assert sequence_boundaries(np.array([5, 5, 5, 5, 5])).tolist() == [0, 5]


def test_a_sequence_that_cannot_be_cut_is_refused_with_its_size():
    with pytest.raises(DataError, match=r"A sequence of 6 slots cannot be cut into 4 .*sequence_multiple .* 4"):
        split_sequences(np.array([0, 8, 14]), 2)
