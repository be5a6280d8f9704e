"""What a resumed run must have in common with the one that saved the checkpoint.

A checkpoint's place in the data is a number of updates, and its schedule keeps the learning rate that it began with. So
each checkpoint says in a small file what its place and its rate depend on, and a run that differs there is refused:
examples would come twice or never, or an argument would be ignored. As many examples of other tokens are a warning: the
same rows may have been rendered anew. Everything else may change, the number of updates, what fills a row and the
parallel layout among it, and is honoured from then on. Which schedules may, saving.py says.
"""

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from hf_megapack.data.stream import ExampleStream
from hf_megapack.errors import ConfigError, ExportError
from hf_megapack.streaming import place_in_stream

logger = logging.getLogger(__name__)

RUN_FILE = "megapack_run.json"
_COMPARED_EXAMPLES = 256

_LABELS = {
    "examples_per_update": (
        "examples per update (per_device_train_batch_size x gradient_accumulation_steps x data-parallel size)"
    ),
    "num_train_examples": "number of examples in train_dataset",
    "data_seed": "data_seed (seed, where that is None)",
    "base_seed": "seed, which draws the weights of a base model without a checkpoint",
    "dropped_over": "max_length under overlong='drop'",
}


def describe_run(trainer: Any) -> dict[str, Any]:
    """Return what a run that goes on from here must have in common with this one.

    Args:
        trainer: A MegaPackTrainer with its optimizer.

    Returns:
        Plain values. Under "place" is what only the place in the data depends on, and on rank 0 under "examples" what
        tells examples from others; elsewhere they are not at hand.
    """
    args, dataset = trainer.args, trainer.train_dataset
    place = {
        "train_dataset": "a stream" if isinstance(dataset, ExampleStream) else "a dataset with a length",
        "examples_per_update": trainer.get_total_train_batch_size(args),
        "dataloader_drop_last": args.dataloader_drop_last,
    }
    if isinstance(dataset, ExampleStream):
        place["assistant_mask"] = args.assistant_mask
        if args.overlong != "error":  # which keeps every example there was
            place["dropped_over"] = trainer.example_limit.max_length if args.overlong == "drop" else None
    else:
        place["num_train_examples"] = len(dataset)
        place["train_sampling_strategy"] = args.train_sampling_strategy
        if args.train_sampling_strategy != "sequential":
            place["data_seed"] = args.seed if args.data_seed is None else args.data_seed
            place |= {"shuffle_unit": args.shuffle_unit, "group_by_prefix": args.group_by_prefix}
        if args.group_by_prefix:  # by what examples may share
            share_supervised = trainer.data_collator.share_supervised
            place |= {"assistant_mask": args.assistant_mask, "share_supervised": share_supervised}
    rates = [float(group.get("initial_lr", group["lr"])) for group in trainer.optimizer.param_groups]
    run = {"learning_rate": rates[0] if len(set(rates)) == 1 else rates, "place": place}
    if isinstance(dataset, Dataset):
        run["examples"] = _digest(dataset)
    return run if trainer.backend.base_model_name else {**run, "base_seed": args.seed}


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write what `check_run` reads.

    Args:
        folder: A staging folder.
        run: From `describe_run`.
    """
    (folder / RUN_FILE).write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")


def check_run(folder: Path, run: dict[str, Any], *, skips: bool) -> None:
    """Check that a run can go on from a checkpoint.

    Args:
        folder: The checkpoint.
        run: The current run, from `describe_run`.
        skips: Whether updates that were done are skipped; else the place in the data does not matter.

    Raises:
        ConfigError: Naming each argument that differs with both values, or if the checkpoint has no place in the data.
        ExportError: If the checkpoint does not say what it needs, or cannot be read.
    """
    saved = _read_run(folder)
    changed = _changes(saved, run)
    displaced = _changes(saved["place"], run["place"]) if skips else []
    if changed or displaced:
        advice = "Take the saved values"
        if displaced:
            subject = "they may" if not changed else "those of the place in the data may"
            advice += f"; or set ignore_data_skip=True, which begins its epoch anew, and {subject} differ"
        listed = "".join(f"\n  {change}" for change in (*changed, *displaced))
        raise ConfigError(
            f"{folder} cannot be resumed with other arguments than it was saved with:{listed}\n{advice}; or pass the "
            "checkpoint's folder as model, without peft_config, to begin a new run from its adapter."
        )
    if skips and "num_train_examples" in run["place"]:
        _check_place(folder, run["place"])
    if skips and saved.get("examples", run.get("examples")) != run.get("examples"):
        logger.warning(
            "train_dataset has as many examples as when %s was saved, but other tokens. The updates that were done are "
            "skipped by their number: if these are not the same rows in the same order, rendered anew, some will come "
            "twice and others never in this epoch.",
            folder,
        )


def find_place(trainer: Any, folder: Path, place: tuple[int, int], num_epochs: int) -> tuple[int, int]:
    """Return the epoch in which a resumed run goes on, and how many of its updates to skip.

    Args:
        trainer: A MegaPackTrainer that has read the checkpoint's state.
        folder: The checkpoint.
        place: What the HF Trainer makes of it, which is right for a dataset with a length and updates left to do.
        num_epochs: Epochs of the run; returned as the place when nothing is left, because the HF Trainer would do one
            more update of an epoch that is not over.

    Raises:
        ConfigError: If the checkpoint is farther than the run shall go, or was not written on such a dataset.
    """
    state = trainer.state
    if state.global_step > state.max_steps:
        raise ConfigError(
            f"{folder} was written after {state.global_step} updates, but max_steps or num_train_epochs asks for "
            f"{state.max_steps}. Raise it, or resume from an earlier checkpoint."
        )
    if state.global_step == state.max_steps:
        logger.warning("%s holds all %d updates: there is nothing left to train.", folder, state.max_steps)
        return num_epochs, 0
    if isinstance(trainer.train_dataset, ExampleStream):
        return place_in_stream(folder, skips=not trainer.args.ignore_data_skip)
    return place


def _digest(dataset: Dataset) -> str:
    """Return what tells a dataset's tokens from others, by examples at even distances."""
    digest = hashlib.blake2b(digest_size=16)
    for index in np.linspace(0, len(dataset) - 1, min(len(dataset), _COMPARED_EXAMPLES), dtype=np.int64).tolist():
        tokens = np.asarray(dataset[index]["input_ids"], dtype="<i8")
        digest.update(tokens.size.to_bytes(8, "little") + tokens.tobytes())
    return digest.hexdigest()


def _read_run(folder: Path) -> dict[str, Any]:
    file = folder / RUN_FILE
    if not file.exists():
        raise ExportError(
            f"{folder} has no {RUN_FILE}: it is what save_model() leaves, was saved with save_only_model=True or by "
            "another version, and cannot be resumed. To begin a new run from its adapter, pass that folder as model."
        )
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        return {**run, "place": dict(run["place"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"Cannot read {file}: {error!r}.") from error


def _changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each value that differs. What only one of both depends on follows from a value of both."""
    return [
        f"{_LABELS.get(name, name)}: saved {saved[name]!r}, now {value!r}"
        for name, value in now.items()
        if name not in ("place", "examples") and name in saved and saved[name] != value
    ]


def _check_place(folder: Path, place: dict[str, Any]) -> None:
    """Check that a dataset's epochs were each run from their beginning to their end, for updates to tell the place."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    count = math.floor if place["dataloader_drop_last"] else math.ceil
    updates_per_epoch = max(count(place["num_train_examples"] / place["examples_per_update"]), 1)
    if round((state.epoch or 0) * updates_per_epoch) != state.global_step:
        raise ConfigError(
            f"{folder} was written at epoch {state.epoch:g}, after {state.global_step} updates of which an epoch has "
            f"{updates_per_epoch}: an epoch was begun anew (ignore_data_skip=True) or broken off, so that updates do "
            "not tell the place in the data. Set ignore_data_skip=True to begin its epoch anew."
        )
