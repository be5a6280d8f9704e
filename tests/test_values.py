"""Wrong values of fields that transformers declares are refused when the config is built, before weights are loaded."""

import math
import re

import numpy as np
import pytest
from transformers import HfArgumentParser

from hf_megapack import values
from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError


@pytest.fixture
def build(tmp_path):
    return lambda **options: MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, **options)


EVERY = {"logging_steps": "logging", "eval_steps": "eval", "save_steps": "save"}


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("seed", ["a", "3", None, True, 2.0, -1, 2**32, math.nan], "a whole number of at least 0 and below 4294967296"),
        ("data_seed", ["a", True, 2.5, -1], "a whole number of at least 0"),
        ("adam_beta1", ["0.9", None, True, 1, 1.5, -0.1, math.nan], "a finite number of at least 0 and below 1"),
        ("adam_beta2", [1.0, math.inf], "a finite number of at least 0 and below 1"),
        ("adam_epsilon", [None, math.inf, -1e-8], "a finite number of at least 0"),
        ("weight_decay", [None, math.inf], "a finite number of at least 0"),
        ("learning_rate", [None, True, math.inf], "a finite number of at least 0"),
        ("max_grad_norm", ["1", True, math.nan, -1], "a finite number of at least 0; 0 leaves gradients as they are"),
        ("num_train_epochs", ["3", None, math.nan, math.inf], "a finite number"),
        ("max_steps", ["3", None, True, 2.0, math.inf, -2], "a whole number of at least -1; -1 trains for num_train"),
        ("warmup_steps", ["3", None, True, math.nan, -1], "a finite number of at least 0"),
        ("logging_steps", ["3", None, True, math.nan, math.inf], "a finite number"),
        ("eval_steps", ["3", True, math.nan], "a finite number"),
        ("save_steps", ["3", None, math.nan, math.inf], "a finite number"),
        ("eval_delay", ["3", None, math.nan, math.inf], "a finite number"),
        ("save_total_limit", ["2", 0, -1, 2.5, True], "a whole number of at least 1; None keeps every checkpoint"),
        ("dataloader_prefetch_factor", ["2", 0, 2.5], "a whole number of at least 1"),
        ("dataloader_num_workers", [None, True, -1], "a whole number of at least 0"),
        ("per_device_train_batch_size", [None, True], "a whole number of at least 1"),
        ("gradient_accumulation_steps", [None], "a whole number of at least 1"),
        ("ddp_timeout", ["30", None, 0, math.nan], "a whole number of at least 1"),
        ("full_determinism", ["false", 3, None], "True or False"),
        ("load_best_model_at_end", ["false"], "True or False"),
        ("greater_is_better", ["false", 2], "True or False"),
        ("dataloader_drop_last", ["no"], "True or False"),
        ("save_only_model", ["false"], "True or False"),
        ("gradient_checkpointing", ["false"], "True or False"),
        ("torch_compile", ["false"], "True or False"),
        ("log_level", ["loud", 3, None], "one of .*'warning'"),
        ("log_level_replica", ["loud"], "one of .*'warning'"),
        ("train_sampling_strategy", ["longest", None], "one of 'random', 'sequential'"),
        ("save_strategy", ["often", None], "one of 'no', 'steps', 'epoch', 'best'"),
        ("lr_scheduler_type", ["bumpy", 3], "one of 'linear', 'cosine'"),
        ("optim_args", [3, {"momentum": 0.9}], "a string"),
        ("metric_for_best_model", [3], "a string"),
        ("output_dir", [3], "a string"),
    ],
)
def test_a_wrong_value_is_refused_with_what_it_may_be(tmp_path, name, wrong, allowed):
    for value in wrong:
        options = {"output_dir": str(tmp_path), "use_cpu": True, name: value}
        with pytest.raises(
            ConfigError, match=rf"^{name}={re.escape(repr(value))} is not allowed; it must be {allowed}"
        ):
            MegaPackConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 0, "data_seed": 2**70},
        {"seed": 2**32 - 1, "data_seed": np.int64(3)},
        {"max_grad_norm": math.inf},
        {"max_steps": 3, "num_train_epochs": -1},
        {"warmup_steps": 0.5, "logging_steps": 0.5, "save_steps": 1.0, "eval_delay": 2.5},
        {"logging_strategy": "no", "logging_steps": 0, "save_strategy": "epoch", "save_steps": -1},
        {"eval_strategy": "steps", "eval_steps": None, "eval_delay": -1},
        {"learning_rate": np.float32(1e-4), "load_best_model_at_end": 0},
        {"include_num_input_tokens_seen": "non_padding", "trackio_static_space_id": False},
    ],
)
def test_what_means_something_is_taken(build, options):
    config = build(**options)
    config.check()
    assert {name: getattr(config, name) for name in options if name != "eval_steps"} == {
        name: value for name, value in options.items() if name != "eval_steps"
    }


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("value", [0, -1, -0.5])
def test_an_interval_that_never_comes_round_is_refused(build, name, value):
    with pytest.raises(ConfigError, match=rf"^{name}={value} with {EVERY[name]}_strategy='steps' never comes round"):
        build(**{f"{EVERY[name]}_strategy": "steps", name: value})


def test_a_number_of_updates_is_not_cut_to_a_whole_one(build):
    with pytest.raises(ConfigError, match=r"warmup_steps=2\.5 is not a whole number of updates"):
        build(warmup_steps=2.5)
    with pytest.raises(ConfigError, match=r"^transformers refuses these arguments: .*logging_steps.*2\.5"):
        build(logging_steps=2.5)


def test_an_order_of_examples_that_packing_does_not_know_is_refused(build):
    """Later releases of transformers have more of them, which would mean 'random'."""
    config = build()
    config.train_sampling_strategy = "batch_rebalance"
    with pytest.raises(ConfigError, match="train_sampling_strategy='batch_rebalance' is not"):
        config.check()


def test_whom_to_report_to_is_checked_with_the_config(build, monkeypatch):
    for unknown in ("nobody", ["nobody"], None, 3):
        with pytest.raises(ConfigError, match=r"report_to=.* is not allowed: .* is not supported, only .*tensorboard"):
            build(report_to=unknown)
    monkeypatch.setattr(values, "get_available_reporting_integrations", lambda: ["trackio"])
    with pytest.raises(ConfigError, match=r"report_to='wandb' needs a package that is not installed.* here: trackio"):
        build(report_to=["trackio", "wandb"])
    assert build(report_to="trackio").report_to == ["trackio"]
    config = build(report_to="none")
    config.report_to = "wandb"
    with pytest.raises(ConfigError, match="report_to='wandb' needs a package"):
        config.check()


def test_a_command_line_that_was_read_changes_nothing(tmp_path, build):
    """HfArgumentParser rewrites the types of the fields, so that none of them may be None."""
    HfArgumentParser(MegaPackConfig).parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--use_cpu"])
    build(run_name=None, data_seed=None, report_to="none").check()
    with pytest.raises(ConfigError, match="data_seed='3' is not allowed; it must be a whole number"):
        build(data_seed="3")
