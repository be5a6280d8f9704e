"""A stream gives the examples and updates of a dataset of the same rows in the same order, or says why it cannot."""

import json
import traceback

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.lengths import LengthTally
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.data.stream import ExampleStream, StreamedUpdate, UpdateStream, is_stream
from hf_megapack.errors import BackendError, ConfigError, DataError
from tests.helpers.assets import load_conversations, load_tokenizer

ROWS = {
    "messages": [{key: row[key] for key in ("messages", "tools")} for row in load_conversations("bfcl")],
    "prompt and completion": [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(7)],
    "text": [{"text": f"Line {n}."} for n in range(5)],
    "tokens": [{"input_ids": [1, 2, n], "labels": [-100, -100, n]} for n in range(9)],
}


def stream_of(rows: list[dict]) -> IterableDataset:
    """Return a stream whose columns are not known beforehand."""
    return IterableDataset.from_generator(lambda: iter(rows))


def read(rows: IterableDataset, *, size: int = 1, drop_last: bool = False, **options) -> list[StreamedUpdate]:
    """Return the first pass."""
    stream = ExampleStream(rows, ChatTransform(load_tokenizer(), **options))
    return list(UpdateStream(stream, examples_per_update=size, drop_last=drop_last))


def contents(update) -> list[tuple[list[int], list[int]]]:
    """Return the ids and masks of some examples."""
    return [(list(map(int, e["input_ids"])), list(map(int, e["loss_mask"]))) for e in update]


def numbers(updates: list[StreamedUpdate]) -> list[int]:
    """Return the last token of each example."""
    return [int(example["input_ids"][-1]) for update in updates for example in update.examples]


@pytest.fixture
def shards(tmp_path) -> list[str]:
    """Three files of four rows of tokens, numbered 10 to 21."""
    paths = []
    for shard in range(3):
        paths.append(str(tmp_path / f"{shard}.jsonl"))
        lines = [{"input_ids": [1, 10 + 4 * shard + n], "labels": [-100, 10 + 4 * shard + n]} for n in range(4)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return paths


@pytest.mark.parametrize("mask", ["all", "last", "each"])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("is_known", [True, False])
def test_examples_are_those_of_a_dataset(kind, mask, is_known):
    rows = ROWS[kind]
    # A columnar store gives the arguments of all tool calls the same keys, in one order: it is not what went in.
    stored = Dataset.from_list([{**row, "tools": json.dumps(row["tools"])} if "tools" in row else row for row in rows])
    expected = contents(prepare_dataset(stored if is_known else rows, load_tokenizer(), assistant_mask=mask))
    stream = stored.to_iterable_dataset() if is_known else stream_of(rows)
    assert (stream.column_names is not None) == is_known
    *updates, end = read(stream, assistant_mask=mask)
    assert [contents(update.examples) for update in updates] == [[example] for example in expected]
    assert len(expected) > len(rows) or mask != "each" or kind != "messages"
    assert end.examples == []


def test_a_stream_of_examples_that_the_transform_made_is_taken_as_it_is():
    rows = stream_of(ROWS["messages"])
    transform = ChatTransform(load_tokenizer(), assistant_mask="each")
    mapped = rows.map(transform, batched=True, with_indices=True, batch_size=3, remove_columns=["messages", "tools"])
    assert [contents(u.examples) for u in read(mapped)] == [
        contents(u.examples) for u in read(rows, assistant_mask="each")
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.data())
def test_updates_are_those_of_the_sampler_in_the_datasets_order(count, size, drop_last, data):
    """Examples that are dropped leave no gap, wherever they are."""
    is_long = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    rows = [{"input_ids": [1, 2, n] * (1 + long), "labels": [-100] * 2 + [n] + [-100] * 3 * long} for n, long in
            enumerate(is_long)]  # fmt: skip
    kept = [n for n, long in enumerate(is_long) if not long]
    stream = stream_of(rows)
    if len(kept) < (size if drop_last else 1):
        with pytest.raises(DataError, match="dataloader_drop_last" if kept else "no usable example"):
            read(stream, size=size, drop_last=drop_last, max_length=3, overlong="drop")
        return
    *updates, end = read(stream, size=size, drop_last=drop_last, max_length=3, overlong="drop")
    sampler = UpdateSampler(
        num_examples=len(kept), examples_per_update=size, seed=0, shuffle=False, drop_last=drop_last
    )
    assert [numbers([update]) for update in updates] == [[kept[at] for at in indices] for indices in sampler]
    total = LengthTally()
    for update in [*updates, end]:
        total.merge(update.lengths)
    assert total.counts == [len(kept), 0, count - len(kept), 0]


def test_lengths_are_counted_where_they_were_met():
    """Of six rows those at 0, 3 and 5 are too long: each counts for the update that was read with it, or the end."""
    rows = [{"input_ids": [1] * (9 if n in (0, 3, 5) else 3), "loss_mask": [1] * (9 if n in (0, 3, 5) else 3)}
            for n in range(6)]  # fmt: skip
    updates = read(stream_of(rows), size=2, max_length=4, overlong="drop")
    assert [update.lengths.counts for update in updates] == [[2, 0, 1, 0], [1, 0, 2, 0], [0, 0, 0, 0]]
    rows = rows[:3] + rows[5:]
    updates = read(stream_of(rows), size=2, max_length=4, overlong="drop")
    assert [update.lengths.counts for update in updates] == [[2, 0, 1, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_every_shard_is_read_once_in_order_and_passes_differ_only_if_shuffled(shards, num_workers, is_persistent):
    loaded = load_dataset("json", data_files=shards, split="train", streaming=True)
    assert loaded.num_shards == 3
    passes = {}
    for name, rows in (("plain", loaded), ("shuffled", loaded.shuffle(seed=3, buffer_size=5))):
        updates = UpdateStream(
            ExampleStream(rows, ChatTransform(load_tokenizer())), examples_per_update=5, drop_last=False
        )
        loader = DataLoader(
            updates, batch_size=None, collate_fn=lambda update: numbers([update]), num_workers=num_workers,
            persistent_workers=is_persistent and num_workers > 0,
        )  # fmt: skip
        for epoch in (0, 1, 0):
            updates.set_epoch(epoch)
            passes.setdefault((name, epoch), []).append([number for part in loader for number in part])
    assert all(sorted(order) == list(range(10, 22)) for orders in passes.values() for order in orders)
    assert passes["plain", 0] == [list(range(10, 22))] * 2
    assert passes["shuffled", 0][0] == passes["shuffled", 0][1]
    assert passes["shuffled", 0][0] != passes["shuffled", 1][0]
    # What iterating the stream itself gives, the epoch set by hand.
    shuffled = loaded.shuffle(seed=3, buffer_size=5)
    for epoch in (0, 1):
        shuffled.set_epoch(epoch)
        assert [row["input_ids"][1] for row in shuffled] == passes["shuffled", epoch][0]


def test_two_workers_would_each_read_all_and_are_refused(shards):
    loaded = load_dataset("json", data_files=shards, split="train", streaming=True)
    updates = UpdateStream(
        ExampleStream(loaded, ChatTransform(load_tokenizer())), examples_per_update=5, drop_last=False
    )
    with pytest.raises(BackendError, match="2 workers would each read the stream") as caught:
        list(DataLoader(updates, batch_size=None, num_workers=2, collate_fn=lambda update: update.examples))
    # Frames hold the error that holds them: the loader would end at a garbage collection, which waits for the workers.
    traceback.clear_frames(caught.tb)


def test_a_stream_that_was_split_by_node_is_refused(shards):
    loaded = load_dataset("json", data_files=shards, split="train", streaming=True)
    with pytest.raises(ConfigError, match=r"split_dataset_by_node over 3 nodes.*the whole stream"):
        read(split_dataset_by_node(loaded, rank=0, world_size=3))
    assert numbers(read(split_dataset_by_node(loaded, rank=0, world_size=1))) == list(range(10, 22))


def test_formats_are_taken_off_and_a_place_is_kept(shards):
    loaded = load_dataset("json", data_files=shards, split="train", streaming=True)
    assert numbers(read(loaded.with_format("torch"))) == list(range(10, 22))
    iterator = iter(loaded)
    for _ in range(6):
        next(iterator)
    state = loaded.state_dict()
    again = load_dataset("json", data_files=shards, split="train", streaming=True)
    again.load_state_dict(state)
    assert numbers(read(again)) == list(range(16, 22))
    formatted = again.with_format("torch")
    formatted.load_state_dict(state)
    with pytest.raises(ConfigError, match="Leave out with_format"):
        read(formatted)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "the stream has no rows"),
        ([{"question": "a"}], r"columns \['question'\] fit no known format"),
        ([{"text": "a"}, {"words": "b"}], "row 1 has no text, which rows before it have"),
        ([{"text": "a"}, {"text": None}], "row 1: text must be non-empty text"),
    ],
)
def test_rows_that_cannot_be_learned_name_themselves(rows, problem):
    with pytest.raises(DataError, match=problem):
        read(stream_of(rows))


def test_an_error_comes_after_the_updates_before_it():
    updates = iter(
        UpdateStream(
            ExampleStream(stream_of([{"text": "a"}] * 4 + [{"text": ""}]), ChatTransform(load_tokenizer())),
            examples_per_update=2,
            drop_last=False,
        )
    )
    assert [len(next(updates).examples) for _ in range(2)] == [2, 2]
    with pytest.raises(DataError, match="row 4: text must be"):
        next(updates)


def test_known_columns_that_fit_no_format_are_refused_before_anything_is_read():
    rows = Dataset.from_list([{"question": "a"}]).to_iterable_dataset()
    with pytest.raises(DataError, match="fit no known format"):
        ExampleStream(rows, ChatTransform(load_tokenizer()))


def test_what_is_cut_or_dropped_is_logged_at_the_end_of_a_pass(caplog):
    rows = [{"input_ids": [1] * n, "loss_mask": [1] * n} for n in (3, 9, 9, 2)]
    read(stream_of(rows), max_length=4, overlong="truncate_right")
    assert "2 of 4 examples were longer than max_length: 2 truncated, 0 dropped" in caplog.text


def test_only_streams_of_datasets_are_streams():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(int, 1)

    assert is_stream(stream_of([]))
    assert not is_stream(Dataset.from_list([{"text": "a"}]))
    assert not is_stream([{"text": "a"}])
    with pytest.raises(ConfigError, match="got Endless; wrap it with"):
        is_stream(Endless())


def test_a_rank_without_rows_has_none():
    assert list(ExampleStream(None, None).examples(0, 1)) == []
    assert np.array(LengthTally().counts).sum() == 0
