"""Plans: nothing lost, nothing above capacity, and no more tokens than the geometry that was admitted."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.errors import DataError
from hf_megapack.packing import (
    NO_ALIGNMENT,
    Alignment,
    RankLayout,
    build_forest,
    gather_examples,
    lay_out_row,
    plan_update,
)
from hf_megapack.packing.bins import place_examples
from hf_megapack.packing.plan import _tree_rows
from hf_megapack.packing.tree import fewest_tokens, rebuild_forest, restrict_forest
from tests.helpers.brute_force_tree import (
    as_examples,
    branch,
    fill_by_remainder,
    fixture_examples,
    learned_pairs,
    random_examples,
    row_pairs,
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


def test_a_row_admitted_at_capacity_never_grows_when_it_is_rebuilt():
    """Without D, A to C share [0, 100) and the run of A and B drops to 50: 300, if it were not cut at 86: 264."""
    examples = [A, B, C, D]
    assert walk_size([A, B, C], 64) == 300
    forest = build_forest(gather_examples(as_examples(examples)), 64)
    assert forest.num_tokens == 508
    assert restrict_forest(forest, np.array([at for at in range(4) if forest.order[at] != 3])).num_tokens == 286
    rows = plan(examples, 286)
    assert sorted((row.num_tokens, sorted(row.order.tolist())) for row in rows) == [(264, [0, 1, 2]), (286, [3])]


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
    assert rebuild_forest(forest, second, gathered, 64).num_tokens == 230
    # Depth-first placing does better: C and D take 64 + 96 + 222 = 382, A and B 150 + 2 * 20 = 190.
    assert sorted(row.num_tokens for row in plan([A, B, C, D], 400)) == [190, 382]


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


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=10), st.integers(0, 10)), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.integers(0, 12),
)
def test_no_plan_executes_less_than_the_lower_bound_or_more_than_admitted(drafts, min_shared_tokens, room):
    examples = [(ids, [int(at >= first) for at in range(len(ids))]) for ids, first in drafts]
    gathered = gather_examples(as_examples(examples))
    capacity = int(gathered.lengths.max()) + room
    forest = build_forest(gathered, min_shared_tokens)
    rows = plan(examples, capacity, min_shared_tokens)
    assert sum(row.num_tokens for row in rows) >= fewest_tokens(gathered, capacity)
    position = {example: at for at, example in enumerate(forest.order.tolist())}
    for row in rows:
        members = np.array(sorted(position[example] for example in row.order.tolist()))
        assert row.num_tokens <= restrict_forest(forest, members).num_tokens


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_sharing_learned_slots_never_executes_more(data_parallel_size):
    """Longer shared runs can leave shorter ones below the minimum; then the default plan is taken."""
    rng = random.Random(6)
    ranks = RankLayout(data_parallel_size=data_parallel_size)
    num_saved = num_kept = 0
    for _ in range(250):
        examples = random_examples(rng, "last")
        capacity = max(len(ids) for ids, _ in examples) + rng.randint(0, 40)
        default, shared = (gather_examples(as_examples(examples), share_supervised=choice) for choice in (False, True))
        plans = [
            plan_update(
                update, strategy="prefix_tree", packed_sequence_length=capacity, min_shared_tokens=8, ranks=ranks
            )
            for update in (default, shared)
        ]
        without, executed = (
            int(np.array([row.num_tokens for row in made.rows])[made.schedule.row_index].sum()) for made in plans
        )
        assert executed <= without
        num_saved += executed < without
        if sum(row.num_tokens for row in _tree_rows(shared, capacity, 8, NO_ALIGNMENT, ranks)) > without:
            num_kept += 1
            rows = [lay_out_row(shared, row, NO_ALIGNMENT, 0) for row in plans[1].rows]
            assert sum(map(row_pairs, rows), Counter()) == learned_pairs(examples)
    assert num_saved > 50
    assert num_kept > 0
