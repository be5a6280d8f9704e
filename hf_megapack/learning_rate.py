"""What is checked about the learning-rate schedule when a config is built: that none of its options is ignored.

transformers builds the schedule when training begins, and leaves out what a schedule does not read without a word.
"""

import warnings
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from hf_megapack.errors import ConfigError

_WITHOUT_WARMUP = {
    "constant": "Use 'constant_with_warmup', or leave warmup_steps out",
    "reduce_lr_on_plateau": "Leave warmup_steps out",
    "greedy": "Leave warmup_steps out, or give it a warmup of its own in lr_scheduler_kwargs",
}
_WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
_ANY_NUMBER = 10


def check_schedule(args: TrainingArguments) -> None:
    """Check that the schedule reads what it is given.

    Args:
        args: Its lr_scheduler_type, lr_scheduler_kwargs and warmup_steps are checked.

    Raises:
        ConfigError: If warmup or options would be ignored, or the options are not those of the schedule.

    Source:
        `transformers.optimization.get_scheduler`, 5.24.
    """
    name, options = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type), args.lr_scheduler_kwargs
    if name in _WITHOUT_WARMUP and args.get_warmup_steps(_ANY_NUMBER):
        raise ConfigError(
            f"warmup_steps={args.warmup_steps!r} would be ignored: lr_scheduler_type={name!r} has no warmup. "
            f"{_WITHOUT_WARMUP[name]}."
        )
    if name in _WITHOUT_OPTIONS and options:
        raise ConfigError(
            f"lr_scheduler_kwargs={options!r} would be ignored: lr_scheduler_type={name!r} has no options. Leave "
            "lr_scheduler_kwargs out, or choose another lr_scheduler_type."
        )
    try:
        _try(name, args.learning_rate, options)
    except Exception as error:  # a schedule may raise anything
        raise ConfigError(
            f"lr_scheduler_kwargs={options!r} does not suit lr_scheduler_type={name!r}: {error}"
        ) from error


def _try(name: str, learning_rate: float, options: dict[str, Any] | None) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come when training begins
        get_scheduler(
            name,
            optimizer=optimizer,
            num_warmup_steps=0,
            num_training_steps=_ANY_NUMBER,
            scheduler_specific_kwargs=options,
        )
