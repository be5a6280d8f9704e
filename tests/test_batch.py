"""A packed batch survives the wire bit for bit, and nothing damaged is read."""

import dataclasses

import numpy as np
import pytest

from hf_megapack.batch import PackedRow, SegmentTable, from_buffer, to_buffer
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import BackendError
from hf_megapack.packing import Alignment
from tests.helpers.brute_force_tree import as_examples, fixture_examples


@pytest.fixture
def batch():
    collator = PrefixTreeCollator(
        packed_sequence_length=384, data_parallel_size=5, alignment=Alignment(packed_multiple=8)
    )
    return collator(as_examples(fixture_examples("all")))


def assert_same(got, expected):
    """Compare every field of two frozen types, arrays by value and type."""
    for field in dataclasses.fields(expected):
        mine, theirs = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(theirs, np.ndarray):
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
        elif dataclasses.is_dataclass(theirs):
            assert_same(mine, theirs)
        elif isinstance(theirs, tuple):
            for one, other in zip(mine, theirs, strict=True):
                assert_same(one, other)
        else:
            assert mine == theirs
            assert type(mine) is type(theirs)


def test_a_batch_comes_back_as_it_was(batch):
    buffer = to_buffer(batch)
    assert buffer.dtype == np.uint8
    assert buffer.ndim == 1
    assert buffer.flags.writeable
    got = from_buffer(buffer.copy())
    assert_same(got, batch)
    assert isinstance(got.rows[0], PackedRow)
    assert isinstance(got.rows[0].segments, SegmentTable)
    assert len(got.rows) == 4
    assert got.schedule.is_dummy.sum() == 1
    assert to_buffer(got).tobytes() == buffer.tobytes()


def test_every_changed_byte_is_noticed(batch):
    buffer = to_buffer(batch)
    for at in [*range(24), *range(24, buffer.size, 997), buffer.size - 1]:
        damaged = buffer.copy()
        damaged[at] ^= 1
        with pytest.raises(BackendError):
            from_buffer(damaged)


@pytest.mark.parametrize("size", [0, 5, 24, 100, -1])
def test_a_cut_buffer_is_refused(batch, size):
    with pytest.raises(BackendError, match=r"damaged|at least 24 bytes"):
        from_buffer(to_buffer(batch)[:size].copy())


def test_other_versions_and_other_data_are_named(batch):
    other = to_buffer(batch)
    other[8] += 1
    with pytest.raises(BackendError, match="format version 2, this process reads 1"):
        from_buffer(other)
    with pytest.raises(BackendError, match="no packed batch"):
        from_buffer(np.zeros(100, np.uint8))
