"""The collator: one update in, the same update packed out."""

import pickle
import random
from collections import Counter

import numpy as np
import pytest

from hf_megapack.batch import to_buffer
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import ConfigError, DataError
from hf_megapack.packing import PACKING_STRATEGIES, Alignment
from tests.helpers.brute_force_tree import as_examples, fixture_examples, learned_pairs, random_examples, row_pairs


@pytest.mark.parametrize("strategy", PACKING_STRATEGIES)
def test_every_strategy_teaches_the_same(strategy):
    rng = random.Random(51)
    collator = PrefixTreeCollator(packed_sequence_length=64, packing_strategy=strategy, min_shared_tokens=4)
    num_pairs = 0
    for _ in range(30):
        examples = [*random_examples(rng, "all"), ([1, 2], [0, 1])]
        batch = collator(as_examples(examples))
        expected = learned_pairs(examples)
        assert sum((row_pairs(row) for row in batch.rows), Counter()) == expected
        assert batch.num_loss_tokens == expected.total()
        assert batch.num_examples == len(examples)
        assert batch.num_logical_tokens == sum(len(ids) for ids, _ in examples)
        num_pairs += expected.total()
    assert num_pairs > 1000


@pytest.mark.parametrize(("capacity", "loss_tokens"), [(384, [138, 45, 33]), (1024, [216])])
def test_loss_tokens_of_the_fixture(capacity, loss_tokens):
    """16 + end - 176 each: 33, 57, 81 and 45."""
    batch = PrefixTreeCollator(packed_sequence_length=capacity)(as_examples(fixture_examples("all")))
    assert [int(row.loss_weights.sum()) for row in batch.rows] == loss_tokens
    assert batch.num_loss_tokens == 216


def test_duplicates_keep_their_multiplicity():
    """Eight times 100 + 20 tokens: 267 slots, of which 8 x 20 are loss-bearing."""
    example = (list(range(120)), [0] * 100 + [1] * 20)
    (row,) = PrefixTreeCollator(packed_sequence_length=1000)(as_examples([example] * 8)).rows
    assert (row.input_ids.size, int(row.loss_weights.sum())) == (267, 160)
    batch = PrefixTreeCollator(packed_sequence_length=1000, share_supervised=True)(as_examples([example] * 8))
    assert batch.rows[0].input_ids.size == 120
    assert sorted(set(batch.rows[0].loss_weights.tolist())) == [0, 8]
    assert batch.num_loss_tokens == 160


def test_the_same_examples_give_the_same_bytes():
    examples = as_examples(random_examples(random.Random(52), "all") * 3)
    collator = PrefixTreeCollator(packed_sequence_length=100, min_shared_tokens=2, data_parallel_size=2)
    buffers = []
    for packer in (collator, pickle.loads(pickle.dumps(collator))):
        batch = packer(examples)
        object.__setattr__(batch, "packing_seconds", 0.0)
        buffers.append(to_buffer(batch).tobytes())
    assert buffers[0] == buffers[1]


@pytest.mark.parametrize("strategy", PACKING_STRATEGIES)
def test_ranks_get_rows_of_their_own_where_examples_allow_it(strategy):
    examples = as_examples([(list(range(first, first + 50)), [0] + [1] * 49) for first in range(0, 400, 50)])
    collator = PrefixTreeCollator(packed_sequence_length=1000, packing_strategy=strategy, data_parallel_size=4)
    batch = collator(examples)
    assert not batch.schedule.is_dummy.any()
    assert batch.schedule.row_index.shape == (4, 1)
    single = collator(examples[:1])
    assert single.schedule.is_dummy.sum() == 3


def test_an_interleaved_pipeline_gets_whole_groups():
    collator = PrefixTreeCollator(
        packed_sequence_length=384, pipeline_parallel_size=2, virtual_pipeline_parallel_size=2
    )
    batch = collator(as_examples(fixture_examples("all")[:1]))
    assert batch.schedule.row_index.tolist() == [[0, 0]]
    assert batch.schedule.is_dummy.tolist() == [[False, True]]
    # 331, 205, 193 and a dummy of 193 would execute 922; four rows execute 856 and need no dummy.
    batch = collator(as_examples(fixture_examples("all")))
    assert not batch.schedule.is_dummy.any()
    assert sum(row.input_ids.size for row in batch.rows) == 856


def test_ranks_share_the_work_rather_than_the_prefix():
    """One row of 1,000 + 8 x 500 would leave a rank idle: two of 1,000 + 4 x 500 finish in 3,000 instead of 5,000."""
    prefix = list(range(1000))
    examples = [(prefix + [10_000 * own + at for at in range(500)], [0] * 1001 + [1] * 499) for own in range(1, 9)]
    batch = PrefixTreeCollator(packed_sequence_length=8192, data_parallel_size=2)(as_examples(examples))
    assert [row.input_ids.size for row in batch.rows] == [3000, 3000]
    single = PrefixTreeCollator(packed_sequence_length=8192)(as_examples(examples))
    assert [row.input_ids.size for row in single.rows] == [5000]


def test_the_row_capacity_is_at_least_one_tile():
    """TP4 with blockwise FP8 needs 512 slots, so a capacity of 256 means 512, and 300 tokens fit."""
    alignment = Alignment.for_layout(tensor_parallel_size=4, fp8="blockwise")
    collator = PrefixTreeCollator(packed_sequence_length=256, alignment=alignment)
    (row,) = collator(as_examples([(list(range(300)), [0] + [1] * 299)])).rows
    assert row.input_ids.size == 512
    with pytest.raises(DataError, match="513 tokens, a row holds 512"):
        collator(as_examples([(list(range(513)), [0] + [1] * 512)]))


@pytest.mark.parametrize("strategy", PACKING_STRATEGIES)
def test_an_overlong_example_is_refused(strategy):
    collator = PrefixTreeCollator(packed_sequence_length=64, packing_strategy=strategy)
    with pytest.raises(DataError, match=r"example 1 has 100 tokens, a row holds 64; raise packed_sequence_length"):
        collator(as_examples([([1, 2], [0, 1]), (list(range(100)), [0, 1] * 50)]))


def test_an_update_that_would_learn_nothing_is_refused():
    """The only masked token is the first, which nothing predicts."""
    with pytest.raises(DataError, match="no token of this update's 2 examples is loss-bearing"):
        PrefixTreeCollator(packed_sequence_length=64)(as_examples([([1, 2, 3], [1, 0, 0])] * 2))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"packed_sequence_length": 0}, "packed_sequence_length is 0"),
        ({"min_shared_tokens": 0}, "min_shared_tokens is 0"),
        ({"virtual_pipeline_parallel_size": 0}, "virtual_pipeline_parallel_size is 0"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"packing_strategy": "bfd"}, "packing_strategy is 'bfd'"),
        ({"packing_strategy": "ffd", "share_supervised": True}, 'packing_strategy "ffd" does not'),
        ({"alignment": Alignment(sequence_multiple=4)}, "sequence_multiple is 4"),
    ],
)
def test_settings_that_cannot_pack_are_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        PrefixTreeCollator(**{"packed_sequence_length": 64, **arguments})


def test_rows_are_int32_whatever_the_dataset_gives():
    example = {"input_ids": np.arange(9, dtype=np.int64), "loss_mask": np.ones(9, dtype=np.uint8)}
    (row,) = PrefixTreeCollator(packed_sequence_length=64)([example]).rows
    assert row.input_ids.dtype == row.labels.dtype == np.int32
    assert row.labels.tolist() == [*range(1, 9), -100]
