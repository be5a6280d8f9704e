"""What a trainer was built by may not be set to something else afterwards: it would change nothing."""

import dataclasses

import pytest
from datasets import Dataset

from hf_megapack.arguments import TRAINING_ARGUMENTS
from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError
from hf_megapack.settled import SETTLED
from tests.helpers.fake_trainer import token_rows


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assistant_mask", "each"),
        ("max_length", 72),
        ("overlong", "drop"),
        ("packed_sequence_length", 100),
        ("packing_strategy", "ffd"),
        ("min_shared_tokens", 1000),
        ("share_supervised", True),
        ("recompute", "full"),
        ("gradient_checkpointing", True),
    ],
)
def test_what_the_trainer_was_built_by_cannot_be_set_later(make, name, value):
    trainer = make(eval_dataset=Dataset.from_list(token_rows(2)))
    before = getattr(trainer.args, name)
    setattr(trainer.args, name, value)
    known = "recompute" if name == "gradient_checkpointing" else name
    with pytest.raises(ConfigError, match=rf"after the trainer was built.*\n  {known}: built with .*, now"):
        trainer.train()
    with pytest.raises(ConfigError, match=rf"\n  {known}: built with .*\nBuild a new trainer"):
        trainer.evaluate()
    setattr(trainer.args, known, "auto" if known == "recompute" else before)
    trainer.train()
    trainer.evaluate()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("label_smoothing_factor", 0.1, "label_smoothing_factor=0.1 is not supported"),
        ("learning_rate", "1e-4", "learning_rate='1e-4' is not allowed"),
        ("packing", True, "packing is a TRL argument"),
        ("on_nonfinite", "ignore", "on_nonfinite='ignore'"),
        ("gradient_accumulation_steps", 0, "gradient_accumulation_steps=0"),
    ],
)
def test_what_the_config_refuses_is_refused_when_it_is_set_later(make, name, value, message):
    trainer = make()
    setattr(trainer.args, name, value)
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def test_what_each_call_reads_again_may_change_between_two_calls(make):
    trainer = make(rows=10)
    trainer.train()
    trainer.args.max_steps, trainer.args.per_device_train_batch_size = 3, 5
    trainer.args.learning_rate, trainer.args.lr_scheduler_type = 0.001, "constant"
    assert trainer.train().global_step == 3
    assert trainer.get_total_train_batch_size(trainer.args) == 5
    assert trainer.optimizer.param_groups[0]["lr"] == 0.001


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_dataset_that_is_set_later_was_not_rendered(make, is_stream):
    trainer = make(eval_dataset=Dataset.from_list(token_rows(3)))
    raw = Dataset.from_list(token_rows(3))
    raw = raw.to_iterable_dataset() if is_stream else raw
    prepared = trainer.train_dataset
    for name, use in (("train_dataset", trainer.train), ("eval_dataset", trainer.evaluate)):
        before = getattr(trainer, name)
        setattr(trainer, name, raw)
        with pytest.raises(ConfigError, match=f"{name} is a .*Dataset that was set after .*new trainer as {name}"):
            use()
        setattr(trainer, name, before.select(range(2)))
        use()
    assert trainer.evaluate(raw)["eval_loss"] > 0
    assert len(prepared) == 10


def test_settled_fields_are_fields_that_are_honoured():
    own = MegaPackConfig.__annotations__.keys()
    names = {field.name for field in dataclasses.fields(MegaPackConfig)}
    assert names >= SETTLED
    assert all(name in own or TRAINING_ARGUMENTS[name].mark == "honoured" for name in SETTLED)
