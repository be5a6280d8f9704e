"""Token accounting against counts made by hand."""

import dataclasses

import pytest

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.packing import Alignment, PackingReport, RankLayout, estimate_sharing, schedule_rows
from tests.helpers.brute_force_tree import as_examples, branch, fixture_examples


def test_counts_of_the_fixture_on_two_ranks():
    """Rows 331, 205, 193 and a dummy of the shortest: 922 executed; 216 = 33 + 57 + 81 + 45 loss-bearing."""
    batch = PrefixTreeCollator(packed_sequence_length=384)(as_examples(fixture_examples("all")))
    schedule = schedule_rows([row.input_ids.size for row in batch.rows], RankLayout(data_parallel_size=2))
    batch = dataclasses.replace(batch, schedule=schedule)
    report = PackingReport.from_batch(batch)
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
    )
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
    assert PackingReport().sharing == 0


def test_estimate_sharing_in_both_orders():
    """Two families alternate: as ordered, no pair shares; sorted, each pair of 110 tokens costs 100 + 2 * 10."""
    examples = [branch(100, 10, 100, index) for index in range(4)]
    examples[1][0][:100] = examples[3][0][:100] = range(500, 600)
    as_ordered, grouped = estimate_sharing(as_examples(examples), 2, packed_sequence_length=1000)
    assert as_ordered == 1
    assert grouped == pytest.approx(440 / 240)
    both, _ = estimate_sharing(as_examples(examples), 4, packed_sequence_length=1000)
    assert both == pytest.approx(440 / 240)
