"""What single fields of a config may be: types, bounds and choices; and that intervals and durations mean something.

transformers looks at few of its own fields, so that a wrong one would be noticed after weights are loaded, or never.
Here every value is judged by itself or beside the one field that gives it a meaning; config.py knows the rest. What is
right is kept as Python's own number, truth value or string.
"""

import dataclasses
import enum
import math
import numbers
import os
import types
import typing
from collections.abc import Hashable, Iterable
from typing import Any, Literal

import numpy as np
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

from hf_megapack.errors import ConfigError

_KINDS = {
    bool: ((numbers.Integral, np.bool_), "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a finite number"),
    str: ((str, os.PathLike), "a string"),
}
_AT_LEAST = {
    "max_length": 2,
    "dataset_num_proc": 1,
    "packed_sequence_length": 2,
    "min_shared_tokens": 1,
    "sequence_length_multiple": 1,
    "packed_length_multiple": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "per_device_eval_batch_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "virtual_pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "max_steps": -1,
    "seed": 0,
    "data_seed": 0,
    "save_total_limit": 1,
    "ddp_timeout": 1,
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), 0),
    **dict.fromkeys(("max_grad_norm", "warmup_steps", "warmup_ratio"), 0),
}
# numpy takes no larger seed; transformers takes a ratio of 1 or more for a number of updates.
_BELOW = {"adam_beta1": 1, "adam_beta2": 1, "seed": 2**32, "warmup_ratio": 1}
# torch takes no int for one of two.
_FLOATS = ("adam_beta1", "adam_beta2")
_WORDS_BESIDE_BOOL = {"include_num_input_tokens_seen": ("all", "non_padding", "no")}
# transformers lists these by other rules than those by which it takes them.
_NOT_LISTED = ("azure_ml", "comet_ml", "flyte", "all", "none")
_MEANINGS = {
    "max_steps": "-1 trains for num_train_epochs",
    "max_grad_norm": "0 leaves gradients as they are",
    "save_total_limit": "None keeps every checkpoint",
}


def check_values(args: Any, declaring: type, names: Iterable[str]) -> None:
    """Check fields one by one against their types and choices, and against the bounds of this module.

    A number of another library becomes Python's, and a path a string, as a checkpoint writes them.

    Args:
        args: The config.
        declaring: Class whose types and defaults count: a subclass may declare a field anew, which changes nothing
            about what reads it, and fields of its own, which may have any type.
        names: Fields to look at. One that takes several kinds of values is left to whoever reads it.

    Raises:
        ConfigError: Naming the first that is wrong, with what it may be.
    """
    # Not the types of the fields: HfArgumentParser rewrites them, and leaves None out.
    hints = typing.get_type_hints(declaring)
    for name in names:
        value, declared = getattr(args, name), declaring.__dataclass_fields__[name]
        if value is not declared.default and (allowed := _find_fault(declared, value, hints[name])):
            meaning = f"; {_MEANINGS[name]}" if name in _MEANINGS else ""
            raise ConfigError(f"{name}={value!r} is not allowed; it must be {allowed}{meaning}.")
        if (plain := _as_python(value, must_be_float=name in _FLOATS)) is not value:
            setattr(args, name, plain)


def _as_python(value: Any, *, must_be_float: bool) -> Any:
    """Return a number, truth value or path of any library as Python's own, and everything else as it is."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if must_be_float or (isinstance(value, numbers.Real) and not isinstance(value, int | float)):
        return int(value) if isinstance(value, numbers.Integral) and not must_be_float else float(value)
    return value


def _find_fault(declared: dataclasses.Field, value: Any, hint: Any) -> str:
    """Return what a field may be where a value is none of that, else an empty string."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    if value is None and type(None) in parts:
        return ""
    if words := _WORDS_BESIDE_BOOL.get(declared.name):
        is_one = isinstance(value, bool | np.bool_) or value in words
        return "" if is_one else f"True, False or one of {', '.join(map(repr, words))}"
    kind, *others = (part for part in parts if part is not type(None))
    if is_enum := isinstance(kind, type) and issubclass(kind, enum.Enum):
        choices = [member.value for member in kind]
    else:
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else declared.metadata.get("choices", ())
    if (others and not is_enum) or not (choices or kind in _KINDS):
        return ""
    if choices:
        is_one = isinstance(value, Hashable) and value in choices  # an array is equal to several
        return "" if is_one else f"one of {', '.join(map(repr, choices))}"
    cls, text = _KINDS[kind]
    if kind in (int, float):
        return "" if _is_within_bounds(declared.name, value, cls) else text + _describe_bounds(declared.name)
    # A string such as "false" would count as true.
    return "" if isinstance(value, cls) and (kind is str or value in (0, 1)) else text


def _is_within_bounds(name: str, value: Any, cls: type) -> bool:
    if not isinstance(value, cls) or isinstance(value, bool):
        return False
    # NaN is neither; an infinite norm is torch's word for looking at gradients and clipping none.
    is_below = value < _BELOW.get(name, math.inf) or (name == "max_grad_norm" and value == math.inf)
    return is_below and value >= _AT_LEAST.get(name, -math.inf)


def _describe_bounds(name: str) -> str:
    least = f" of at least {_AT_LEAST[name]}" if name in _AT_LEAST else ""
    return least + (f" and below {_BELOW[name]}" if name in _BELOW else "")


def check_intervals(args: TrainingArguments) -> None:
    """Check that what is to come every so many updates comes, and that no number of updates is cut to a whole one.

    Args:
        args: Its logging_steps, eval_steps, save_steps and warmup_steps are checked.

    Raises:
        ConfigError: If an interval is not above 0, or a number of updates is not whole.

    Source:
        `transformers.TrainerState.compute_steps` and `TrainingArguments.get_warmup_steps`, 5.24: below 1, they are
        fractions of all updates.
    """
    for kind in ("logging", "eval", "save"):
        steps = getattr(args, f"{kind}_steps")
        if getattr(args, f"{kind}_strategy") == "steps" and steps is not None and steps <= 0:
            raise ConfigError(
                f"{kind}_steps={steps!r} with {kind}_strategy='steps' never comes round. Set a number of updates, or "
                f"below 1 a fraction of all; or {kind}_strategy='no' or 'epoch'."
            )
    if args.warmup_steps > 1 and args.warmup_steps != int(args.warmup_steps):
        raise ConfigError(
            f"warmup_steps={args.warmup_steps!r} is not a whole number of updates. Set one, or below 1 a fraction of "
            "all updates."
        )


def check_duration(args: TrainingArguments) -> None:
    """Check that something is trained, and something of it saved, in a folder.

    Args:
        args: Its max_steps, num_train_epochs, save_strategy, eval_strategy and output_dir are checked.

    Raises:
        ConfigError: If nothing would be.
    """
    if args.max_steps == 0:
        raise ConfigError("max_steps=0 trains nothing. Set a number of updates, or leave it out for whole epochs.")
    if args.max_steps < 0 and args.num_train_epochs <= 0:
        raise ConfigError(
            f"num_train_epochs={args.num_train_epochs!r} trains nothing. Set a number above 0, or max_steps."
        )
    if not args.output_dir:
        raise ConfigError("output_dir='' is no folder. Name one, or '.' for this one.")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ConfigError(
            "save_strategy='best' saves when an evaluation was the best, but eval_strategy='no', so nothing would "
            "be saved. Set eval_strategy, or another save_strategy."
        )


def check_reports(args: TrainingArguments) -> None:
    """Check that transformers knows whom to report to, and that the package is there.

    Args:
        args: Its report_to is checked.

    Raises:
        ConfigError: If not, which the HF Trainer would notice when the weights are loaded.
    """
    names = args.report_to
    try:
        get_reporting_integration_callbacks(names)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"report_to={args.report_to!r} is not allowed: {error} Or 'none', or 'all' of them."
        ) from error
    usable = get_available_reporting_integrations() if names else []
    for name in names or ():
        if name not in (*usable, *_NOT_LISTED):
            raise ConfigError(
                f"report_to={name!r} needs a package that is not installed here, or is switched off in the "
                f"environment. Install it, or leave {name!r} out; usable here: {', '.join(usable) or 'none of them'}."
            )
