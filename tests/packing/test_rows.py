"""Rows: what a slot holds, sees and learns."""

import random
from collections import Counter

import numpy as np
import pytest

from hf_megapack.batch import IGNORE_LABEL
from hf_megapack.packing import (
    NO_ALIGNMENT,
    PACKING_STRATEGIES,
    Alignment,
    gather_examples,
    lay_out_row,
    num_visible_pairs,
    plan_update,
)
from tests.helpers.brute_force_tree import (
    ancestor_mask,
    as_examples,
    fixture_examples,
    learned_pairs,
    random_examples,
    row_pairs,
)

PAD = 77


def pack(
    examples, capacity, min_shared_tokens=4, alignment=NO_ALIGNMENT, strategy="prefix_tree", share_supervised=False
):
    gathered = gather_examples(as_examples(examples), share_supervised=share_supervised)
    plan = plan_update(
        gathered,
        strategy=strategy,
        packed_sequence_length=capacity,
        min_shared_tokens=min_shared_tokens,
        alignment=alignment,
    )
    return [lay_out_row(gathered, forest, alignment, PAD) for forest in plan.rows]


def seen_by(row):
    slots = np.arange(row.subtree_end.size)
    return (slots[None, :] <= slots[:, None]) & (slots[:, None] < row.subtree_end[None, :])


def test_a_small_row_slot_by_slot():
    """1 2 3 | 4 learned after them, 5 6 learned after them: the run 1 2 is shared, 3 predicts and stays private."""
    examples = [([1, 2, 3, 4], [0, 0, 0, 1]), ([1, 2, 3, 5, 6], [0, 0, 0, 1, 1])]
    (row,) = pack(examples, 100, min_shared_tokens=2, alignment=Alignment(packed_multiple=5))
    assert row.input_ids.tolist() == [1, 2, 3, 5, 6, 3, 4, PAD, PAD, PAD]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2]
    assert row.labels.tolist() == [-100, -100, 5, 6, -100, 4, -100, -100, -100, -100]
    assert row.loss_weights.tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0]
    assert row.subtree_end.tolist() == [7, 7, 5, 5, 5, 7, 7, 10, 10, 10]
    assert row.num_padding_slots == 3
    assert seen_by(row).sum(axis=1).tolist() == [1, 2, 3, 4, 5, 3, 4, 1, 2, 3]
    table = row.segments
    assert (table.start.tolist(), table.end.tolist(), table.parent.tolist()) == ([0, 2, 5], [2, 5, 7], [-1, 0, 0])
    assert (table.example_offsets.tolist(), table.examples.tolist()) == ([0, 2, 3, 4], [0, 1, 1, 0])


@pytest.mark.parametrize("first_token", [1, 200])
def test_the_trunk_of_a_conversation_is_one_run_before_its_leaves(first_token):
    """Each turn is an example of its own: the path of the last one comes first, whatever sorts first."""
    turns = [[first_token + turn % 2, *range(300 + 10 * turn, 308 + 10 * turn)] for turn in range(6)]
    examples = []
    for turn in range(1, 7):
        ids = [token for tokens in turns[:turn] for token in tokens]
        examples.append((ids, [index >= len(ids) - 4 for index in range(len(ids))]))
    (row,) = pack(examples, 1000, min_shared_tokens=2)
    longest = len(examples[-1][0])
    assert row.input_ids[:longest].tolist() == examples[-1][0]
    assert row.position_ids[:longest].tolist() == list(range(longest))
    assert row.input_ids.size == longest + 5 * 5  # a leaf repeats the slot that predicts its first learned token


@pytest.mark.parametrize("share_supervised", [False, True])
@pytest.mark.parametrize("assistant_mask", ["all", "last"])
def test_packing_keeps_every_context_and_target(assistant_mask, share_supervised):
    """The multiset of (context, target) is the same before and after, for 100 random batches and three capacities."""
    rng = random.Random(31)
    num_pairs = num_shared = num_counted_twice = 0
    for _ in range(100):
        examples = random_examples(rng, assistant_mask)
        longest = max(len(ids) for ids, _ in examples)
        for capacity in (longest, 2 * longest, 1000):
            rows = pack(examples, capacity, share_supervised=share_supervised)
            taught = sum((row_pairs(row) for row in rows), Counter())
            assert taught == learned_pairs(examples)
            num_pairs += taught.total()
            num_counted_twice += sum(int((row.loss_weights > 1).sum()) for row in rows)
            num_shared += sum(len(ids) for ids, _ in examples) - sum(row.input_ids.size for row in rows)
            for row in rows:
                assert row.input_ids.size == (row.segments.end - row.segments.start).sum() <= capacity
    assert num_pairs > 10_000
    assert num_shared > 2_000
    assert (num_counted_twice > 500) == share_supervised


def test_supervised_slots_are_shared_and_counted():
    """Slot of 3 in 1 2 3: learned as 4 by two of three examples and as nothing by the one that ends there."""
    examples = [([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3], [0, 0, 1]), ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]
    (row,) = pack(examples, 100, min_shared_tokens=1, share_supervised=True)
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.labels.tolist() == [-100, 3, 4, 5, -100]
    assert row.loss_weights.tolist() == [0, 2, 2, 1, 0]
    assert row.subtree_end.tolist() == [5] * 5


def test_a_slot_that_would_need_two_labels_is_repeated():
    """After 1 2 one example learns 3 and one learns 4: the slot of 2 exists twice, the slot of 1 once."""
    examples = [([1, 2, 3], [0, 1, 1]), ([1, 2, 4], [0, 1, 1])]
    (row,) = pack(examples, 100, min_shared_tokens=1, share_supervised=True)
    assert row.input_ids.tolist() == [1, 2, 3, 2, 4]
    assert row.labels.tolist() == [2, 3, -100, 4, -100]
    assert row.loss_weights.tolist() == [2, 1, 0, 1, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 1, 2]


def test_a_slot_that_only_one_branch_learns_is_shared():
    """After 1 2 one example learns 3; the other goes on to 4 without learning it: one slot of 2, label 3."""
    examples = [([1, 2, 3], [0, 0, 1]), ([1, 2, 4], [0, 0, 0])]
    (row,) = pack(examples, 100, min_shared_tokens=1, share_supervised=True)
    assert row.input_ids.tolist() == [1, 2, 3, 4]
    assert row.labels.tolist() == [-100, 3, -100, -100]
    assert row.subtree_end.tolist() == [4, 4, 3, 4]


def test_turns_of_one_conversation_become_one_path():
    """One example per turn, each turn learned once, is the conversation itself with every turn learned."""
    ids = list(range(30))
    turns = [(5, 9), (14, 20), (26, 30)]
    examples = [(ids[:end], [int(start <= at < end) for at in range(end)]) for start, end in turns]
    (row,) = pack(examples, 100, share_supervised=True)
    assert row.input_ids.tolist() == ids
    assert np.flatnonzero(row.loss_weights).tolist() == [at - 1 for start, end in turns for at in range(start, end)]


@pytest.mark.parametrize("strategy", PACKING_STRATEGIES)
@pytest.mark.parametrize(
    "alignment", [Alignment(packed_multiple=16), Alignment(sequence_multiple=4, packed_multiple=8)]
)
def test_padding_teaches_nothing_and_is_seen_by_nothing_real(strategy, alignment):
    if strategy == "prefix_tree":
        alignment = Alignment(packed_multiple=alignment.packed_multiple)
    rng = random.Random(32)
    num_padding = 0
    for _ in range(30):
        examples = random_examples(rng, "all")
        rows = pack(examples, 128, alignment=alignment, strategy=strategy)
        assert sum((row_pairs(row) for row in rows), Counter()) == learned_pairs(examples)
        for row in rows:
            num_slots = row.input_ids.size
            assert num_slots % alignment.packed_multiple == 0
            assert num_slots <= 128
            owned = np.zeros(num_slots, dtype=bool)
            for start, end in zip(row.segments.start, row.segments.end, strict=True):
                owned[start:end] = True
            assert (row.input_ids[~owned] == PAD).all()
            assert (row.labels[~owned] == IGNORE_LABEL).all()
            assert not seen_by(row)[np.ix_(owned, ~owned)].any()
            tail = num_slots - row.num_padding_slots
            assert not owned[tail:].any()
            assert row.position_ids[tail:].tolist() == list(range(row.num_padding_slots))
            assert (row.subtree_end[tail:] == num_slots).all()
            assert (row.subtree_end[:tail] <= tail).all()
            num_padding += int((~owned).sum())
    assert num_padding > 0


def test_each_sequence_begins_at_its_multiple():
    """Lengths 5 and 3 with multiples 8 and 32: runs [0, 8), [8, 16), then 16 slots of tail."""
    examples = [([1] * 5, [0, 1, 1, 1, 1]), ([2] * 3, [0, 1, 1])]
    alignment = Alignment(sequence_multiple=8, packed_multiple=32)
    (row,) = pack(examples, 32, alignment=alignment, strategy="mffd")
    assert row.segments.start.tolist() == [0, 8]
    assert row.segments.end.tolist() == [5, 11]
    assert row.subtree_end.tolist() == [8] * 8 + [16] * 8 + [32] * 16
    assert row.position_ids.tolist() == [*range(8), *range(8), *range(16)]
    assert row.num_padding_slots == 16


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("fp8", [None, "blockwise", "mxfp8"])
def test_the_planned_footprint_is_the_shape(tp, cp, fp8):
    examples = random_examples(random.Random(33 + tp + cp), "all")
    for strategy, attention in (("prefix_tree", "tree"), ("mffd", "thd"), ("balanced", "thd")):
        alignment = Alignment.for_layout(
            tensor_parallel_size=tp, context_parallel_size=cp, fp8=fp8, attention=attention
        )
        gathered = gather_examples(as_examples(examples))
        plan = plan_update(
            gathered, strategy=strategy, packed_sequence_length=200, min_shared_tokens=4, alignment=alignment
        )
        for forest in plan.rows:
            row = lay_out_row(gathered, forest, alignment, PAD)
            flat = [alignment.align_sequence(int(size)) for size in forest.end - forest.start]
            planned = alignment.footprint(sum(flat) if attention == "thd" else forest.num_tokens)
            arrays = (row.input_ids, row.position_ids, row.labels, row.loss_weights, row.subtree_end)
            assert {array.shape for array in arrays} == {(planned,)}
            assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_the_mask_is_the_ancestor_mask():
    rng = random.Random(34)
    num_branches = 0
    for index in range(200):
        alignment = Alignment(packed_multiple=8) if index % 2 else NO_ALIGNMENT
        for row in pack(random_examples(rng, "all", max_tokens=24), 60, 2, alignment):
            mask = ancestor_mask(row.segments, row.input_ids.size)
            assert np.array_equal(seen_by(row), mask)
            assert num_visible_pairs(row.subtree_end) == mask.sum()
            num_branches += int((row.segments.parent >= 0).sum())
    assert num_branches > 200


def test_positions_count_what_a_slot_sees():
    rng = random.Random(35)
    for _ in range(50):
        for row in pack(random_examples(rng, "all"), 80):
            assert (row.position_ids == seen_by(row).sum(axis=1) - 1).all()


def test_no_label_crosses_a_segment():
    """A slot's label is the token of the next slot of its own segment, so a segment's last slot has none."""
    rng = random.Random(36)
    num_labels = 0
    for _ in range(50):
        for row in pack(random_examples(rng, "all"), 80):
            for start, end in zip(row.segments.start, row.segments.end, strict=True):
                labels, following = row.labels[start:end], row.input_ids[start + 1 : end]
                assert labels[-1] == IGNORE_LABEL
                learned = labels[:-1] != IGNORE_LABEL
                assert (labels[:-1][learned] == following[learned]).all()
                num_labels += int(learned.sum())
    assert num_labels > 1000


def test_a_segment_owned_by_several_examples_learns_nothing():
    for row in pack(fixture_examples("all"), 1024, 64):
        table = row.segments
        num_owners = np.diff(table.example_offsets)
        assert (num_owners > 1).sum() == 1
        for start, end in zip(table.start[num_owners > 1], table.end[num_owners > 1], strict=True):
            assert not row.loss_weights[start:end].any()


def test_pairs_of_a_known_tree():
    """A root of two, two children of one and a second root of two: 1 + 2 + 3 + 3 + 1 + 2."""
    assert num_visible_pairs(np.array([4, 4, 3, 4, 6, 6], np.int32)) == 12
