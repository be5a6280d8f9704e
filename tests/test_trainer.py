"""MegaPackTrainer around a backend in plain torch: the loop, its totals, its guard."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import EarlyStoppingCallback
from transformers.utils import logging as transformers_logging

from hf_megapack.batch import from_buffer
from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import BackendError, DataError, NonFiniteResultError
from hf_megapack.loading import describe_sharing
from tests.helpers.assets import MODEL
from tests.helpers.fake_backend import PREFIX, FakeBackend
from tests.helpers.fake_trainer import (
    LORA,
    FakeTrainer,
    Recorder,
    adapter,
    assert_equal_adapters,
    examples_of,
    rows_of_four_prompts,
    token_rows,
)

# the loop


def test_training_lowers_the_loss_and_logs_what_was_learned(make):
    trainer = make(rows=4, max_steps=30, per_device_train_batch_size=4, learning_rate=0.05)
    output = trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 30
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    # 4 examples: a prompt of 70 and 3, 4, 5 and 6 learned tokens; slot 69 predicts, so 69 prompt tokens are shared
    logical, executed = 4 * 70 + 18, 69 + 4 * 1 + 18
    first = lines[0]
    assert (first["logical_tokens"], first["executed_tokens"], first["loss_tokens"]) == (logical, executed, 18)
    assert first["shared_fraction"] == pytest.approx(1 - executed / logical)
    assert lines[1]["num_tokens"] == 2 * logical
    assert trainer.state.num_input_tokens_seen == 30 * logical
    for name in ("mean_token_accuracy", "entropy", "grad_norm", "learning_rate", "tokens_per_second"):
        assert math.isfinite(first[name]), name
    assert output.metrics["executed_tokens"] == 30 * executed
    weights = 4608 * 16 + 2 * 2 * 4 * 16
    assert trainer.state.total_flos == 4 * weights * 30 * executed


def test_the_logged_loss_is_the_one_that_was_back_propagated(make):
    trainer = make(logging_steps=2)
    losses = []
    run_step = trainer.backend.run_step
    trainer.backend.run_step = lambda batch: losses.append(run_step(batch)) or losses[-1]
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    expected = [np.mean([r.loss for r in losses[i : i + 2]]) for i in (0, 2)]
    assert logged == pytest.approx(expected, rel=1e-6)


def test_every_example_of_an_update_is_in_one_batch_and_every_epoch_has_its_own_order(make):
    trainer = make(rows=10, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2)
    trainer.train()
    batches = trainer.backend.calls
    assert [batch.num_examples for batch in batches] == [4, 4, 2, 4, 4, 2]
    epochs = [[e for b in part for e in examples_of(b)] for part in (batches[:3], batches[3:])]
    expected = sorted(tuple(row["input_ids"]) for row in token_rows(10))
    assert sorted(epochs[0]) == expected
    assert sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]
    assert epochs[0] != expected


def test_options_of_the_loader_are_honoured(make):
    trainer = make(
        rows=10, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=1, dataloader_drop_last=True,
        train_sampling_strategy="sequential", dataloader_num_workers=1, dataloader_persistent_workers=True,
    )  # fmt: skip
    trainer.train()
    assert [batch.num_examples for batch in trainer.backend.calls] == [4, 4]
    order = [e for b in trainer.backend.calls for e in examples_of(b)]
    assert order == [tuple(row["input_ids"]) for row in token_rows(8)]


def test_the_banner_shows_the_users_totals(make, caplog):
    trainer = make(rows=10, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2, log_level="info")
    transformers_logging.enable_propagation()
    try:
        with caplog.at_level(logging.INFO):
            trainer.train()
    finally:
        transformers_logging.disable_propagation()
        transformers_logging.set_verbosity_warning()
    num_factors = 2 * (4 * 16 + 16 * 4)
    for line in (
        "Num examples = 10",
        "Num Epochs = 2",
        "Num update steps per epoch = 3",
        "Instantaneous batch size per device = 2",
        "distributed & accumulation) = 4",
        "Gradient Accumulation steps = 2",
        "Total optimization steps = 6",
        f"Number of trainable parameters = {num_factors}",
    ):
        assert line in caplog.text, line


def test_accumulation_is_one_during_an_update_and_restored_after_also_on_error(make):
    recorder = Recorder()
    trainer = make(gradient_accumulation_steps=3, max_steps=2, callbacks=[recorder])
    trainer.train()
    assert recorder.accumulation == [1, 1]
    assert trainer.args.gradient_accumulation_steps == 3
    assert trainer.get_total_train_batch_size(trainer.args) == 6
    trainer.backend.poison = {4: "loss"}
    with pytest.raises(NonFiniteResultError):
        trainer.train()
    assert trainer.args.gradient_accumulation_steps == 3


def test_a_trainer_trains_again_after_an_error_and_another_follows(make):
    trainer = make(max_steps=3)
    trainer.backend.poison = {2: "loss"}
    with pytest.raises(NonFiniteResultError, match="Update 2: loss is nan"):
        trainer.train()
    assert not trainer.is_in_train
    trainer.backend.poison = {}
    assert trainer.train().global_step == 3
    assert make(max_steps=2).train().global_step == 2


def test_a_process_without_a_launcher_uses_one_gpu_of_many(make, tmp_path):
    args = MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=3)
    args._n_gpu = 4
    trainer = FakeTrainer(MODEL, args, processing_class=make().processing_class, peft_config=LoraConfig(**LORA))
    assert (trainer.args.n_gpu, trainer.get_total_train_batch_size(args)) == (1, 3)


def test_callbacks_keep_their_state_in_the_checkpoint(make, tmp_path):
    rows, stop = token_rows(4), EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make(
        rows=rows, eval_dataset=rows, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, max_steps=9, learning_rate=30.0, optim="sgd", callbacks=[stop],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step < 9
    saved = json.loads(
        (tmp_path / "run" / f"checkpoint-{trainer.state.global_step}" / "trainer_state.json").read_text()
    )
    assert saved["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] == 1
    assert saved["best_global_step"] == trainer.state.global_step - 1


def test_the_schedule_and_warmup_are_transformers_own(make):
    recorder = Recorder()
    make(max_steps=4, lr_scheduler_type="linear", warmup_steps=2, callbacks=[recorder]).train()
    assert recorder.rates == pytest.approx([0.0, 0.005, 0.01, 0.005])


def test_accelerate_never_sees_the_model(make, monkeypatch):
    from accelerate import Accelerator

    def fail(*args, **kwargs):
        raise AssertionError("the model went through accelerate")

    monkeypatch.setattr(Accelerator, "prepare_model", fail)
    monkeypatch.setattr(Accelerator, "prepare_data_loader", fail)
    assert make(max_steps=2).train().global_step == 2


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        # Four prompts take turns: an update of two examples shares nothing, sorted ones share 70 of about 75 tokens.
        ({"rows": 16, "train_sampling_strategy": "sequential"}, "group_by_prefix=True would make it about 1.8"),
        ({"rows": 16, "group_by_prefix": True}, "with examples grouped by prefix (group_by_prefix)."),
        ({"rows": 2}, "tokens of the data."),
        ({"rows": 16, "packing_strategy": "ffd"}, "tokens of the data."),
    ],
)
def test_the_log_tells_what_sharing_gives_and_what_grouping_would(make, caplog, options, ending):
    trainer = make(max_steps=4, **{**options, "rows": rows_of_four_prompts(options["rows"])})
    transformers_logging.enable_propagation()
    logging.getLogger("hf_megapack").propagate = True
    try:
        with caplog.at_level(logging.WARNING):
            trainer.train()
    finally:
        transformers_logging.disable_propagation()
    told = [r.getMessage() for r in caplog.records if "Each executed token stands for" in r.getMessage()]
    assert len(told) == 1
    assert ending in told[0]
    assert told[0].startswith(f"Each executed token stands for {1.83 if 'group_by_prefix' in options else 1:.1f}")


def test_the_log_does_not_advise_grouping_that_gives_nothing(make):
    """All rows have one prompt."""
    trainer = make(rows=12)
    text = describe_sharing(1.83, trainer.train_dataset, trainer.data_collator, trainer.args, update_size=2)
    assert "group_by_prefix=True would hardly raise that, judging by the first 12 examples." in text


@pytest.mark.parametrize("unit", ["conversation", "example"])
def test_grouped_updates_share_a_prompt_and_hold_every_example_once(make, unit):
    rows = rows_of_four_prompts(16)
    trainer = make(rows=rows, max_steps=-1, num_train_epochs=2, group_by_prefix=True, shuffle_unit=unit)
    assert trainer.train().global_step == 16
    epochs = trainer.backend.calls[:8], trainer.backend.calls[8:]
    for batches in epochs:
        examples = [examples_of(batch) for batch in batches]
        assert all(len(pair) == 2 and pair[0][:70] == pair[1][:70] for pair in examples)
        assert sorted(example for pair in examples for example in pair) == sorted(tuple(r["input_ids"]) for r in rows)
    first, second = ([examples_of(batch) for batch in batches] for batches in epochs)
    assert first != second


def test_evaluation_is_never_regrouped(make):
    trainer = make(eval_dataset=Dataset.from_list(rows_of_four_prompts(8)), group_by_prefix=True)
    assert list(trainer.get_eval_dataloader().batch_sampler) == [list(range(8))]


def test_chats_are_rendered_packed_and_learned(make, chat_examples):
    trainer = make(rows=[{"messages": row["messages"]} for row in chat_examples], assistant_mask="each", max_steps=2)
    assert len(trainer.train_dataset) > len(chat_examples)
    assert trainer.train().global_step == 2


def test_a_row_that_cannot_be_packed_is_an_error_of_its_own_class(make):
    with pytest.raises(DataError, match="80"):
        make(rows=[{"input_ids": list(range(1, 81)), "labels": list(range(1, 81))}], packed_sequence_length=50)


# optimizer, clipping and the finite guard


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_every_allowed_optimizer_moves_every_factor(make, optim):
    trainer = make(optim=optim, max_steps=2, weight_decay=0.1)
    before = adapter(trainer)
    trainer.train()
    assert all(not torch.equal(before[key], value) for key, value in adapter(trainer).items())
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == 4


@pytest.mark.parametrize(
    ("name", "value", "key", "expected"),
    [
        ("learning_rate", 0.5, "initial_lr", 0.5),
        ("weight_decay", 0.1, "weight_decay", 0.1),
        ("adam_beta1", 0.5, "betas", (0.5, 0.999)),
        ("optim", "sgd", "momentum", 0),
    ],
)
def test_arguments_that_change_between_two_calls_are_honoured(make, caplog, name, value, key, expected):
    """The optimizer lives on as long as they stay, with its moments, as the HF Trainer's does."""
    recorder = Recorder()
    trainer = make(max_steps=1, lr_scheduler_type="constant", callbacks=[recorder])
    trainer.train()
    first = trainer.optimizer.optimizer
    trainer.train()
    assert trainer.optimizer.optimizer is first
    assert "begins anew" not in caplog.text
    setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.optimizer.optimizer is not first
    assert trainer.optimizer.param_groups[0][key] == expected
    assert recorder.optimizer_rates == [0.01, 0.01, trainer.args.learning_rate]
    assert "begins anew, with no moments" in caplog.text


@pytest.mark.parametrize("limit", [0.25, 0.0])
def test_gradients_are_clipped_by_the_norm_over_all_factors(make, limit):
    trainer = make(optim="sgd", max_steps=1, max_grad_norm=limit, lr_scheduler_type="constant", learning_rate=1.0)
    before = adapter(trainer)
    trainer.train()
    moved = math.sqrt(sum(float((value - before[key]).square().sum()) for key, value in adapter(trainer).items()))
    logged = trainer.state.log_history[0]["grad_norm"]
    assert logged > 1
    assert moved == pytest.approx(limit or logged, rel=1e-4)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize(("kind", "quantity"), [("loss", "loss is nan"), ("grad", "gradient norm is inf")])
def test_a_result_that_is_not_finite_stops_before_anything_is_updated(make, kind, quantity, max_grad_norm):
    trainer = make(max_grad_norm=max_grad_norm, save_strategy="steps", save_steps=1)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.backend.poison = {3: kind}
    with pytest.raises(NonFiniteResultError, match=f"Update 3: {quantity}"):
        trainer.train()
    assert trainer.state.global_step == 2
    kept = {name: p.detach() for name, p in trainer.backend.model.factors.items()}
    assert_equal_adapters(kept, recorder.adapters[-1])
    folders = sorted(p.name for p in Path(trainer.args.output_dir).iterdir())
    assert folders == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("kind", ["loss", "grad"])
def test_skip_leaves_the_update_out_and_says_so(make, kind, caplog):
    recorder = Recorder()
    trainer = make(on_nonfinite="skip", callbacks=[recorder], max_steps=4)
    trainer.backend.poison = {2: kind}
    trainer.train()
    assert trainer.state.global_step == 4
    assert_equal_adapters(recorder.adapters[0], recorder.adapters[1])
    assert not torch.equal(recorder.adapters[1]["q_proj_B"], recorder.adapters[2]["q_proj_B"])
    assert recorder.rates[2] == recorder.rates[1], "a skipped update consumes no learning rate"
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line.get("skipped_updates") for line in lines] == [None, 1, 1, 1]
    assert [math.isfinite(line["loss"]) for line in lines] == [True, kind == "grad", True, True]
    assert all(torch.isfinite(value).all() for value in adapter(trainer).values())
    (warning,) = [record.message for record in caplog.records if "Update 2" in record.message]
    assert warning.endswith(". The update is left out.")


@pytest.mark.parametrize(
    ("poisoned", "windows"),
    [([1, 2, 3], [[], [4]]), ([4], [[1, 2], [3]]), ([1, 2, 3, 4], [[], []]), ([2, 3], [[1], [4]])],
)
def test_the_logged_loss_is_the_mean_of_the_finite_ones_and_nan_without_any(make, poisoned, windows):
    trainer = make(on_nonfinite="skip", logging_steps=2, max_steps=4)
    trainer.backend.poison = dict.fromkeys(poisoned, "loss")
    losses, run_step = [], trainer.backend.run_step
    trainer.backend.run_step = lambda batch: losses.append(run_step(batch)) or losses[-1]
    output = trainer.train()

    def mean(updates: list[int]) -> float:
        return sum(losses[update - 1].loss for update in updates) / len(updates) if updates else math.nan

    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx([mean(window) for window in windows], rel=1e-6, nan_ok=True)
    whole = mean([update for window in windows for update in window])
    assert output.training_loss == pytest.approx(whole, rel=1e-6, nan_ok=True)
    assert output.metrics["train_loss"] == pytest.approx(whole, rel=1e-6, nan_ok=True)


def test_adapters_without_a_gradient_are_listed(make):
    backend = FakeBackend()
    run_step = backend.run_step

    def without_v(batch):
        result = run_step(batch)
        backend.parameters[f"{PREFIX}v_proj.lora_B.weight"].grad.zero_()
        backend.parameters[f"{PREFIX}q_proj.lora_A.weight"].grad = None
        return result

    backend.run_step = without_v
    trainer = make(backend=backend)
    before = adapter(trainer)
    with pytest.raises(BackendError, match="2 of 4 adapter factors") as error:
        trainer.train()
    assert "v_proj.lora_B" in str(error.value)
    assert "q_proj.lora_A" in str(error.value)
    assert "v_proj.lora_A" not in str(error.value)
    assert_equal_adapters(before, adapter(trainer))


def test_an_update_of_the_loader_can_be_looked_at(make):
    trainer = make(rows=4)
    update = from_buffer(next(iter(trainer.get_train_dataloader())).numpy())
    packed = trainer.data_collator(trainer.train_dataset.select(range(2)))
    assert (update.num_examples, packed.num_examples) == (2, 2)
