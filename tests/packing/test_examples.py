"""Tokenized examples: what may be shared of them and what is refused."""

import numpy as np
import pytest

from hf_megapack.errors import DataError
from hf_megapack.packing import gather_examples
from tests.helpers.brute_force_tree import shareable_length


def example(ids, mask, **columns):
    return {"input_ids": ids, "loss_mask": mask, **columns}


@pytest.mark.parametrize(
    ("learned", "shareable"), [([], 100), ([0], 100), ([1], 0), ([2], 1), ([57], 56), ([57, 90], 56), ([0, 3], 2)]
)
def test_shareable_length(learned, shareable):
    """A token at p is predicted at p - 1, which therefore stays private; nothing predicts the first token."""
    mask = np.zeros(100, int)
    mask[learned] = 1
    assert gather_examples([example(np.arange(100), mask)]).shareable.tolist() == [shareable]
    assert shareable_length(mask.tolist()) == shareable


def test_learned_positions_stay_inside_their_example():
    """The first token of the second example is masked as learned; it must not become the first example's label."""
    gathered = gather_examples([example([1, 2], [1, 1]), example([3, 4, 5], [1, 0, 1])])
    assert gathered.is_learned.tolist() == [True, False, False, True, False]
    assert gathered.shareable.tolist() == [0, 1]
    assert gathered.offsets.tolist() == [0, 2, 5]


def test_right_padding_is_cut_off():
    gathered = gather_examples([example([5, 6, 0, 0], [0, 1, 1, 0], attention_mask=[1, 1, 0, 0])])
    assert gathered.tokens.tolist() == [5, 6]
    assert gathered.is_learned.tolist() == [True, False]


def test_lists_and_every_integer_type_read_the_same():
    expected = gather_examples([example([5, 6, 7], [0, 1, 0])])
    for dtype in (np.int8, np.uint16, np.int32, np.int64, np.uint64):
        got = gather_examples([example(np.array([5, 6, 7], dtype), np.array([0, 1, 0], dtype))])
        assert got.tokens.dtype == np.int32
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.is_learned.tolist() == expected.is_learned.tolist()
    assert gather_examples([example([5, 6, 7], [False, True, False])]).is_learned.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (example([], []), "example 1: input_ids has shape"),
        (example([[1, 2]], [[0, 1]]), "example 1: input_ids has shape"),
        (example([1.0, 2.0], [0, 1]), "float64"),
        (example([1, 2, 3], [0, 1]), r"example 1: loss_mask has shape \(2,\)"),
        (example([1, 2], [0, 2]), "example 1: loss_mask is 2 at 1"),
        (example([1, 2], [0, 0.5]), "example 1: loss_mask is 0.5 at 1"),
        (example([1, -100], [0, 1]), "example 1: token -100 at 1"),
        (example([2**31, 1], [0, 1]), "example 1: token 2147483648 at 0"),
        (example([2**32 + 5, 1], [0, 1]), "example 1: token 4294967301 at 0"),
        (example([0, 0, 5, 6], [0, 0, 0, 1], attention_mask=[0, 0, 1, 1]), "example 1: attention_mask must be ones"),
        (example([5, 0, 6], [0, 0, 1], attention_mask=[1, 0, 1]), "example 1: attention_mask must be ones"),
        (example([5, 6], [0, 1], attention_mask=[0, 0]), "example 1: attention_mask must be ones"),
        (example([5, 6], [0, 1], attention_mask=[1]), "example 1: attention_mask has shape"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, "example 1 has no loss_mask; its columns are"),
    ],
)
def test_malformed_examples_are_refused_by_name(bad, says):
    with pytest.raises(DataError, match=says):
        gather_examples([example([1, 2], [0, 1]), bad])


def test_an_update_needs_examples():
    with pytest.raises(DataError, match="no examples"):
        gather_examples([])
