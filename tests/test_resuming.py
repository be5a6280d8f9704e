"""A resumed run goes on where the saved one stopped, or says which argument keeps it from that."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from hf_megapack.errors import ConfigError, ExportError
from hf_megapack.resuming import RUN_FILE
from tests.helpers.assets import MODEL
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.fake_trainer import (
    Recorder,
    adapter,
    assert_equal_adapters,
    examples_of,
    rows_of_four_prompts,
    token_rows,
)

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Where a run with SAVING leaves its checkpoint."""
    return tmp_path / "run" / "checkpoint-2"


PLACE = [
    ({"per_device_train_batch_size": 1}, "examples per update (per_device_train_batch_size x", "2, now 1"),
    ({"gradient_accumulation_steps": 3}, "examples per update (per_device_train_batch_size x", "2, now 6"),
    ({"seed": 7}, "data_seed (seed, where that is None)", "42, now 7"),
    ({"data_seed": 7}, "data_seed (seed, where that is None)", "42, now 7"),
    ({"shuffle_unit": "example"}, "shuffle_unit", "'conversation', now 'example'"),
    ({"group_by_prefix": True}, "group_by_prefix", "False, now True"),
    ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy", "'random', now 'sequential'"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last", "False, now True"),
    ({"rows": 11}, "number of examples in train_dataset", "10, now 11"),
]


@pytest.mark.parametrize(("changed", "name", "values"), PLACE, ids=lambda value: str(value))
def test_what_moves_the_place_in_the_data_is_refused_unless_the_place_does_not_matter(
    make, checkpoint, changed, name, values
):
    make(**SAVING).train()
    other = make(**({"max_steps": 4} | changed))
    before = adapter(other)
    with pytest.raises(ConfigError) as error:
        other.train(resume_from_checkpoint=str(checkpoint))
    assert re.search(re.escape(name) + ".*: saved " + re.escape(values), str(error.value))
    for advice in ("Take the saved values", "ignore_data_skip=True", "folder as model"):
        assert advice in str(error.value)
    assert other.backend.calls == []
    assert_equal_adapters(before, adapter(other))
    anew = make(ignore_data_skip=True, **({"max_steps": 4} | changed))
    anew.train(resume_from_checkpoint=str(checkpoint))
    assert len(anew.backend.calls) == 2


@pytest.mark.parametrize(("given", "fault"), [(True, "holds no checkpoint"), ("true", "there is no such folder")])
def test_what_is_not_there_cannot_be_resumed(make, given, fault):
    trainer = make()
    with pytest.raises(ConfigError, match=rf"resume_from_checkpoint={given!r}, but .*{fault}"):
        trainer.train(resume_from_checkpoint=given)
    trainer.train(resume_from_checkpoint=False)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("changes", [True, False])
def test_other_examples_of_the_same_number_are_told(make, checkpoint, caplog, changes, skips):
    make(**SAVING).train()
    rows = token_rows(10)
    if changes:
        rows[9] = {**rows[9], "input_ids": [*rows[9]["input_ids"][:-1], 3], "labels": [*rows[9]["labels"][:-1], 3]}
    make(max_steps=4, rows=rows, ignore_data_skip=not skips).train(resume_from_checkpoint=str(checkpoint))
    assert ("as many examples" in caplog.text) == (changes and skips)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("options", [{}, {"lr_scheduler_type": "reduce_lr_on_plateau"}])
def test_another_learning_rate_is_refused_even_if_the_place_does_not_matter(make, checkpoint, options, skips):
    if options:
        options |= {"eval_dataset": token_rows(2), "eval_strategy": "steps", "eval_steps": 1}
    make(**SAVING, **options).train()
    other = make(max_steps=4, learning_rate=0.5, ignore_data_skip=not skips, **options)
    with pytest.raises(ConfigError, match=r"learning_rate: saved 0\.01, now 0\.5") as error:
        other.train(resume_from_checkpoint=str(checkpoint))
    assert "ignore_data_skip" not in str(error.value)
    assert other.backend.calls == []


def test_every_change_is_named_at_once(make, checkpoint):
    make(**SAVING).train()
    other = make(max_steps=4, learning_rate=0.5, seed=7, rows=12)
    with pytest.raises(ConfigError) as error:
        other.train(resume_from_checkpoint=str(checkpoint))
    changes = [line for line in str(error.value).splitlines() if ": saved " in line]
    assert [line.split()[0] for line in changes] == ["learning_rate:", "number", "data_seed"]
    assert "those of the place in the data may differ" in str(error.value)


def test_a_rate_that_no_schedule_keeps_is_that_of_the_optimizer(make, checkpoint):
    """A rate of each group; the argument learning_rate says nothing then."""

    def given(rate: float, **options):
        trainer = make(**({"max_steps": 4} | options))
        first, *others = trainer.backend.parameters.values()
        trainer.optimizer = torch.optim.AdamW([{"params": [first], "lr": rate}, {"params": others}], lr=0.02)
        return trainer

    given(0.1, **SAVING).train()
    given(0.1, learning_rate=0.7).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(ConfigError, match=r"learning_rate: saved \[0.1, 0.02\], now \[0.3, 0.02\]"):
        given(0.3).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    "changed",
    [
        {"max_steps": -1, "num_train_epochs": 1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"weight_decay": 0.1, "max_grad_norm": 0.5, "adam_beta2": 0.95},
        {"packing_strategy": "ffd", "packed_sequence_length": 100, "dataloader_num_workers": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        {"seed": 7, "data_seed": 42},
    ],
    ids=str,
)
def test_what_is_honoured_may_change(make, checkpoint, changed):
    """Every example of the epoch comes once: two updates of two before the interruption, three after it."""
    first = make(**SAVING)
    first.train()
    resumed = make(**({"max_steps": 5} | changed))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    seen = [example for batch in first.backend.calls + resumed.backend.calls for example in examples_of(batch)]
    assert sorted(seen) == sorted(tuple(row["input_ids"]) for row in token_rows(10))


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({"lr_scheduler_type": "linear"}, {"max_steps": 6}),
        ({"lr_scheduler_type": "cosine"}, {"max_steps": 6}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}, {"max_steps": 6}),
        ({"lr_scheduler_type": "linear"}, {"lr_scheduler_type": "cosine", "max_steps": 6}),
        ({"lr_scheduler_type": "linear", "max_steps": 6}, {"lr_scheduler_type": "constant"}),
        ({"lr_scheduler_type": "linear", "on_nonfinite": "skip"}, {"max_steps": 6}),
    ],
    ids=str,
)
def test_the_first_update_after_resuming_has_the_rate_of_the_new_schedule(make, checkpoint, saved, now):
    """As in a run that had the new schedule from its beginning; a skipped update consumes none of either."""
    poison = {2: "loss"} if "on_nonfinite" in saved else {}

    def rates_of(checkpoint: str | None, **options) -> list[float]:
        recorder = Recorder()
        trainer = make(callbacks=[recorder], **options)
        trainer.backend.poison = {} if checkpoint else poison
        trainer.train(resume_from_checkpoint=checkpoint)
        assert len(recorder.rates) == options["max_steps"] - (2 if checkpoint else 0)
        assert recorder.rates == recorder.optimizer_rates
        return recorder.rates

    saved = SAVING | saved
    old = rates_of(None, **saved)
    whole = rates_of(None, **(saved | now | {"save_strategy": "no"}))
    resumed = rates_of(str(checkpoint), **(saved | now | {"save_strategy": "no"}))
    assert resumed == whole[2:]
    assert old != whole[: len(old)]


@pytest.mark.parametrize(
    ("saved", "now", "change"),
    [
        ({"factor": 0.5}, {"factor": 0.1}, "schedule ReduceLROnPlateau, factor=0.5, and ReduceLROnPlateau, factor=0.1"),
        ({"factor": 0.5}, "linear", "schedule ReduceLROnPlateau, factor=0.5, and LambdaLR cannot go on from it"),
        ("linear", {"factor": 0.5}, "schedule LambdaLR, and ReduceLROnPlateau, factor=0.5 cannot go on from it"),
    ],
)
def test_a_schedule_that_follows_evaluations_may_not_change(make, checkpoint, saved, now, change):
    """Its state holds its options: the saved ones would be taken, whatever the arguments say."""
    options = {"eval_dataset": token_rows(2), "eval_strategy": "steps", "eval_steps": 1}

    def schedule(given: str | dict) -> dict:
        if isinstance(given, str):
            return {"lr_scheduler_type": given}
        return {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": given}

    make(**SAVING, **options, **schedule(saved)).train()
    other = make(max_steps=4, **options, **schedule(now))
    with pytest.raises(ConfigError, match=change):
        other.train(resume_from_checkpoint=str(checkpoint))
    assert other.backend.calls == []
    make(max_steps=4, **options, **schedule(saved)).train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_without_a_word_on_its_schedule_resumes_in_one_of_its_kind(make, checkpoint):
    """As the first checkpoints are: of a function of the number of updates the functions' place is left."""
    make(**SAVING).train()
    state = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    assert state.pop("hf_megapack_schedule") == "LambdaLR"
    torch.save(state, checkpoint / "scheduler.pt")
    make(max_steps=4).train(resume_from_checkpoint=str(checkpoint))
    options = {"eval_dataset": token_rows(2), "eval_strategy": "steps", "lr_scheduler_type": "reduce_lr_on_plateau"}
    with pytest.raises(ConfigError, match="schedule LambdaLR, and ReduceLROnPlateau cannot go on from it"):
        make(max_steps=4, eval_steps=1, **options).train(resume_from_checkpoint=str(checkpoint))


def test_data_parallel_ranks_may_take_the_place_of_accumulation(make, checkpoint):
    make(gradient_accumulation_steps=2, **SAVING).train()
    backend = FakeBackend(MODEL)
    backend.data_parallel_size = 2
    make(max_steps=4, rows=10, backend=backend).train(resume_from_checkpoint=str(checkpoint))
    backend.data_parallel_size = 4
    with pytest.raises(ConfigError, match=r"examples per update .*: saved 4, now 8"):
        make(max_steps=4, rows=10, backend=backend).train(resume_from_checkpoint=str(checkpoint))


def test_the_order_of_groups_depends_on_what_is_shared(make, checkpoint):
    options = {"rows": rows_of_four_prompts(10), "group_by_prefix": True}
    make(**SAVING, **options).train()
    with pytest.raises(ConfigError, match="share_supervised: saved False, now True"):
        make(max_steps=4, share_supervised=True, **options).train(resume_from_checkpoint=str(checkpoint))


def test_an_order_without_a_seed_does_not_depend_on_it(make, checkpoint):
    make(train_sampling_strategy="sequential", **SAVING).train()
    resumed = make(train_sampling_strategy="sequential", seed=7, max_steps=4)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    order = [example for batch in resumed.backend.calls for example in examples_of(batch)]
    assert order == [tuple(row["input_ids"]) for row in token_rows(8)[4:]]


def test_a_place_that_updates_do_not_tell_is_refused(make, tmp_path):
    """Begun anew after two updates of five, the next one is the first of its epoch and the third of all."""
    make(**SAVING).train()
    anew = make(save_strategy="steps", save_steps=1, max_steps=3, ignore_data_skip=True)
    anew.train(resume_from_checkpoint=True)
    assert len(anew.backend.calls) == 1
    last = str(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(ConfigError, match=r"epoch 0\.2, after 3 updates of which an epoch has 5"):
        make(max_steps=4).train(resume_from_checkpoint=last)
    make(max_steps=4, ignore_data_skip=True).train(resume_from_checkpoint=last)


def test_another_base_model_is_refused(make, checkpoint, tmp_path):
    """Of equal shapes, so that nothing else would notice; the same folder under another name is the same."""
    make(**SAVING).train()
    copy = tmp_path / "other-model"
    shutil.copytree(MODEL, copy)
    with pytest.raises(ConfigError, match=f"model is '{copy}', but .*was trained on '{MODEL}'"):
        make(model=str(copy), max_steps=4).train(resume_from_checkpoint=str(checkpoint))
    (tmp_path / "link").symlink_to(Path(MODEL).absolute())
    make(model=str(tmp_path / "link"), max_steps=3).train(resume_from_checkpoint=str(checkpoint))
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    (checkpoint / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(copy)}))
    make(model=str(copy), max_steps=3).train(resume_from_checkpoint=str(checkpoint))


def test_random_base_weights_are_those_of_a_seed(make, checkpoint):
    def random(seed: int, **options):
        backend = FakeBackend()
        backend.base_model_name = None
        return make(backend=backend, seed=seed, data_seed=1, **({"max_steps": 4} | options))

    random(3, **SAVING).train()
    random(3).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(ConfigError, match=r"seed, which draws the weights of a base model .*: saved 3, now 4"):
        random(4).train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_that_does_not_say_what_it_needs_is_refused(make, checkpoint):
    make(**SAVING).train()
    (checkpoint / RUN_FILE).write_text("{")
    with pytest.raises(ExportError, match=f"Cannot read .*{RUN_FILE}"):
        make(max_steps=4).train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / RUN_FILE).unlink()
    with pytest.raises(ExportError, match=rf"has no {RUN_FILE}.*pass that folder as model"):
        make(max_steps=4).train(resume_from_checkpoint=str(checkpoint))


def test_a_damaged_schedule_is_an_error_of_its_file(make, checkpoint):
    make(**SAVING).train()
    (checkpoint / "scheduler.pt").write_bytes(b"half")
    with pytest.raises(ExportError, match=r"Cannot read the schedule .*scheduler\.pt"):
        make(max_steps=4).train(resume_from_checkpoint=str(checkpoint))


def test_resuming_without_data_says_what_is_missing(make, checkpoint):
    make(**SAVING).train()
    resumed = make(max_steps=4)
    resumed.train_dataset = None
    with pytest.raises(ConfigError, match=r"train\(\) needs train_dataset"):
        resumed.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("saved", "now", "change"),
    [
        ({}, {"per_device_train_batch_size": 4}, r"examples per update \(.*\): saved 2, now 4"),
        ({}, {"dataloader_drop_last": True}, "dataloader_drop_last: saved False, now True"),
        ({}, {"assistant_mask": "each"}, "assistant_mask: saved 'all', now 'each'"),
        ({"overlong": "drop", "max_length": 90}, {"max_length": 80}, "max_length under overlong='drop': saved 90, now"),
        ({"overlong": "error", "max_length": 90}, {"overlong": "drop"}, None),
        ({}, {"seed": 7}, None),
    ],
)
def test_a_place_in_a_stream_needs_the_same_examples_per_update(make, checkpoint, saved, now, change):
    """Rows are in the stream's own order, whatever the seed; no row was dropped where that was an error."""
    make(is_stream=True, **SAVING, **saved).train()
    resumed = make(is_stream=True, **(saved | now))
    if change is None:
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.state.global_step == 4
        return
    with pytest.raises(ConfigError, match=change):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    make(is_stream=True, ignore_data_skip=True, **(saved | now)).train(resume_from_checkpoint=str(checkpoint))


# a run that is over


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("length", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 1.3}])
@pytest.mark.parametrize("skips", [True, False])
def test_a_finished_run_resumes_without_another_update(make, tmp_path, caplog, is_stream, length, skips):
    """As a job does that is started again; an epoch has five updates, so the last one is not over."""
    options = {"is_stream": is_stream, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    if is_stream:
        length = {"max_steps": 7}
    first = make(**options, **length)
    first.train()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    again = make(**options, **length, ignore_data_skip=not skips)
    output = again.train(resume_from_checkpoint=True)
    assert again.backend.calls == []
    assert output.global_step == again.state.global_step == first.state.global_step
    assert again.state.epoch == first.state.epoch
    assert_equal_adapters(adapter(again), adapter(first))
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    assert f"holds all {output.global_step} updates: there is nothing left to train" in caplog.text
    assert "Each executed token stands for 0.00" not in caplog.text


@pytest.mark.parametrize("length", [{"max_steps": 1}, {"max_steps": -1, "num_train_epochs": 0.2}])
def test_a_checkpoint_beyond_the_end_of_the_run_is_refused(make, checkpoint, length):
    make(**SAVING).train()
    shorter = make(**length)
    with pytest.raises(ConfigError, match=r"checkpoint-2 was written after 2 updates, but .* asks for 1\. Raise it"):
        shorter.train(resume_from_checkpoint=str(checkpoint))
    assert shorter.backend.calls == []
