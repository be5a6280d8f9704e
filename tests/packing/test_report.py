"""Token accounting against counts made by hand."""

import dataclasses
import random

import pytest

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.packing import Alignment, ExampleCosts, PackingReport, RankLayout, estimate_sharing, schedule_rows
from hf_megapack.packing.schedule import PAIRS_PER_SLOT
from tests.helpers.brute_force_tree import ancestor_mask, as_examples, branch, fixture_examples, random_examples


def num_pairs(num_tokens: int) -> int:
    """Return what attention computes for a plain sequence."""
    return sum(range(1, num_tokens + 1))


def test_counts_of_the_fixture_on_two_ranks():
    """Rows 331, 205, 193 and a dummy of the shortest: 922 executed; 216 = 33 + 57 + 81 + 45 loss-bearing."""
    batch = PrefixTreeCollator(packed_sequence_length=384)(as_examples(fixture_examples("all")))
    schedule = schedule_rows([row.input_ids.size for row in batch.rows], RankLayout(data_parallel_size=2))
    batch = dataclasses.replace(batch, schedule=schedule)
    report = PackingReport.from_batch(batch)
    # Rank 0 runs the row of 331 and the dummy, rank 1 the others; 217 and 241 tokens share 127.
    cost_331, cost_205, cost_193 = (
        331 + (num_pairs(217) + num_pairs(241) - num_pairs(127)) / PAIRS_PER_SLOT,
        205 + num_pairs(205) / PAIRS_PER_SLOT,
        193 + num_pairs(193) / PAIRS_PER_SLOT,
    )
    assert report == PackingReport(
        num_updates=1,
        num_examples=4,
        num_rows=3,
        num_dummies=1,
        num_logical_tokens=193 + 217 + 241 + 205,
        num_executed_tokens=331 + 205 + 193 + 193,
        num_padding_slots=0,
        num_dummy_slots=193,
        num_loss_tokens=216,
        packing_seconds=batch.packing_seconds,
        heaviest_load=pytest.approx(cost_331 + cost_193),
        mean_load=pytest.approx((cost_331 + cost_205 + 2 * cost_193) / 2),
    )
    assert report.imbalance == pytest.approx((cost_331 + cost_193) / ((cost_331 + cost_205 + 2 * cost_193) / 2) - 1)
    assert report.fill(400) == pytest.approx((331 + 205 + 193) / 1200)
    assert report.sharing == pytest.approx(856 / 922)
    assert report.shared_share == pytest.approx(127 / 856)


def test_padding_is_executed_but_no_example_owns_it():
    collator = PrefixTreeCollator(packed_sequence_length=1024, alignment=Alignment(packed_multiple=512))
    report = PackingReport.from_batch(collator(as_examples(fixture_examples("all"))))
    assert (report.num_executed_tokens, report.num_padding_slots) == (1024, 1024 - 602)
    assert report.shared_share == pytest.approx(254 / 856)


def test_padding_between_sequences_counts_too():
    """5 and 3 tokens in [0, 8) and [8, 16), then 16 slots of tail: 24 of 32 slots belong to no example."""
    collator = PrefixTreeCollator(
        packed_sequence_length=32,
        packing_strategy="mffd",
        alignment=Alignment(sequence_multiple=8, packed_multiple=32),
    )
    report = PackingReport.from_batch(collator(as_examples([([1] * 5, [1] * 5), ([2] * 3, [1] * 3)])))
    assert (report.num_executed_tokens, report.num_padding_slots, report.num_loss_tokens) == (32, 24, 6)
    assert report.shared_share == 0


def test_reports_add_up():
    collator = PrefixTreeCollator(packed_sequence_length=384)
    one = PackingReport.from_batch(collator(as_examples(fixture_examples("all"))))
    two = sum([one, one], PackingReport())
    assert (two.num_updates, two.num_examples, two.num_executed_tokens) == (2, 8, 2 * 729)
    assert two.sharing == one.sharing
    assert PackingReport().sharing == PackingReport().imbalance == PackingReport().fill(384) == 0


def test_rows_are_kept_only_when_asked_for_and_add_up_in_order():
    collator = PrefixTreeCollator(packed_sequence_length=384)
    batches = [collator(as_examples(fixture_examples(name))) for name in ("all", "last")]
    assert PackingReport.from_batch(batches[0]).batches == ()
    kept = sum((PackingReport.from_batch(batch, keep_rows=True) for batch in batches), PackingReport())
    assert [id(batch) for batch in kept.batches] == [id(batch) for batch in batches]


def test_costs_of_the_fixture():
    """Three examples share 127 slots; the fourth begins differently and shares none."""
    costs = ExampleCosts.from_batch(
        PrefixTreeCollator(packed_sequence_length=1024)(as_examples(fixture_examples("all")))
    )
    assert costs.num_tokens.tolist() == [193, 217, 241, 205]
    assert costs.num_own_slots.tolist() == [193 - 127, 217 - 127, 241 - 127, 205]
    shared = num_pairs(127)
    assert costs.num_own_pairs.tolist() == [
        num_pairs(193) - shared,
        num_pairs(217) - shared,
        num_pairs(241) - shared,
        num_pairs(205),
    ]


@pytest.mark.parametrize("strategy", ["prefix_tree", "mffd"])
def test_costs_are_those_of_the_dense_mask(strategy):
    """The oracle counts what slots of one owner see in the mask of ancestors, row by row."""
    rng = random.Random(7)
    num_shared = 0
    for _ in range(30):
        examples = random_examples(rng, "all")
        batch = PrefixTreeCollator(packed_sequence_length=200, packing_strategy=strategy, min_shared_tokens=2)(
            as_examples(examples)
        )
        slots, pairs = [0] * len(examples), [0] * len(examples)
        for row in batch.rows:
            mask = ancestor_mask(row.segments, row.input_ids.size)
            table = row.segments
            for index in range(table.start.size):
                owners = table.examples[table.example_offsets[index] : table.example_offsets[index + 1]].tolist()
                num_shared += len(owners) > 1
                if len(owners) == 1:
                    slots[owners[0]] += int(table.end[index] - table.start[index])
                    pairs[owners[0]] += int(mask[table.start[index] : table.end[index]].sum())
        costs = ExampleCosts.from_batch(batch)
        assert costs.num_tokens.tolist() == [len(ids) for ids, _ in examples]
        assert costs.num_own_slots.tolist() == slots
        assert costs.num_own_pairs.tolist() == pairs
    assert (num_shared > 0) == (strategy == "prefix_tree")


def test_estimate_sharing_in_both_orders():
    """Two families alternate: as ordered, no pair shares; sorted, each pair of 110 tokens costs 100 + 2 * 10."""
    examples = [branch(100, 10, 100, index) for index in range(4)]
    examples[1][0][:100] = examples[3][0][:100] = range(500, 600)
    as_ordered, grouped = estimate_sharing(as_examples(examples), 2, packed_sequence_length=1000)
    assert as_ordered == 1
    assert grouped == pytest.approx(440 / 240)
    both, _ = estimate_sharing(as_examples(examples), 4, packed_sequence_length=1000)
    assert both == pytest.approx(440 / 240)
