"""What MegaPackTrainer checks about its arguments before any data is read or any weight is loaded."""

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_megapack.arguments import TRAINER_ARGUMENTS, UNCALLED_METHODS
from hf_megapack.config import MegaPackConfig, refuse_trl_names
from hf_megapack.data.chat import COLUMNS
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.data.stream import ExampleStream, UpdateStream
from hf_megapack.errors import ConfigError
from hf_megapack.guard import check_optimizer_class, check_scheduler
from hf_megapack.meter import EVALUATED
from hf_megapack.optimizer import check_optimizer_options

logger = logging.getLogger(__name__)


def refuse_arguments(**arguments: Any) -> None:
    """Refuse arguments of other trainers that were given a value.

    Args:
        **arguments: Name to what was given, None where nothing was.

    Raises:
        ConfigError: Naming the first, with the reason or with our name for it.
        TypeError: If no trainer has such an argument.
    """
    refuse_trl_names(arguments)
    for name, value in arguments.items():
        if name not in TRAINER_ARGUMENTS:
            raise TypeError(f"MegaPackTrainer got an unexpected argument {name!r}")
        if value is not None:
            reason = TRAINER_ARGUMENTS[name].reason
            raise ConfigError(f"{name} is not supported: {reason}. Leave {name} out.")


def check_overrides(trainer_class: type) -> None:
    """Check that a trainer overrides nothing that is never called.

    Args:
        trainer_class: The class of the trainer that is built.

    Raises:
        ConfigError: Naming the method and what to do instead.
    """
    for name, instead in UNCALLED_METHODS.items():
        if getattr(trainer_class, name, None) is not getattr(Trainer, name, None):
            raise ConfigError(
                f"{trainer_class.__name__} overrides {name}(), which is never called: {instead}. Take {name} out of "
                f"{trainer_class.__name__}."
            )


def check_evaluation(trainer_class: type, args: MegaPackConfig, eval_dataset: Any) -> None:
    """Check that a trainer that is to evaluate can, and that this gives its metric_for_best_model.

    Args:
        trainer_class: The class of the trainer that is built; one with its own `evaluate` may report any metric.
        args: What it was given.
        eval_dataset: As for MegaPackTrainer.

    Raises:
        ConfigError: Naming what asks for an evaluation of nothing, or the metrics that there will be.
    """
    # Rank 0's datasets count, and the others may be given none.
    has_none = eval_dataset is None or (isinstance(eval_dataset, dict) and not eval_dataset)
    if has_none and args.process_index == 0:
        wanted = {"eval_strategy": args.eval_strategy != "no", "eval_on_start": args.eval_on_start}
        if name := next((name for name in wanted if wanted[name]), None):
            value = getattr(args, name)
            raise ConfigError(
                f"{name}={getattr(value, 'value', value)!r} evaluates while training, but eval_dataset is "
                f"{eval_dataset!r}. Give a dataset as eval_dataset, or leave {name} out."
            )
    metric = args.metric_for_best_model
    if metric is None or trainer_class.evaluate is not Trainer.evaluate:
        return
    names = EVALUATED
    if isinstance(eval_dataset, dict):
        names = tuple(f"{dataset}_{name}" for dataset in eval_dataset for name in EVALUATED)
    if metric.removeprefix("eval_") not in names:
        raise ConfigError(
            f"metric_for_best_model={metric!r} is no metric of this run's evaluation, which reports "
            f"{', '.join(names)}, each also with eval_ before it. Set one of them, and greater_is_better."
        )


def check_args(args: MegaPackConfig) -> MegaPackConfig:
    """Check what only the running process knows: the arguments' class, the number of processes, the device.

    Args:
        args: What the trainer was given.

    Raises:
        ConfigError: If they are not a MegaPackConfig, or no longer one that could be built, the environment announces
            another number of processes, the CPU is asked for where there is a GPU, or FP8 where device or packages
            lack it.
    """
    if not isinstance(args, MegaPackConfig):
        raise ConfigError(f"args is a {type(args).__name__}; build a MegaPackConfig, which takes the same arguments.")
    args.check()
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced != args.world_size:
        raise ConfigError(
            f"WORLD_SIZE={announced} is in the environment, but this trainer runs in {args.world_size} processes, so "
            "each would train alone on all the data. Launch with torchrun, or with accelerate and a config whose "
            "distributed_type is MULTI_GPU (and use_cpu=True in MegaPackConfig without GPUs); or unset WORLD_SIZE."
        )
    if args.use_cpu and torch.cuda.is_available():
        raise ConfigError(
            "use_cpu=True, but a GPU is visible and Megatron-Core would take it. Set CUDA_VISIBLE_DEVICES= (empty) in "
            "the environment to train on the CPU, or leave use_cpu out."
        )
    if args.fp8 is not None:
        _check_fp8(args.fp8)
    if args.n_gpu > 1:
        # A notebook without a launcher uses one GPU: the HF Trainer would split batches over all that it sees.
        logger.warning(
            f"{args.n_gpu} GPUs are visible, and this one process uses the first. Start one process for each with "
            "torchrun, accelerate launch or accelerate's notebook_launcher to use them all."
        )
        args._n_gpu = 1
    return args


def _check_fp8(recipe: str) -> None:
    """Check that the device and the installed packages have the recipe."""
    if not torch.cuda.is_available():
        raise ConfigError(f"fp8={recipe!r} needs a GPU, and none is visible. Leave fp8 out.")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(f"fp8={recipe!r} needs Transformer Engine: pip install transformer-engine[pytorch].")
    major, minor = torch.cuda.get_device_capability()
    needed = 10 if recipe == "mxfp8" else 9
    if major < needed:
        raise ConfigError(
            f"fp8={recipe!r} needs a GPU of compute capability {needed}.0 or later; this one has {major}.{minor}. "
            "Use 'tensorwise', 'delayed' or 'blockwise' on Hopper, or leave fp8 out."
        )


def check_is_given(dataset: Any, name: str, user: str) -> None:
    """Check that a dataset was given when the trainer was built, which renders and checks it.

    Args:
        dataset: The dataset, None if it was not.
        name: The argument that gives it.
        user: The call that needs it.

    Raises:
        ConfigError: If it was not, or if it was set later and not rendered.
    """
    if dataset is None:
        raise ConfigError(f"{user} needs {name}: this trainer was built without one. Give it one as {name}.")
    is_prepared = isinstance(dataset, Dataset) and set(dataset.column_names) == set(COLUMNS)
    if not is_prepared and not isinstance(dataset, range | ExampleStream):
        raise ConfigError(
            f"trainer.{name} is a {type(dataset).__name__} that was set after the trainer was built, so its rows were "
            f"not rendered. Give it to a new trainer as {name}; evaluate(dataset) takes any."
        )


def build_callbacks(callbacks: Any, args: MegaPackConfig) -> list[TrainerCallback] | None:
    """Build what the HF Trainer would build of callbacks, and find what would end training when it begins.

    Args:
        callbacks: As for MegaPackTrainer.
        args: What it was given.

    Returns:
        The callbacks, those that were given as classes built; None for None.

    Raises:
        ConfigError: If there is anything but callbacks, or one stops by a metric that nothing gives.
    """
    if callbacks is None:
        return None
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks is a {type(callbacks).__name__}. Give a list, of one callback too.")
    built = [callback() if isinstance(callback, type) else callback for callback in callbacks]
    for callback in built:
        if not isinstance(callback, TrainerCallback):
            raise ConfigError(
                f"callbacks holds a {type(callback).__name__}: {callback!r}. Give classes derived from transformers' "
                "TrainerCallback, or what is built of them."
            )
        if isinstance(callback, EarlyStoppingCallback) and (
            args.eval_strategy == "no" or args.metric_for_best_model is None
        ):
            raise ConfigError(
                f"callbacks holds a {type(callback).__name__}, which stops by evaluations, but "
                f"eval_strategy={getattr(args.eval_strategy, 'value', args.eval_strategy)!r} and "
                f"metric_for_best_model={args.metric_for_best_model!r}. Set both, to 'steps' and 'loss' for example; "
                "or leave it out."
            )
    return built


def check_loader(loader: Any, method: str) -> None:
    """Check that a loader yields packed updates.

    Args:
        loader: What a method that a subclass may override returned.
        method: Name of that method.

    Raises:
        ConfigError: If MegaPackTrainer's own method did not make it.
    """
    draws = isinstance(loader, DataLoader) and (loader.batch_sampler or loader.dataset)
    if not isinstance(draws, UpdateSampler | UpdateStream):
        raise ConfigError(
            f"{method}() returned a {type(loader).__name__} of its own, which does not yield packed updates. Return "
            f"what super().{method}() returns; train_sampling_strategy, shuffle_unit and group_by_prefix set the order "
            "of the data, and data_collator how it is packed."
        )


def check_collator_and_optimizer(
    data_collator: Any,
    optimizers: tuple,
    optimizer_cls_and_kwargs: tuple[type, dict] | None,
    weight_decay: float,
) -> None:
    """Check three arguments that take None for the usual choice.

    Args:
        data_collator: As for MegaPackTrainer.
        optimizers: As for MegaPackTrainer; what its optimizer holds is checked when there are factors to compare.
        optimizer_cls_and_kwargs: As for MegaPackTrainer.
        weight_decay: What the config says.

    Raises:
        ConfigError: If batches would not be packed, the optimizer is not elementwise, cannot be built or is given
            twice, or the schedule is another optimizer's.
    """
    if data_collator is not None and not isinstance(data_collator, PrefixTreeCollator):
        raise ConfigError(f"data_collator is a {type(data_collator).__name__}; it must be a PrefixTreeCollator.")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise ConfigError(
            f"optimizers={optimizers!r} is no pair of an optimizer and its schedule. Put None in the place of what "
            "is to be built, or leave optimizers out."
        )
    optimizer, scheduler = optimizers
    if optimizer_cls_and_kwargs is not None:
        if not isinstance(optimizer_cls_and_kwargs, tuple | list) or len(optimizer_cls_and_kwargs) != 2:
            raise ConfigError(
                f"optimizer_cls_and_kwargs={optimizer_cls_and_kwargs!r} is no pair of a class and its keyword "
                "arguments. Write for example (torch.optim.AdamW, {'lr': 1e-4})."
            )
        optimizer_class, options = optimizer_cls_and_kwargs
        check_optimizer_class(optimizer_class)
        check_optimizer_options(optimizer_class, options, weight_decay=weight_decay)
        if optimizer is not None:
            raise ConfigError("optimizers holds an optimizer, and optimizer_cls_and_kwargs is another. Give only one.")
    check_scheduler(scheduler, optimizer)


def find_eval_dataset(datasets: Any, name: str) -> Any:
    """Return one of several evaluation sets.

    Args:
        datasets: The trainer's eval_dataset.
        name: The one asked for.

    Raises:
        ConfigError: If there is none of that name.
    """
    if not isinstance(datasets, dict) or name not in datasets:
        names = f"has {', '.join(map(repr, datasets))}" if isinstance(datasets, dict) else "is not a dict of several"
        raise ConfigError(f"There is no evaluation set {name!r}: eval_dataset {names}.")
    return datasets[name]


def refused_method(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises ConfigError, for one that the HF Trainer has and packed training does not."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name}() is not supported: {instead}.")

    refuse.__name__ = name
    refuse.__doc__ = f"Not supported: {instead}."
    return refuse
