"""What is checked about the optimizer when a config is built: that it can be built, and none of its options is ignored.

transformers builds the optimizer when training begins, and reads of optim_args what it knows without a word.
"""

import inspect
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_megapack.arguments import ELEMENTWISE_OPTIMIZERS
from hf_megapack.errors import ConfigError
from hf_megapack.guard import Recipe, keep_or_build_optimizer

_ADAM_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon")
_SWITCHES, _SWITCH_VALUES = ("nesterov", "centered"), ("true", "false", "1", "0", "yes", "no")


def check_optimizer_name(args: TrainingArguments) -> None:
    """Check that the optimizer is elementwise.

    Args:
        args: Its optim is checked.

    Raises:
        ConfigError: If not, naming those that are.
    """
    optim = getattr(args.optim, "value", args.optim)
    if optim not in ELEMENTWISE_OPTIMIZERS:
        raise ConfigError(
            f"optim={optim!r} is not supported: only optimizers that treat every element alike update shards of a "
            f"matrix correctly. Allowed: {', '.join(ELEMENTWISE_OPTIMIZERS)}."
        )


def check_optimizer(args: TrainingArguments) -> None:
    """Check that the optimizer reads what it is given, and can work with it.

    Args:
        args: Its optim_args, learning_rate, weight_decay and fields of Adam are checked; its optim has been.

    Raises:
        ConfigError: If not, naming the fields.

    Source:
        `transformers.trainer_optimizer`, 5.24, for what each optimizer reads.
    """
    optim = getattr(args.optim, "value", args.optim)
    known = ELEMENTWISE_OPTIMIZERS[optim]
    _check_optim_args(args.optim_args, optim, known)
    for name in _ADAM_FIELDS:
        value = getattr(args, name)
        if known and value != TrainingArguments.__dataclass_fields__[name].default:
            raise ConfigError(f"{name}={value!r} is not read by optim={optim!r}. Leave it out.")
    read = (
        ["learning_rate", "weight_decay", "optim_args"] if known else ["learning_rate", "weight_decay", *_ADAM_FIELDS]
    )
    given = f"optim={optim!r} with " + ", ".join(f"{name}={getattr(args, name)!r}" for name in read)
    try:
        optimizer = _build_on_trial(*Trainer.get_optimizer_cls_and_kwargs(args), args.weight_decay)
        is_usable = _stays_finite(optimizer)
    except Exception as error:  # torch raises several kinds
        raise ConfigError(f"{given} does not work: {error}. Change the value that this is about.") from error
    if not is_usable:
        raise ConfigError(
            f"{given} would make factors NaN or infinite within two updates, as where a gradient is 0: those of the "
            "factors A are at first. Change the value that is 0, or far too large."
        )


def check_optimizer_options(optimizer_class: type, options: dict[str, Any], *, weight_decay: float) -> None:
    """Check that an optimizer can be built from the options that a user gives it, and that none is ignored.

    Args:
        optimizer_class: Its class. One that is not torch's own may expect more of what it updates than a trial has, so
            of that one only the names of its options are checked.
        options: Its keyword arguments.
        weight_decay: What the config says.

    Raises:
        ConfigError: If not, with what the class says.
    """
    given = f"optimizer_cls_and_kwargs=({optimizer_class.__name__}, {options!r})"
    try:
        inspect.signature(optimizer_class).bind([], **options)
        is_usable = optimizer_class.__module__.partition(".")[0] != "torch" or _stays_finite(
            # torch refuses it on a CPU, where the trial is.
            _build_on_trial(optimizer_class, {**options, "capturable": False} if "capturable" in options else options)
        )
    except Exception as error:  # torch raises several kinds
        raise ConfigError(
            f"{given} does not work: {str(error).rstrip('.')}. Change these keyword arguments."
        ) from error
    if not is_usable:
        raise ConfigError(
            f"{given} would make factors NaN or infinite within two updates, as where a gradient is 0: those of the "
            "factors A are at first. Change the value that is 0, or far too large."
        )
    if options.get("weight_decay", weight_decay) != weight_decay:
        raise ConfigError(
            f"{given} would be ignored in weight_decay: all factors have that of MegaPackConfig, which is "
            f"{weight_decay!r}. Set weight_decay there."
        )


def _check_optim_args(optim_args: str | None, optim: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError on what is no name=value, on names that would not be read, and on switches that are none."""
    if not optim_args:
        return
    pairs = optim_args.replace(" ", "").split(",")
    values = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
    if any(pair.count("=") != 1 for pair in pairs) or len(values) < len(pairs):
        raise ConfigError(
            f"optim_args={optim_args!r} is not understood. Write name=value, more of them with commas between, and "
            "every name once."
        )
    if unread := sorted(values.keys() - {*known}):
        allowed = f"of {optim!r} it may set {', '.join(known)}" if known else f"of {optim!r} it sets nothing"
        raise ConfigError(
            f"optim_args={optim_args!r} has {', '.join(unread)}, which would be ignored: {allowed}. Weight "
            "decay, and the betas and epsilon of Adam, are fields of their own."
        )
    for name in _SWITCHES:
        if values.get(name, "false").lower() not in _SWITCH_VALUES:
            raise ConfigError(
                f"optim_args={optim_args!r} has {name}={values[name]}, which would count as false. Use true or false."
            )


def _build_on_trial(optimizer_class: type, options: dict[str, Any], weight_decay: float = 0.0) -> torch.optim.Optimizer:
    factor = torch.nn.Parameter(torch.zeros(1, 2))
    return keep_or_build_optimizer(None, Recipe(optimizer_class, dict(options), weight_decay), {"factor": factor})


def _stays_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two updates with gradients of 0 and 1 leave numbers."""
    (factor,) = optimizer.param_groups[0]["params"]
    for _ in range(2):
        factor.grad = torch.tensor([[0.0, 1.0]])
        optimizer.step()
    return bool(factor.isfinite().all())
