"""MegaPackTrainer on streams: what a dataset of the same rows gives, pass after pass, resumed anywhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset, IterableDatasetDict
from peft import LoraConfig
from transformers import TrainerCallback, TrainingArguments

from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError, DataError
from hf_megapack.streaming import place_in_stream
from tests.helpers.assets import MODEL, load_conversations, load_tokenizer
from tests.helpers.fake_trainer import (
    LORA,
    FakeTrainer,
    adapter,
    assert_equal_adapters,
    examples_of,
    oracle_loss,
    token_rows,
)
from tests.helpers.spawn import run_ranks

CHATS = [{"messages": row["messages"]} for row in load_conversations("mtbench")]


def stream_of(rows: list[dict], num_shards: int = 1) -> IterableDataset:
    """Return a stream; several shards come in another order in each pass but the first."""
    return Dataset.from_list(rows).to_iterable_dataset(num_shards=num_shards)


class Passes(TrainerCallback):
    """Keeps where epochs end."""

    def __init__(self):
        self.steps, self.epochs = [], []

    def on_step_end(self, args, state, control, **kwargs):
        """Keep the fractional epoch."""
        self.epochs.append(state.epoch)

    def on_epoch_end(self, args, state, control, **kwargs):
        """Keep the update."""
        self.steps.append(state.global_step)


@pytest.fixture
def make(tmp_path):
    """Return a function that builds a trainer over a stream or dataset."""

    def build(train_dataset, *, eval_dataset=None, callbacks=None, **options):
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "dataloader_num_workers": 0,
            "disable_tqdm": True,
        }
        return FakeTrainer(
            MODEL,
            MegaPackConfig(**(defaults | options)),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=load_tokenizer(),
            callbacks=callbacks,
            peft_config=LoraConfig(**LORA),
        )

    return build


def batches(trainer) -> list[list[tuple]]:
    """Return the examples of each update."""
    return [examples_of(batch) for batch in trainer.backend.calls]


def losses(trainer) -> list[float]:
    """Return the logged losses."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_passes_are_those_of_transformers(make, tmp_path, monkeypatch):
    """Ten rows, four per update: transformers' own Trainer restarts the stream, and calls each pass an epoch."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, labels=None):
            return {"loss": (self.weight * x).sum()}

    theirs = Passes()
    transformers.Trainer(
        Model(),
        TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=8,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            remove_unused_columns=False,
        ),
        train_dataset=IterableDataset.from_generator(lambda: ({"x": 1.0, "labels": 0} for _ in range(10))),
        callbacks=[theirs],
    ).train()
    ours, asked = Passes(), []
    trainer = make(stream_of(token_rows(10)), max_steps=8, callbacks=[ours])
    get_batch_samples = trainer.get_batch_samples
    monkeypatch.setattr(trainer, "get_batch_samples", lambda *args: asked.append(1) or get_batch_samples(*args))
    trainer.train()
    assert len(asked) == 8 + 2, "nobody asks on when a pass is over"
    assert ours.steps == theirs.steps == [3, 6, 8]
    assert ours.epochs == theirs.epochs
    assert [batch.num_examples for batch in trainer.backend.calls] == [4, 4, 2, 4, 4, 2, 4, 4]
    assert batches(trainer)[:3] == batches(trainer)[3:6], "a stream without randomness repeats itself"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataloader_num_workers": 1},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
        {"dataloader_drop_last": True},
        {"assistant_mask": "each"},
        {"assistant_mask": "each", "max_length": 150, "overlong": "drop"},
        {"assistant_mask": "last", "max_length": 100, "overlong": "truncate_left", "packing_strategy": "ffd"},
    ],
    ids=lambda options: ", ".join(f"{key}={value}" for key, value in options.items()) or "default",
)
def test_a_stream_trains_as_a_dataset_in_its_own_order_does(make, options):
    """Bit-equal batches, losses and adapter, over more than one pass."""
    rows = CHATS if {"assistant_mask", "dataloader_num_workers"} & options.keys() else token_rows(11)
    options = {"max_steps": 9, **options}
    stored = make(Dataset.from_list(rows), train_sampling_strategy="sequential", **options)
    stored.train()
    streamed = make(stream_of(rows), **options)
    streamed.train()
    assert len(stored.backend.calls) == 9
    assert batches(streamed) == batches(stored)
    assert streamed.state.log_history[0].keys() == stored.state.log_history[0].keys()
    assert losses(streamed) == losses(stored)
    assert_equal_adapters(adapter(streamed), adapter(stored))
    assert streamed.state.epoch > 1, "the stream must have begun again"


def test_resuming_anywhere_is_bit_equal_to_no_interruption(make, tmp_path):
    """Shuffled passes of three updates, saved at each update; resumed from the middle, the end and the next pass."""
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1}

    def rows():
        return stream_of(token_rows(10), num_shards=3).shuffle(seed=5, buffer_size=6)

    whole = make(rows(), **options)
    whole.train()
    expected = batches(whole)
    assert expected[:3] != expected[3:6], "each pass has its own order"
    shutil.move(tmp_path / "run", tmp_path / "saved")
    for step, num_workers in ((2, 0), (3, 1), (4, 0), (6, 0), (7, 1)):
        resumed = make(rows(), dataloader_num_workers=num_workers, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "saved" / f"checkpoint-{step}"))
        assert batches(resumed) == expected[step:], step
        assert_equal_adapters(adapter(resumed), adapter(whole))
        assert resumed.state.global_step == 8
        assert resumed.state.epoch == whole.state.epoch


def test_more_updates_than_first_planned_go_on_where_the_last_one_ended(make, tmp_path):
    """A checkpoint of the last planned update is no sign that the stream ended there."""
    rows = stream_of(token_rows(40))
    whole = make(rows, max_steps=7)
    whole.train()
    make(rows, max_steps=4, save_strategy="steps", save_steps=4).train()
    longer = make(rows, max_steps=7)
    longer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert batches(longer) == batches(whole)[4:]


def test_a_pass_begins_anew_where_skipping_is_off(make, tmp_path):
    rows = stream_of(token_rows(10))
    whole = make(rows, max_steps=8, save_strategy="steps", save_steps=5)
    whole.train()
    resumed = make(rows, max_steps=8, ignore_data_skip=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert batches(resumed) == batches(whole)[3:6]


def test_a_checkpoint_of_a_dataset_has_no_place_in_a_stream(make, tmp_path):
    make(Dataset.from_list(token_rows(12)), save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    # 2 of the 3 updates of epoch 0: what a stream would call 2.67 of 4.
    with pytest.raises(ConfigError, match=r"epoch 0.666667, after 2 of 4 updates.*ignore_data_skip=True"):
        place_in_stream(checkpoint, skips=True)
    assert place_in_stream(checkpoint, skips=False) == (0, 0)
    with pytest.raises(ConfigError, match=r"train_dataset: saved 'a dataset with a length', now 'a stream'"):
        make(stream_of(token_rows(12))).train(resume_from_checkpoint=str(checkpoint))
    anew = make(stream_of(token_rows(12)), ignore_data_skip=True)
    anew.train(resume_from_checkpoint=str(checkpoint))
    assert anew.state.global_step == 4


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"epoch": 0.0, "global_step": 0, "max_steps": 8}, (0, 0)),
        ({"epoch": 0.375, "global_step": 3, "max_steps": 8}, (0, 3)),
        ({"epoch": 1.125, "global_step": 4, "max_steps": 8}, (1, 1)),
        ({"epoch": 1.0, "global_step": 8, "max_steps": 8}, (0, 8)),
        ({"epoch": 999 + 1 / 3_000_000, "global_step": 9999, "max_steps": 3_000_000}, (999, 1)),
        ({"epoch": 2.0625, "global_step": 5, "max_steps": 8}, None),
        ({"epoch": 1.875, "global_step": 4, "max_steps": 8}, None),
        ({"epoch": 0.375, "global_step": 4, "max_steps": 8}, None),
    ],
)
def test_the_place_is_read_from_the_epoch(tmp_path, state, place):
    """`epoch` is the pass plus updates / max_steps; no place if that is no whole, or more updates than there were."""
    (tmp_path / "trainer_state.json").write_text(json.dumps({**transformers.TrainerState().__dict__, **state}))
    if place is None:
        with pytest.raises(ConfigError, match="no place in a stream"):
            place_in_stream(tmp_path, skips=True)
    else:
        assert place_in_stream(tmp_path, skips=True) == place


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_steps": -1}, "num_train_epochs says nothing: set max_steps"),
        ({"group_by_prefix": True}, "group_by_prefix=True does not go with a stream"),
        ({"shuffle_unit": "example"}, "shuffle_unit='example' does not go with a stream"),
        ({"data_seed": 0}, r"data_seed=0 does not go with a stream.*ds.shuffle\(seed"),
        ({"dataset_num_proc": 2}, "dataset_num_proc=2 does not go with a stream"),
    ],
)
def test_options_that_need_a_length_are_refused_by_name(make, options, problem):
    rows = stream_of(token_rows(10))
    with pytest.raises(ConfigError, match=problem):
        make(rows, **options)
    make(Dataset.from_list(token_rows(10)), eval_dataset=rows, **options)


def test_several_splits_are_no_training_set(make):
    with pytest.raises(ConfigError, match=r"got IterableDatasetDict\. Of a DatasetDict pass one split"):
        make(IterableDatasetDict({"train": stream_of(token_rows(3))}))


def test_more_workers_than_one_are_said_to_be_idle(make, caplog):
    make(stream_of(token_rows(10)), dataloader_num_workers=4)
    assert "dataloader_num_workers=4, but a stream has one order" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        ([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 3, {"max_length": 3, "overlong": "drop"},
         "no usable example is left of the stream's 3: all were longer than max_length"),
        (token_rows(3), {"dataloader_drop_last": True}, "leaves nothing: the stream's 3 examples are fewer than the 4"),
    ],
)  # fmt: skip
def test_training_on_nothing_is_an_error(make, rows, options, problem, num_workers):
    trainer = make(stream_of(rows), dataloader_num_workers=num_workers, **options)
    with pytest.raises(DataError, match=problem):
        trainer.train()


def test_a_stream_without_rows_is_an_error(make):
    with pytest.raises(DataError, match="the stream has no rows"):
        make(IterableDataset.from_generator(lambda: iter([]))).train()


def test_what_was_cut_or_dropped_is_in_the_last_log_line_of_each_run(make):
    """Twelve rows, each third too long: of the first 8 kept examples' updates, what was met on the way counts."""
    long = {"input_ids": list(range(1, 30)), "labels": [-100] * 20 + list(range(21, 30))}
    rows = [long if index % 3 == 0 else {"input_ids": [1, index], "labels": [-100, index]} for index in range(12)]
    trainer = make(stream_of(rows), max_steps=2, max_length=20, overlong="drop")
    for _ in range(2):
        metrics = trainer.train().metrics
        assert (metrics["truncated_examples"], metrics["dropped_examples"]) == (0, 4)
    whole = make(stream_of(rows), max_steps=2, overlong="drop")
    assert "dropped_examples" not in whole.train().metrics
    stored = make(Dataset.from_list(rows), max_steps=2, max_length=20, overlong="drop")
    assert stored.train().metrics["dropped_examples"] == 4


def test_streams_to_evaluate_on_are_read_whole_each_time(make):
    one, two = token_rows(7), token_rows(5)
    trainer = make(
        Dataset.from_list(token_rows(8)), eval_dataset={"one": stream_of(one), "two": two}, eval_strategy="steps",
        eval_steps=1, max_steps=2, per_device_eval_batch_size=3,
    )  # fmt: skip
    trainer.train()
    for _ in range(2):
        metrics = trainer.evaluate()
        assert metrics["eval_one_loss"] == pytest.approx(oracle_loss(trainer.backend, one), rel=1e-6)
        assert metrics["eval_two_loss"] == pytest.approx(oracle_loss(trainer.backend, two), rel=1e-6)
    assert trainer.evaluate(stream_of(two))["eval_loss"] == pytest.approx(oracle_loss(trainer.backend, two), rel=1e-6)
    with pytest.raises(DataError, match="the stream has no rows"):
        trainer.evaluate(IterableDataset.from_generator(lambda: iter([])))


def test_endless_streams_train(make):
    """A stream without an end needs nothing but max_steps."""

    def count():
        number = 0
        while True:
            number += 1
            yield {"input_ids": [1, number], "labels": [-100, number]}

    trainer = make(IterableDataset.from_generator(count), max_steps=3, dataloader_num_workers=1)
    trainer.train()
    assert batches(trainer) == [[(1, n) for n in range(first, first + 4)] for first in (1, 5, 9)]


def _train_on_two_ranks(rank: int, folder: Path) -> None:
    """Train, evaluate, resume and fail; rank 1's streams raise when they are read."""

    def rows(count: int):
        def read():
            assert rank == 0, "rank 1 has read the stream"
            yield from token_rows(count)

        return IterableDataset.from_generator(read)

    arguments = {
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": 7,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 4,
        "dataloader_num_workers": 0,
        "max_length": 75,
        "overlong": "drop",
    }

    def build(train: IterableDataset, **options):
        return FakeTrainer(
            MODEL,
            MegaPackConfig(**(arguments | options)),
            train_dataset=train,
            eval_dataset=rows(5),
            processing_class=load_tokenizer(),
            peft_config=LoraConfig(**LORA),
        )

    trainer = build(rows(13))
    metrics = trainer.train().metrics
    evaluated = trainer.evaluate()["eval_loss"]
    resumed = build(rows(13))
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4"))
    assert batches(resumed) == batches(trainer)[4:]
    with pytest.raises(ConfigError, match="set max_steps"):
        build(rows(13), max_steps=-1)
    with pytest.raises(DataError, match="no usable example is left"):
        build(rows(13), max_length=70).train()
    seen = {
        "batches": batches(trainer),
        "losses": losses(trainer),
        "eval": evaluated,
        "adapter": adapter(resumed),
        "dropped": metrics["dropped_examples"],
    }
    torch.save(seen, folder / f"seen-{rank}.pt")


def test_only_rank_0_reads_and_both_train_on_the_same(make, tmp_path):
    run_ranks(_train_on_two_ranks, 2, tmp_path)
    first, second = (torch.load(tmp_path / f"seen-{rank}.pt", weights_only=False) for rank in range(2))
    assert first["batches"] == second["batches"]
    assert first["losses"] == second["losses"]
    assert (first["eval"], first["dropped"]) == (second["eval"], second["dropped"])
    assert_equal_adapters(first["adapter"], second["adapter"])
    alone = make(stream_of(token_rows(13)), max_steps=7, max_length=75, overlong="drop")
    alone.train()
    assert batches(alone) == first["batches"]
    assert losses(alone) == first["losses"]
