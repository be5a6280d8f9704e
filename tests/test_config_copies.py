"""Configs that are copied, derived from, or changed after they were built mean what they say."""

import copy
import dataclasses
import enum
import json
import pickle
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import transformers
from transformers import TrainingArguments

from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError


@pytest.fixture
def build(tmp_path):
    return lambda cls=MegaPackConfig, **options: cls(output_dir=str(tmp_path), use_cpu=True, **options)


OPTIONS = {
    "gradient_checkpointing": True,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "eval_strategy": "steps",
    "save_steps": 1000,
    "load_best_model_at_end": True,
    "report_to": "none",
    "torch_compile": True,
}


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        dataclasses.replace,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: type(config)(**config.to_dict()),
        lambda config: type(config)(**json.loads(config.to_json_string())),
    ],
    ids=["deepcopy", "replace", "pickle", "to_dict", "to_json_string"],
)
def test_a_copy_is_the_same_config(build, again):
    """Transformers writes a word in place of every token, and accelerate's options one by one."""
    config = build(**OPTIONS)
    copied = again(config)
    copied.check()
    different = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(copied, f.name)]
    # A word in its place, which nothing reads.
    assert [name for name in different if name != "hub_token"] == []


@pytest.mark.parametrize("option", [{"hub_token": "secret"}, {"accelerator_config": {"split_batches": True}}])
def test_what_a_copy_may_have_is_refused_where_it_asks_for_something(build, option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"^{name}=.* is not supported"):
        build(**option)
    build(accelerator_config={"split_batches": False})


def test_numbers_of_other_libraries_and_paths_are_kept_as_pythons(build, tmp_path):
    """json, which writes checkpoints, and random, which is seeded, take no others."""
    given = {
        "learning_rate": np.float32(0.5),
        "seed": np.int64(3),
        "save_steps": np.int32(7),
        "logging_steps": np.float64(0.5),
        "warmup_steps": Fraction(1, 4),
        "dataloader_drop_last": np.True_,
        "share_supervised": np.False_,
        "include_num_input_tokens_seen": np.True_,
        "run_name": tmp_path / "run",
    }
    config = build(**given)
    kept = {name: getattr(config, name) for name in given}
    assert kept == {
        "learning_rate": 0.5,
        "seed": 3,
        "save_steps": 7,
        "logging_steps": 0.5,
        "warmup_steps": 0.25,
        "dataloader_drop_last": True,
        "share_supervised": False,
        "include_num_input_tokens_seen": "all",
        "run_name": str(tmp_path / "run"),
    }
    assert json.loads(config.to_json_string())["seed"] == 3


def test_numbers_of_numpy_reach_a_checkpoint(make):
    trainer = make(max_steps=1, save_strategy="steps", save_steps=np.int64(1), learning_rate=np.float32(1e-3))
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_subclass_may_have_fields_of_any_type(build):
    class Kind(enum.Enum):
        ONE = 1

    @dataclass
    class Config(MegaPackConfig):
        kind: "Kind" = Kind.ONE  # a name that typing.get_type_hints does not find
        thing: "somewhere.Thing | None" = None  # noqa: F821 - as under TYPE_CHECKING
        # declared anew: what reads it takes what it always takes
        report_to: str = "none"
        max_length: int = 1024

    config = build(Config, kind=3)
    config.check()
    assert (config.kind, config.report_to, config.max_length) == (3, [], 1024)


@pytest.mark.parametrize(
    ("name", "default", "message"),
    [
        ("learning_rate", "1e-4", "learning_rate='1e-4' is not allowed"),
        ("packed_sequence_length", 0, "packed_sequence_length=0 is not allowed"),
        ("on_nonfinite", "ignore", "on_nonfinite='ignore' is not allowed"),
        ("fp16", True, "fp16=True is not supported"),
    ],
)
def test_defaults_of_a_subclass_are_checked(build, name, default, message):
    derived = dataclasses.make_dataclass("Derived", [(name, type(default), default)], bases=(MegaPackConfig,))
    with pytest.raises(ConfigError, match=f"^{message}"):
        build(derived)


def test_a_subclass_is_not_completed_twice(build):
    @dataclass
    class Config(MegaPackConfig):
        count: int = 0

        def __post_init__(self):
            super().__post_init__()
            self.count += 1

    config = build(Config)
    config.check()
    assert config.count == 1


# Fields that are set later


def test_setters_of_transformers_leave_a_config_that_is_taken(build):
    """set_logging sets report_to='none' and set_evaluate eval_delay=None, where nothing else is said."""
    config = build()
    config.set_training(learning_rate=1e-4, batch_size=4).set_optimizer(name="sgd", args="momentum=0.9")
    config.set_lr_scheduler(name="cosine", warmup_steps=10).set_logging(strategy="steps", steps=10)
    config.set_evaluate(strategy="steps", steps=10, batch_size=4).set_save(strategy="steps", steps=10, total_limit=3)
    config.set_dataloader(num_workers=2).set_testing(batch_size=3)
    config.check()
    assert (config.report_to, config.eval_delay, config.per_device_eval_batch_size) == ([], 0, 3)


def test_what_follows_from_a_field_follows_from_one_that_is_set_later(build):
    config = build(logging_steps=5)
    config.eval_strategy = config.save_strategy = "steps"
    config.save_steps, config.load_best_model_at_end = 10, True
    config.report_to, config.lr_scheduler_kwargs = ["none"], '{"num_cycles": 0.25}'
    config.lr_scheduler_type, config.bf16, config.include_num_input_tokens_seen = "cosine", None, False
    config.check()
    assert (config.eval_steps, config.metric_for_best_model, config.greater_is_better) == (5, "loss", False)
    assert (config.report_to, config.lr_scheduler_kwargs) == ([], {"num_cycles": 0.25})
    assert (config.bf16, config.include_num_input_tokens_seen) == (False, "no")


def test_what_transformers_refuses_is_refused_when_it_is_set_later(build):
    config = build()
    config.load_best_model_at_end = True
    with pytest.raises(ConfigError, match="load_best_model_at_end requires the save and eval strategy to match"):
        config.check()


@pytest.mark.parametrize("value", ["sometimes", 3, None])
def test_tokens_are_counted_in_one_of_the_known_ways(build, value):
    with pytest.raises(ConfigError, match="must be True, False or one of 'all', 'non_padding', 'no'"):
        build(include_num_input_tokens_seen=value)


def test_choices_that_cannot_be_compared_are_refused(build):
    with pytest.raises(ConfigError, match="must be one of 'all', 'last', 'each'"):
        build(assistant_mask=np.array(["all", "last"]))


def test_a_run_is_written_to_a_folder(build, tmp_path):
    with pytest.raises(ConfigError, match="output_dir='' is no folder"):
        MegaPackConfig(output_dir="", use_cpu=True)
    assert MegaPackConfig(output_dir=tmp_path, use_cpu=True).output_dir == str(tmp_path)


@pytest.mark.skipif(
    "warmup_ratio" not in TrainingArguments.__dataclass_fields__,
    reason=f"transformers {transformers.__version__} has no warmup_ratio",
)
def test_a_ratio_of_warmup_is_one_and_gives_way_to_steps_that_are_set_later(build):
    """Transformers takes a ratio of 3 for three updates."""
    for wrong in (3, 1.0, -0.1):
        with pytest.raises(ConfigError, match=f"^warmup_ratio={wrong} is not allowed; .* at least 0 and below 1"):
            build(warmup_ratio=wrong)
    config = build(warmup_ratio=0.1)
    assert config.get_warmup_steps(50) == 5
    config.warmup_steps = 7
    config.check()
    assert config.get_warmup_steps(50) == 7
