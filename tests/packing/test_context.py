"""Rows dealt to the ranks that share them: every slot once, equal counts, pairs counted as a plain loop counts them."""

import numpy as np
import pytest

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import DataError
from hf_megapack.packing import Alignment, num_visible_pairs, split_row


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


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_do_nearly_equal_work_where_a_row_has_many_blocks(num_ranks):
    """Equal runs of a single long example would load the last rank with 2 - 1/n times the mean."""
    causal = np.full(128 * 64, 128 * 64)
    assert split_row(causal, num_ranks).imbalance < 1.01
    for seed in range(3):
        assert split_row(tree_row(16_000, 128 * num_ranks, seed), num_ranks).imbalance < 1.03


def test_a_row_that_does_not_divide_is_refused_with_its_size():
    with pytest.raises(DataError, match="A row of 384 slots cannot be shared by 2"):
        split_row(np.full(384, 384), 2)
