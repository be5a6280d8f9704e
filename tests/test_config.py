"""MegaPackConfig: its defaults, and what it refuses before any work."""

import dataclasses
import inspect
import math
import os
import pickle
import re
from pathlib import Path

import pytest
import transformers
from transformers import HfArgumentParser, SchedulerType, TrainingArguments

from hf_megapack import checks
from hf_megapack.arguments import DROPPED_ARGUMENTS, PER_PROCESS, TRAINER_ARGUMENTS, TRAINING_ARGUMENTS, TRL_NAMES
from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
# What 5.8 does not have yet.
LATER_ARGUMENTS = {
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "dataloader_in_order",
    "dataloader_multiprocessing_context",
}
OWN_FIELDS = [f for f in dataclasses.fields(MegaPackConfig) if f.name in MegaPackConfig.__annotations__]
SETTING = {"optim_target_modules": ["q_proj"], "logging_nan_inf_filter": True, "average_tokens_across_devices": False}
SETTING |= {
    "dataloader_in_order": False,
    "hub_strategy": "end",
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
SETTING |= {
    "accelerator_config": {"split_batches": True},
    "include_for_metrics": ["loss"],
    "debug": "underflow_overflow",
}


@pytest.fixture
def make(tmp_path):
    return lambda **options: MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_every_inherited_argument_has_a_verdict():
    fields = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert len(fields) > 100
    assert fields - set(TRAINING_ARGUMENTS) == set()
    parameters = set(inspect.signature(transformers.Trainer.__init__).parameters) - {"self"}
    assert parameters - set(TRAINER_ARGUMENTS) == set()


def test_the_configuration_page_lists_the_fields_of_transformers_and_no_others():
    """Other releases of our range lack some of them, or have some that were dropped since."""
    page = (ROOT / "docs/config.md").read_text().split("## Inherited from TrainingArguments\n")[1].split("\n## ")[0]
    documented = {
        name for line in re.findall(r"^\* (`[^:\n]+`)", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    fields = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert fields - documented <= set(DROPPED_ARGUMENTS)
    pinned = re.search(r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if transformers.__version__ == pinned:
        assert documented == fields
    else:
        assert documented - fields <= LATER_ARGUMENTS


def test_every_refusal_gives_a_reason():
    for name, verdict in (TRAINING_ARGUMENTS | TRAINER_ARGUMENTS).items():
        assert bool(verdict.reason) == (verdict.mark != "honoured"), name


def test_every_own_field_has_help_and_a_type():
    assert len(OWN_FIELDS) > 25
    for own in OWN_FIELDS:
        assert len(own.metadata["help"]) > 20, own.name
        assert "%" not in own.metadata["help"], "argparse reads % as a format"


def test_defaults_are_the_documented_ones(make):
    config = make()
    expected = {
        "assistant_mask": "all",
        "max_length": None,
        "overlong": "error",
        "packing_strategy": "prefix_tree",
        "min_shared_tokens": 64,
        "share_supervised": False,
        "shuffle_unit": "conversation",
        "group_by_prefix": False,
        "fp8": None,
        "attention": "auto",
        "recompute": "auto",
        "on_nonfinite": "raise",
        "bf16": False,
        "dataloader_num_workers": 1,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", [n for n, v in TRAINING_ARGUMENTS.items() if v.mark == "refused"])
def test_a_refused_argument_raises_its_name_and_reason(make, name):
    fields = {f.name: f for f in dataclasses.fields(TrainingArguments)}
    if name not in fields:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    value = SETTING.get(name, 0.5 if isinstance(fields[name].default, float) else True)
    with pytest.raises(ConfigError, match=f"^{name}=.*{TRAINING_ARGUMENTS[name].reason[:20]}"):
        make(**{name: value})


@pytest.mark.parametrize("name", sorted(TRL_NAMES))
def test_a_name_that_only_trl_has_raises_with_our_name(make, name):
    with pytest.raises(ConfigError, match=f"^{name} is a TRL argument"):
        make(**{name: None})


def test_trl_fields_are_ours_or_explained():
    sft_config = pytest.importorskip("trl", reason="trl is not installed").SFTConfig
    names = {f.name for f in dataclasses.fields(sft_config)}
    ours = {f.name for f in dataclasses.fields(MegaPackConfig)}
    assert names - ours - set(TRL_NAMES) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is not allowed; it must be a whole number of at least 1"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0"),
        ({"context_parallel_size": 0}, "context_parallel_size=0"),
        ({"virtual_pipeline_parallel_size": 2}, "virtual_pipeline_parallel_size=2 .*pipeline_parallel_size=1"),
        ({"expert_parallel_size": 0}, "expert_parallel_size=0 is not allowed; it must be a whole number of at least 1"),
        ({"moe_token_dispatcher_type": "flex"}, "='flex' is not allowed; it must be one of 'alltoall', 'allgather'"),
        ({"moe_token_dispatcher_type": "allgather"}, "dispatcher_type='allgather' .*expert_parallel_size=1"),
        (
            {"moe_token_dispatcher_type": "allgather", "expert_parallel_size": 2, "moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap=True with moe_token_dispatcher_type='allgather': only 'alltoall'",
        ),
        ({"sequence_parallel": True}, "sequence_parallel=True .*tensor_parallel_size=1"),
        ({"fp8": "blockwise"}, "fp8='blockwise' replaces matrix products in bf16"),
        ({"group_by_prefix": True, "packing_strategy": "ffd"}, "group_by_prefix=True .*packing_strategy='ffd'"),
        ({"group_by_prefix": True, "train_sampling_strategy": "sequential"}, "group_by_prefix=True .*'sequential'"),
        ({"attention": "thd"}, "attention='thd' .*packing_strategy='prefix_tree'.* Use packing_strategy='ffd'"),
        ({"attention": "flash"}, "attention='flash' is not allowed; it must be one of 'auto', 'tree', 'thd'"),
        ({"packing_strategy": "bfd"}, "packing_strategy='bfd' is not allowed; it must be one of 'prefix_tree'"),
        ({"overlong": "drop_it"}, "overlong='drop_it'"),
        (
            {"packed_sequence_length": 1},
            "packed_sequence_length=1 is not allowed; it must be a whole number of at least 2",
        ),
        ({"min_shared_tokens": 0}, "min_shared_tokens=0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        (
            {"per_device_train_batch_size": 2.5},
            "per_device_train_batch_size=2.5 is not allowed; it must be a whole number",
        ),
        ({"learning_rate": -1e-4}, "learning_rate=-0.0001 is not allowed; it must be a finite number of at least 0"),
        ({"learning_rate": "1e-4"}, "learning_rate='1e-4' is not allowed; it must be a finite number"),
        ({"learning_rate": math.nan}, "learning_rate=nan is not allowed"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is not allowed"),
        ({"max_length": 100, "packed_sequence_length": 99}, "max_length=100 exceeds packed_sequence_length=99"),
        ({"share_supervised": "false"}, "share_supervised='false' is not allowed; it must be True or False"),
        ({"bf16": "false"}, "bf16='false' is not allowed; it must be True or False"),
        ({"max_length": "512"}, "max_length='512' is not allowed; it must be a whole number of at least 2"),
        ({"packed_sequence_length": 512.5}, "packed_sequence_length=512.5 is not allowed; it must be a whole number"),
        (
            {"optim_args": "lr=3"},
            "optim_args='lr=3' has lr, which would be ignored: of 'adamw_torch.*' it sets nothing",
        ),
        ({"optim": "sgd", "optim_args": "momentum=0.9, lr=3"}, "has lr, which .*'sgd' it may set momentum, dampening"),
        ({"optim": "rmsprop", "optim_args": "weight_decay=1"}, "has weight_decay, .* fields of their own"),
        (
            {"max_grad_norm": None},
            "max_grad_norm=None is not allowed; it must be a finite number of at least 0; 0 leaves",
        ),
        ({"optim": "sgd", "adam_beta2": 0.95}, "adam_beta2=0.95 is not read by optim='sgd'"),
        ({"optim": "adam"}, "optim='adam' .*Allowed: adamw_torch"),
        ({"optim": "adafactor"}, "optim='adafactor' .*Allowed: adamw_torch"),
        ({"max_steps": 0}, "max_steps=0 trains nothing"),
        ({"num_train_epochs": 0}, "num_train_epochs=0 trains nothing"),
        ({"num_train_epochs": -1}, "num_train_epochs=-1 trains nothing"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best' .*nothing would be saved"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps=3 would be ignored.*constant_with_warmup"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 0.1}, "warmup_steps=0.1 would be ignored"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 3, "eval_strategy": "epoch"},
            "lr_scheduler_type='reduce_lr_on_plateau' has no warmup",
        ),
        ({"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"x": 1}}, "kwargs=.* would be ignored"),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-5}}, "does not suit lr_scheduler_type='linear': .*'min_lr'"),
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "kwargs=None does not suit .*'cosine_with_min_lr': .*min_lr_rate",
        ),
        (
            {"lr_scheduler_type": "polynomial", "learning_rate": 1e-4, "lr_scheduler_kwargs": {"lr_end": 1e-3}},
            "does not suit lr_scheduler_type='polynomial'",
        ),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        ({"recompute": "off", "gradient_checkpointing": True}, "gradient_checkpointing=True means recompute='full'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize("name", [schedule.value for schedule in SchedulerType])
def test_every_schedule_of_transformers_can_be_chosen(make, name):
    needed = {"cosine_with_min_lr": {"min_lr": 1e-6}, "warmup_stable_decay": {"num_decay_steps": 2}}
    needed["cosine_warmup_with_min_lr"] = {"min_lr": 1e-6}
    has_warmup = name not in ("constant", "greedy", "reduce_lr_on_plateau")
    config = make(
        lr_scheduler_type=name, lr_scheduler_kwargs=needed.get(name), warmup_steps=5 if has_warmup else 0,
        eval_strategy="epoch",
    )  # fmt: skip
    assert config.lr_scheduler_type == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: setattr(config, "label_smoothing_factor", 0.1), "label_smoothing_factor=0.1 is not supported"),
        (lambda config: setattr(config, "packing", True), "packing is a TRL argument"),
        (lambda config: setattr(config, "overlong", "cut"), "overlong='cut' is not allowed"),
        (lambda config: setattr(config, "optim", "adafactor"), "optim='adafactor' is not supported"),
        (lambda config: config.set_optimizer("adafactor"), "optim='adafactor' is not supported"),
        (lambda config: config.set_push_to_hub("me/mine"), "push_to_hub=True is not supported"),
        (lambda config: config.set_lr_scheduler("constant", warmup_steps=3), "warmup_steps=3 would be ignored"),
    ],
)
def test_what_is_set_later_is_checked_too(make, change, message):
    config = make()
    checks.check_args(config)
    change(config)
    with pytest.raises(ConfigError, match=message):
        checks.check_args(config)


def test_full_recompute_may_be_asked_for_later(make):
    config = make()
    config.gradient_checkpointing = True
    checks.check_args(config)
    assert (config.recompute, bool(config.gradient_checkpointing)) == ("full", False)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_both_names_of_full_recompute_mean_it_and_reach_no_transformers_hook(make, name):
    if name not in TrainingArguments.__dataclass_fields__:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = make(**{name: True})
    assert config.recompute == "full"
    assert not getattr(config, name)


def test_a_deepspeed_launch_is_refused(make, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_DEEPSPEED"):
        make()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "true"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
    ],
)
def test_what_accelerate_is_configured_for_and_would_not_get_is_refused(make, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        make()


def test_the_precision_of_accelerates_configuration_is_taken_or_contradicts(make, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert make(bf16=True).bf16 is True
    assert make().bf16 is False
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert make().bf16 is True
    with pytest.raises(ConfigError, match=r"mixed_precision='bf16' .*bf16=False"):
        make(bf16=False)


def test_arguments_that_may_differ_between_processes_are_arguments():
    known = {f.name for f in dataclasses.fields(MegaPackConfig)} | LATER_ARGUMENTS | set(DROPPED_ARGUMENTS)
    assert known >= PER_PROCESS


def test_a_copy_keeps_every_choice(make):
    config = make(assistant_mask="each", gradient_checkpointing=True, optim="sgd", report_to="none")
    for copy in (dataclasses.replace(config), pickle.loads(pickle.dumps(config))):
        assert (copy.assistant_mask, copy.recompute, copy.optim.value) == ("each", "full", "sgd")


def test_the_command_line_reads_own_fields(tmp_path):
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--assistant_mask", "last", "--packed_sequence_length", "512"]
    (config,) = HfArgumentParser(MegaPackConfig).parse_args_into_dataclasses(line)
    assert (config.assistant_mask, config.packed_sequence_length, config.bf16) == ("last", 512, False)


def test_one_process_uses_one_of_several_gpus_and_says_so(make, caplog):
    args = make()
    args._n_gpu = 3
    checks.check_args(args)
    assert args.n_gpu == 1
    assert "3 GPUs are visible" in caplog.text


def test_compiled_layers_are_ours_alone(make):
    """Transformers tells accelerate through the environment, for every later trainer of the process."""
    config = make(torch_compile=True)
    assert config.torch_compile
    assert config.torch_compile_backend is None
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ
    with pytest.raises(ConfigError, match="torch_compile_mode='max-autotune' is not supported"):
        make(torch_compile=True, torch_compile_mode="max-autotune")
    with pytest.raises(ConfigError, match=r"torch_compile=True .*recompute='selective'"):
        make(torch_compile=True, recompute="selective")


def test_names_of_trl_and_of_earlier_releases_are_told_together(make):
    with pytest.raises(ConfigError, match=r"(?s)^packing is .*\nevaluation_strategy is .*: use eval_strategy\.$"):
        make(packing=True, evaluation_strategy="steps")


def test_a_mistyped_argument_is_answered_with_what_looks_like_it(make):
    with pytest.raises(TypeError, match=r"MegaPackConfig has no argument 'learning_rat'; did you mean learning_rate"):
        make(learning_rat=1e-4)
    with pytest.raises(TypeError, match=r"no argument 'zzz'; docs/config.md lists"):
        make(zzz=1)


def test_a_subclass_takes_arguments_of_its_own():
    class Own(MegaPackConfig):
        def __init__(self, mine: int, **others):
            super().__init__(**others)
            self.mine = mine

    assert Own(mine=3, output_dir="x", use_cpu=True).mine == 3
