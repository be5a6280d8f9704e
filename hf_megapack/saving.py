"""What a run saves: its adapter, the parts of a checkpoint that only training needs, and all of it in one piece."""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState

from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError, ExportError
from hf_megapack.ranks import all_agree, from_rank_zero, is_alone, on_rank_zero
from hf_megapack.weights.checkpoint import (
    make_staging,
    publish_directory,
    read_optimizer_state,
    save_optimizer_state,
    sweep_staging,
    sync_file,
    sync_tree,
)
from hf_megapack.weights.export import check_per_expert, export_peft_adapter

_SCHEDULER_FILE, _OPTIMIZER_FILE = "scheduler.pt", "optimizer.safetensors"
_SCHEDULE_KEY = "hf_megapack_schedule"


def check_export(args: MegaPackConfig, peft_config: LoraConfig, backend: Any) -> None:
    """Check before training that the adapter can be saved as asked.

    Args:
        args: Its `export_format` is checked.
        peft_config: The adapter to train.
        backend: Has the model's `linear_names` and `hf_config`.

    Raises:
        ConfigError: If it cannot.
    """
    if args.export_format == "per_expert":
        try:
            check_per_expert(peft_config, backend.linear_names, _model_type(backend))
        except ExportError as error:
            raise ConfigError(str(error)) from error


def share_output_folder(args: MegaPackConfig) -> str:
    """Create the folder of a run, as the HF Trainer does, but before anything is loaded. Every rank calls it.

    Args:
        args: Its `output_dir` is created on rank 0.

    Returns:
        Rank 0's `output_dir`, on every rank: a folder's name may hold the time, which differs between processes.

    Raises:
        ExportError: If it cannot be created, or holds a model.
    """

    def make() -> str:
        _make_folder(Path(args.output_dir))
        _refuse_model_folder(Path(args.output_dir))
        return str(args.output_dir)

    return from_rank_zero(make, encode=str.encode, decode=bytes.decode, device=args.device)


def prepare_output_folder(args: MegaPackConfig) -> None:
    """Remove what interrupted writers left in the folder of a run, and check that it can be used. Every rank calls it.

    Args:
        args: Its `output_dir` is looked at. What is written to try it is removed.

    Raises:
        ConfigError: If a rank will have to read the best checkpoint and does not see the folder.
        ExportError: If nothing can be written there.
    """
    folder = Path(args.output_dir)
    on_rank_zero(lambda: _try_folder(folder), args.device)
    if not args.load_best_model_at_end or is_alone():
        return
    # A new name, which no file system can remember not to have.
    probe = from_rank_zero(
        lambda: make_staging(folder, "probe").name, encode=str.encode, decode=bytes.decode, device=args.device
    )
    is_seen = all_agree((folder / probe).is_dir(), args.device)
    on_rank_zero(lambda: shutil.rmtree(folder / probe), args.device)
    if not is_seen:
        raise ConfigError(
            f"load_best_model_at_end=True lets every process read the best checkpoint, but not all of them see "
            f"output_dir={args.output_dir!r}. Choose one on storage that the nodes share, or leave "
            "load_best_model_at_end out."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(
            f"output_dir={str(folder)!r} cannot be created: {error}. Choose another output_dir."
        ) from error


def _refuse_model_folder(folder: Path) -> None:
    """Raise if an adapter in a folder would hide the model there, which loaders would then take for an adapter."""
    if (folder / "config.json").exists() and not (folder / "adapter_config.json").exists():
        weights = sorted(path.name for path in folder.glob("model*.safetensors"))
        if weights:
            raise ExportError(
                f"{folder} holds a model (config.json, {weights[0]}): an adapter beside it would make loaders take the "
                "folder for an adapter, and replace its tokenizer. Choose another folder."
            )


def _try_folder(folder: Path) -> None:
    _make_folder(folder)
    try:
        sweep_staging(folder)
        probe = make_staging(folder, "probe")
        try:
            (probe / "file").write_bytes(b"written")
            sync_tree(probe)
        finally:
            shutil.rmtree(probe)
    except OSError as error:
        raise ExportError(
            f"output_dir={str(folder)!r} cannot be written: {error}. Nothing was trained. Choose another output_dir, "
            "or make room or permissions there."
        ) from error


def write_tokenizer(folder: Path, processing_class: Any) -> None:
    """Write a tokenizer's files, or leave those that were there.

    Args:
        folder: Where to, beside an adapter.
        processing_class: The tokenizer; nothing is written for None.

    Raises:
        ExportError: If they cannot be written.
    """
    if processing_class is None:
        return
    try:
        staging = make_staging(folder, "tokenizer")
        try:
            processing_class.save_pretrained(staging)
            sync_tree(staging)
            for file in sorted(path for path in staging.rglob("*") if path.is_file()):
                target = folder / file.relative_to(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
            sync_file(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except Exception as error:  # tokenizers raises it bare when the disk is full
        raise ExportError(f"Cannot write the tokenizer to {folder}: {error}.") from error


def write_adapter(
    folder: Path, state: dict[str, torch.Tensor], args: MegaPackConfig, peft_config: LoraConfig, backend: Any
) -> None:
    """Write the adapter of a run.

    Args:
        folder: Where to.
        state: PEFT key to full tensor.
        args: Its `export_format` decides how.
        peft_config: The adapter that was trained.
        backend: Has the names of the base model and of its modules.

    Raises:
        ExportError: If it cannot be written, or the folder holds a model.
    """
    _refuse_model_folder(folder)
    export_peft_adapter(
        state,
        peft_config,
        folder,
        base_model_name=backend.base_model_name,
        linear_names=backend.linear_names,
        export_format=args.export_format,
        model_type=_model_type(backend),
    )


def _model_type(backend: Any) -> str | None:
    return getattr(backend.hf_config, "model_type", None)


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Fill a directory that appears complete under its name, in the place of an older one if there is one.

    The older one stays until the new one is on disk; between two renames, for an instant, there is neither.

    Args:
        path: The final directory.

    Yields:
        A folder to write into.

    Raises:
        ExportError: If nothing can be written there.
    """
    if not path.exists():
        with publish_directory(path) as staging:
            yield staging
        return
    # Names that sweep_staging removes, should this process die on the way.
    new, old = (path.with_name(f".{path.name}.staging-{secrets.token_hex(8)}") for _ in range(2))
    with publish_directory(new) as staging:
        yield staging
    os.rename(path, old)
    os.rename(new, path)
    sync_file(path.parent)
    shutil.rmtree(old)


def write_trainer_state(folder: Path, state: TrainerState, callbacks: Iterable[object]) -> None:
    """Write how far training is, with the state of the callbacks that have one.

    Args:
        folder: A staging folder.
        state: The trainer's state.
        callbacks: All callbacks, and the trainer's control.
    """
    exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
    state.save_to_json(str(folder / TRAINER_STATE_NAME))


def write_training_state(
    folder: Path, moments: dict[str, torch.Tensor], scheduler: LRScheduler, args: MegaPackConfig
) -> None:
    """Write what `read_training_state` reads.

    Args:
        folder: A staging folder.
        moments: Optimizer state as full tensors under PEFT keys.
        scheduler: The learning-rate schedule of that optimizer.
        args: Its lr_scheduler_kwargs are kept, of a schedule that has them in its state.
    """
    save_optimizer_state(moments, folder / _OPTIMIZER_FILE, optimizer_name=_optimizer_name(scheduler))
    state = scheduler.state_dict() | {_SCHEDULE_KEY: _describe_schedule(scheduler, args)}
    torch.save(state, folder / _SCHEDULER_FILE)


def read_training_state(folder: Path, scheduler: LRScheduler, args: MegaPackConfig) -> dict[str, torch.Tensor]:
    """Restore the schedule, with its learning rate for the next update, and return the optimizer's state.

    transformers' schedules that are functions of the number of updates give the rate of the new function, where
    transformers itself does one more update at the rate that the old one had reached.

    Args:
        folder: A checkpoint.
        scheduler: The schedule to restore, of the optimizer that goes on.
        args: As for `write_training_state`.

    Returns:
        Optimizer state as full tensors under PEFT keys.

    Raises:
        ConfigError: If the schedule is another one, and either is not a function of the number of updates alone.
        ExportError: If a file is missing or damaged, or holds another optimizer's state.
    """
    moments = read_optimizer_state(folder / _OPTIMIZER_FILE, optimizer_name=_optimizer_name(scheduler))
    try:
        state = torch.load(folder / _SCHEDULER_FILE, weights_only=True)
        now = _describe_schedule(scheduler, args)
        # The first checkpoints said nothing of their schedule; functions of the number of updates can be told.
        unmarked = "LambdaLR" if "lr_lambdas" in state else now
        if (saved := state.pop(_SCHEDULE_KEY, unmarked)) == now:
            scheduler.load_state_dict(state)
    except Exception as error:  # a damaged pickle raises anything
        raise ExportError(f"Cannot read the schedule {folder / _SCHEDULER_FILE}: {error!r}.") from error
    if saved != now:
        raise ConfigError(
            f"{folder} holds the state of the schedule {saved}, and {now} cannot go on from it. Take the "
            "lr_scheduler_type and lr_scheduler_kwargs that it was saved with, or the schedule of your own; or pass "
            "the checkpoint's folder as model, without peft_config, to begin a new run from its adapter."
        )
    if isinstance(scheduler, LambdaLR):
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
        scheduler.load_state_dict(scheduler.state_dict() | {"_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    return moments


def _describe_schedule(scheduler: LRScheduler, args: MegaPackConfig) -> str:
    """Say what the state of a schedule depends on: of a function of the number of updates, that number alone."""
    if isinstance(scheduler, LambdaLR):
        return "LambdaLR"
    options = "".join(f", {name}={value!r}" for name, value in sorted((args.lr_scheduler_kwargs or {}).items()))
    return type(scheduler).__name__ + options


def _optimizer_name(scheduler: LRScheduler) -> str:
    optimizer = scheduler.optimizer
    return type(getattr(optimizer, "optimizer", optimizer)).__name__
