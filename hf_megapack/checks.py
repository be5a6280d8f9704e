"""What MegaPackTrainer checks about its arguments before any data is read or any weight is loaded."""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, Trainer

from hf_megapack.arguments import TRAINER_ARGUMENTS, UNCALLED_METHODS
from hf_megapack.config import MegaPackConfig, refuse_trl_names
from hf_megapack.data.chat import COLUMNS
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.lengths import ExampleLimit, longest_example
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.data.stream import ExampleStream, UpdateStream
from hf_megapack.errors import ConfigError
from hf_megapack.guard import check_optimizer_class, check_scheduler
from hf_megapack.meter import EVALUATED
from hf_megapack.optimizer import check_optimizer_options
from hf_megapack.weights.adapter import check_lora_config, lora_spec
from hf_megapack.weights.export import read_peft_adapter

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
    *,
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


def resolve_adapter(
    model: str | os.PathLike | PretrainedConfig, peft_config: LoraConfig | None
) -> tuple[str | PretrainedConfig, LoraConfig, dict[str, torch.Tensor] | None]:
    """Find out what to train.

    Args:
        model: As for MegaPackTrainer.
        peft_config: As for MegaPackTrainer.

    Returns:
        The base model, the adapter's configuration, and the adapter to continue from when `model` is its folder.

    Raises:
        ConfigError: If either is missing, of the wrong kind, not supported, or given twice.
    """
    if isinstance(model, PretrainedConfig):
        folder = None
    elif isinstance(model, str | os.PathLike):
        model = os.fspath(model)
        folder = Path(model) if (Path(model) / "adapter_config.json").exists() else None
    else:
        raise ConfigError(
            f"model is a {type(model).__name__}; give a hub id, a local folder or a PretrainedConfig. Megatron-Core "
            "loads the weights itself, so the transformers model need not be built."
        )
    adapter = None
    if folder is not None:
        if peft_config is not None:
            raise ConfigError(f"{folder} is an adapter with a configuration of its own: leave peft_config out.")
        peft_config, adapter = read_peft_adapter(folder)
        model = peft_config.base_model_name_or_path
        if not model:
            raise ConfigError(f"{folder} does not name its base model: set base_model_name_or_path in its config.")
        _check_continued(folder, peft_config)
    if not isinstance(peft_config, LoraConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}; it must be a peft.LoraConfig, for example "
            'LoraConfig(r=16, lora_alpha=32, target_modules="all-linear").'
        )
    check_lora_config(peft_config)
    return model, peft_config, adapter


def _check_continued(folder: Path, peft_config: LoraConfig) -> None:
    """Check the configuration of an adapter to continue from, where a user can change it only in its file."""
    file, base_model = folder / "adapter_config.json", peft_config.base_model_name_or_path
    try:
        check_lora_config(peft_config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error} To train on from this adapter, change that file.") from error
    try:
        AutoConfig.from_pretrained(base_model)
    except OSError as error:
        raise ConfigError(
            f"{file} names the base model {base_model!r}, which cannot be loaded: {error} If it has moved, write its "
            "present place as base_model_name_or_path into that file."
        ) from error


def resolve_tokenizer(
    model: str | os.PathLike | PretrainedConfig, base_model: str | PretrainedConfig, processing_class: Any
) -> Any:
    """Return the tokenizer: the given one, else the one beside the adapter, else the base model's.

    Args:
        model: As for MegaPackTrainer.
        base_model: What `resolve_adapter` found to be the base model.
        processing_class: As for MegaPackTrainer.

    Raises:
        ConfigError: If there is none.
    """
    if processing_class is not None:
        return processing_class
    if isinstance(model, PretrainedConfig):
        raise ConfigError("A model built from a configuration has no tokenizer: give one as processing_class.")
    has_own = (Path(model) / "tokenizer_config.json").exists()
    return AutoTokenizer.from_pretrained(model if has_own else base_model)


def find_example_limit(model: str | PretrainedConfig, args: MegaPackConfig) -> ExampleLimit:
    """Return what an example may be, by the arguments and by the base model.

    Args:
        model: Hub id, local folder or configuration.
        args: The data options.
    """
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if limit is not None and rope.get("rope_type") in ("yarn", "linear"):
        # Configurations give the positions before or after they are stretched.
        limit = max(limit, int(rope["factor"] * rope.get("original_max_position_embeddings", limit)))
    longest = longest_example(args.max_length, args.packed_sequence_length, limit)
    return longest._replace(vocab_size=config.vocab_size)


def check_same_adapter(
    peft_config: LoraConfig, base_model: str | None, saved: LoraConfig, keys: Iterable[str], folder: str
) -> None:
    """Check that a saved adapter means the same under the current configuration.

    Args:
        peft_config: The current configuration.
        base_model: Name of the current base model, None for one without a checkpoint.
        saved: The adapter's own configuration.
        keys: PEFT keys of its tensors.
        folder: Where it was read.

    Raises:
        ConfigError: If it was trained on another base model, or rank or scaling of any module differ.
    """
    saved_base = saved.base_model_name_or_path
    if not _is_same_model(saved_base, base_model):
        here, there = base_model or "a configuration", saved_base or "a configuration"
        raise ConfigError(
            f"model is {here!r}, but {folder} was trained on {there!r}. Resume with that model; or, if both are the "
            f"same under two names, write the new one as base_model_name_or_path into {folder}/adapter_config.json; or "
            "pass the checkpoint's folder as model, without peft_config, to begin a new run from its adapter."
        )
    for module in sorted({key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys}):
        here, there = lora_spec(peft_config, module), lora_spec(saved, module)
        if here != there:
            raise ConfigError(
                f"peft_config gives {module} {here}, but {folder} was trained with {there}. Resume with the LoraConfig "
                "that training began with."
            )


def _is_same_model(one: str | None, other: str | None) -> bool:
    """Whether two names mean one model: a folder has many names."""
    if not one or not other:
        return not one and not other
    return one == other or (os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other))


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
