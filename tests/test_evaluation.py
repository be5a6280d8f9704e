"""MegaPackTrainer evaluates, around a backend in plain torch: numbers, sets, the metric of the best model."""

import dataclasses
import math

import pytest

from hf_megapack.errors import ConfigError
from tests.helpers.fake_trainer import FakeTrainer, oracle_loss, token_rows


@pytest.mark.parametrize("options", [{}, {"packing_strategy": "ffd"}, {"packed_sequence_length": 100}])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_eval_loss_is_per_token_of_the_whole_set(make, options, batch_size):
    rows = token_rows(7)
    trainer = make(eval_dataset=rows, per_device_eval_batch_size=batch_size, **options)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(oracle_loss(trainer.backend, rows), rel=1e-6)
    assert {"eval_mean_token_accuracy", "eval_entropy", "eval_runtime"} <= metrics.keys()


def test_several_eval_sets_and_another_one(make):
    one, two, three = token_rows(3), token_rows(5), token_rows(6)
    trainer = make(eval_dataset={"one": one, "two": two}, eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    last = {name: value for line in trainer.state.log_history for name, value in line.items()}
    assert last["eval_one_loss"] == pytest.approx(oracle_loss(trainer.backend, one), rel=1e-6)
    assert last["eval_two_loss"] == pytest.approx(oracle_loss(trainer.backend, two), rel=1e-6)
    assert trainer.evaluate(three)["eval_loss"] == pytest.approx(oracle_loss(trainer.backend, three), rel=1e-6)


@pytest.mark.parametrize("is_trained", [False, True])
def test_an_evaluation_called_train_has_the_numbers_of_any_other(make, caplog, is_trained):
    """Training's own last line has the same train_loss and train_runtime; a skipped update changes its mean."""
    rows = token_rows(3)
    trainer = make(on_nonfinite="skip")
    if is_trained:
        trainer.backend.poison = {2: "loss"}
        trainer.train()
    metrics = trainer.evaluate(rows, metric_key_prefix="train")
    other = trainer.evaluate(rows, metric_key_prefix="other")
    assert {name.removeprefix("train_") for name in metrics} == {name.removeprefix("other_") for name in other}
    assert metrics["train_loss"] == other["other_loss"]
    assert metrics["train_loss"] == pytest.approx(oracle_loss(trainer.backend, rows), rel=1e-6)
    assert "stands for 0.00" not in caplog.text


@pytest.mark.parametrize(("datasets", "named"), [(["one", "two"], "has 'one', 'two'"), (None, "is not a dict")])
def test_an_eval_set_of_an_unknown_name_is_an_error(make, datasets, named):
    trainer = make(eval_dataset={name: token_rows(2) for name in datasets} if datasets else token_rows(2))
    with pytest.raises(ConfigError, match=f"no evaluation set 'three': eval_dataset {named}"):
        trainer.evaluate("three")


@pytest.mark.parametrize("option", [{"eval_strategy": "steps", "eval_steps": 1}, {"eval_on_start": True}])
@pytest.mark.parametrize("dataset", [None, {}])
def test_evaluation_of_nothing_is_refused_before_anything_is_read(make, option, dataset):
    name = next(iter(option))
    with pytest.raises(ConfigError, match=rf"{name}=('steps'|True) evaluates while training, but eval_dataset is"):
        make(rows=[{"not": "read"}], eval_dataset=dataset, **option)


def test_a_nan_in_evaluation_is_reported_not_hidden(make):
    trainer = make(eval_dataset=token_rows(4), per_device_eval_batch_size=2)
    eval_step, calls = trainer.backend.eval_step, []
    trainer.backend.eval_step = lambda batch: (
        calls.append(1)
        or (eval_step(batch) if len(calls) > 1 else dataclasses.replace(eval_step(batch), loss=math.nan))
    )
    assert math.isnan(trainer.evaluate()["eval_loss"])


METRICS = "loss, mean_token_accuracy, entropy"


@pytest.mark.parametrize("use", [{}, {"load_best_model_at_end": True}, {"save_strategy": "best"}])
@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("accuracy", None),
        ("eval_accuracy", None),
        ("one_loss", None),
        ("loss", ["one", "two"]),
        ("eval_three_loss", ["one", "two"]),
    ],
)
def test_a_metric_that_evaluation_does_not_give_is_refused_at_once(make, metric, names, use):
    sets = {name: token_rows(2) for name in names} if names else token_rows(2)
    known = "one_loss, one_mean_token_accuracy, one_entropy, two_loss" if names else METRICS
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2} | use
    with pytest.raises(ConfigError, match=f"metric_for_best_model='{metric}' is no metric .*reports {known}"):
        make(eval_dataset=sets, metric_for_best_model=metric, **options)


@pytest.mark.parametrize("prefix", ["", "eval_"])
@pytest.mark.parametrize("names", [None, ["one", "two"]])
def test_every_metric_of_evaluation_can_be_the_one_of_the_best_model(make, prefix, names):
    sets = {name: token_rows(2) for name in names} if names else token_rows(2)
    for metric in METRICS.split(", "):
        metric = f"{prefix}{'two_' if names else ''}{metric}"
        options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "max_steps": 1}
        trainer = make(eval_dataset=sets, metric_for_best_model=metric, greater_is_better=True, **options)
        trainer.train()
        assert trainer.state.best_metric is not None


class OwnMetric(FakeTrainer):
    """A trainer that evaluates in its own way."""

    def evaluate(self, *args, **kwargs):
        """Add a metric."""
        return {**super().evaluate(*args, **kwargs), "eval_reward": 1.0}


def test_a_trainer_with_its_own_evaluation_may_have_other_metrics(make):
    trainer = make(
        trainer=OwnMetric, eval_dataset=token_rows(2), metric_for_best_model="reward", eval_strategy="steps",
        eval_steps=1, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 1.0
