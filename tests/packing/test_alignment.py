"""Alignment: what a row of given sequences really takes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.errors import ConfigError, DataError
from hf_megapack.packing import Alignment

# (TP, CP): (per sequence, per row without FP8, per row blockwise, per row mxfp8)
THD_TABLE = {
    (1, 1): (1, 1, 16, 32),
    (4, 1): (1, 4, 512, 128),
    (1, 2): (4, 4, 32, 64),
    (2, 1): (1, 2, 256, 64),
    (2, 2): (8, 8, 512, 128),
    (4, 2): (16, 16, 1024, 256),
}


@pytest.mark.parametrize("layout", THD_TABLE)
def test_for_layout_follows_the_table(layout):
    tp, cp = layout
    got = [
        Alignment.for_layout(tensor_parallel_size=tp, context_parallel_size=cp, fp8=fp8, attention="thd")
        for fp8 in (None, "blockwise", "mxfp8")
    ]
    per_sequence, *per_row = THD_TABLE[layout]
    assert {alignment.sequence_multiple for alignment in got} == {per_sequence}
    assert [alignment.packed_multiple for alignment in got] == per_row


def test_for_layout_handles_odd_sizes():
    """lcm(3, 128 * 3) = 384; lcm(2 * 3 * 2, 32 * 3 * 2) = 192."""
    assert Alignment.for_layout(tensor_parallel_size=3, fp8="blockwise", attention="thd").packed_multiple == 384
    odd = Alignment.for_layout(tensor_parallel_size=3, context_parallel_size=2, fp8=" MXFP8 ", attention="thd")
    assert odd.packed_multiple == 192


def test_for_layout_gives_the_coarsest_rule_to_recipes_without_their_own():
    for fp8 in ("tensorwise", "delayed"):
        assert Alignment.for_layout(tensor_parallel_size=4, fp8=fp8).packed_multiple == 512


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tree_rows_align_once_and_in_whole_blocks(tp, cp):
    alignment = Alignment.for_layout(tensor_parallel_size=tp, context_parallel_size=cp)
    assert alignment.sequence_multiple == 1
    assert alignment.packed_multiple == (tp if cp == 1 else math.lcm(128 * cp, tp * cp))


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 0},
        {"context_parallel_size": 0},
        {"fp8": "auto"},
        {"fp8": ""},
        {"attention": "auto"},
    ],
)
def test_for_layout_refuses_what_is_not_settled(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Alignment.for_layout(**arguments)


@pytest.mark.parametrize("name", ["sequence_multiple", "packed_multiple"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_multiples_must_be_whole_and_positive(name, value):
    with pytest.raises(ConfigError, match=name):
        Alignment(**{name: value})


def test_layout_examples():
    """Worked by hand: only the last sequence takes the row's tail."""
    thd = Alignment.for_layout(tensor_parallel_size=2, context_parallel_size=2, attention="thd")
    assert thd.layout([5, 3]).tolist() == [0, 8, 16]
    assert Alignment(packed_multiple=4).layout([5, 4]).tolist() == [0, 5, 12]
    assert Alignment(packed_multiple=512).layout([100, 200]).tolist() == [0, 100, 512]
    assert Alignment(packed_multiple=512).layout([]).tolist() == [0]
    # Twenty sequences of five tokens pay for the FP8 tile once.
    assert Alignment(packed_multiple=512).layout([5] * 20)[-1] == 512
    assert Alignment(sequence_multiple=16, packed_multiple=1024).layout([5] * 20)[-1] == 1024


def test_layout_refuses_empty_sequences():
    with pytest.raises(DataError, match="sequence 1 has 0 tokens"):
        Alignment().layout([3, 0])


def test_capacity_is_at_least_one_tile():
    alignment = Alignment.for_layout(tensor_parallel_size=4, fp8="blockwise")
    assert (alignment.capacity(256), alignment.capacity(600)) == (512, 600)
    assert (alignment.fill_limit(512), alignment.fill_limit(600), alignment.fill_limit(15)) == (512, 512, 0)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((None, "blockwise", "mxfp8")),
)
def test_layout_aligns_each_prefix_and_the_whole(lengths, tp, cp, fp8):
    alignment = Alignment.for_layout(tensor_parallel_size=tp, context_parallel_size=cp, fp8=fp8, attention="thd")
    boundaries = alignment.layout(lengths).tolist()
    assert all(boundary % alignment.sequence_multiple == 0 for boundary in boundaries)
    assert boundaries[-1] % alignment.packed_multiple == 0
    sizes = [end - start for start, end in itertools.pairwise(boundaries)]
    aligned = [alignment.align_sequence(length) for length in lengths]
    assert sizes[:-1] == aligned[:-1]
    assert 0 <= sizes[-1] - aligned[-1] < alignment.packed_multiple
    assert boundaries[-1] == alignment.footprint(sum(aligned))
    capacity = boundaries[-1]
    assert sum(aligned) <= alignment.fill_limit(capacity)
    assert sum(aligned) > alignment.fill_limit(capacity - 1)
