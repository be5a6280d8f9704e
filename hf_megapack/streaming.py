"""Training on a stream: what cannot be asked for, the loader, and where a resumed run goes on.

A pass over the stream is an epoch of the HF Trainer, whose epochs of a stream have max_steps updates whatever their
real number: when the stream ends early the next pass begins.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from hf_megapack.batch import PackedBatch, to_buffer
from hf_megapack.config import MegaPackConfig
from hf_megapack.data.lengths import LengthTally
from hf_megapack.data.stream import ExampleStream, StreamedUpdate, UpdateStream
from hf_megapack.errors import ConfigError

logger = logging.getLogger(__name__)

# Field -> (value that asks for nothing, why a stream cannot give it).
_NEED_A_LENGTH = {
    "group_by_prefix": (False, "it sorts the whole dataset before training"),
    "shuffle_unit": ("conversation", "the stream gives the examples of a conversation one after the other"),
    "data_seed": (None, "the order is the stream's own; shuffle it with ds.shuffle(seed=..., buffer_size=...)"),
    "dataset_num_proc": (None, "a stream is rendered while it is read, by the loader's worker"),
}


def check_stream_options(args: MegaPackConfig) -> None:
    """Check that nothing is asked for that a training set without a length cannot give.

    Args:
        args: What the trainer was given.

    Raises:
        ConfigError: Naming the option.
    """
    if args.max_steps <= 0:
        raise ConfigError(
            "train_dataset is a stream, whose length is unknown, so num_train_epochs says nothing: set max_steps."
        )
    for name, (default, reason) in _NEED_A_LENGTH.items():
        value = getattr(args, name)
        if value != default:
            raise ConfigError(
                f"{name}={value!r} does not go with a stream as train_dataset: {reason}. Leave {name} out, or load the "
                "dataset with streaming=False."
            )
    if args.dataloader_num_workers > 1:
        logger.warning(
            "dataloader_num_workers=%d, but a stream has one order: one worker reads, renders and packs it.",
            args.dataloader_num_workers,
        )


def build_stream_loader(
    stream: ExampleStream,
    collator: Callable[[list], PackedBatch],
    args: MegaPackConfig,
    *,
    update_size: int,
    is_training: bool,
) -> DataLoader:
    """Return a plain DataLoader over passes of a stream; its dataset is the `UpdateStream`.

    Args:
        stream: What to read; on ranks other than 0 one without rows.
        collator: Examples to one packed update.
        args: The loader options.
        update_size: Examples of one update.
        is_training: Whether to leave out a smaller last update if the arguments say so.
    """
    workers = min(args.dataloader_num_workers, 1) if args.process_index == 0 else 0
    return DataLoader(
        UpdateStream(stream, examples_per_update=update_size, drop_last=is_training and args.dataloader_drop_last),
        batch_size=None,
        collate_fn=PackStreamed(collator),
        num_workers=workers,
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None) if workers else None,
        generator=torch.Generator(),
    )


@dataclass(frozen=True)
class PackStreamed:
    """Packs what was read for one update into one flat uint8 tensor.

    Attributes:
        collator: Packs examples into a PackedBatch.
    """

    collator: Callable[[list], PackedBatch]

    def __call__(self, update: StreamedUpdate) -> tuple[torch.Tensor | None, LengthTally]:
        """Return the update's buffer, uint8, one-dimensional, None at the end of a pass; and its lengths."""
        if not update.examples:
            return None, update.lengths
        return torch.from_numpy(to_buffer(self.collator(update.examples))), update.lengths


def place_in_stream(checkpoint: Path, *, skips: bool) -> tuple[int, int]:
    """Return the pass in which a resumed run goes on, and how many of its updates to skip.

    The HF Trainer's epoch of a stream is `pass + updates / max_steps`.

    Args:
        checkpoint: Its folder.
        skips: Whether updates that were done are skipped; else the pass begins anew.

    Raises:
        ConfigError: If the checkpoint was not written while training on a stream.

    Source:
        `transformers.Trainer._run_epoch` and `set_initial_training_values`, 5.24.
    """
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if not state.global_step:
        return 0, 0
    # A pass that was done to the last of max_steps updates counts as done, not as the next one begun.
    number = math.ceil(state.epoch) - 1
    updates = (state.epoch - number) * state.max_steps
    is_whole = abs(updates - round(updates)) < 1e-3
    is_possible = round(updates) == state.global_step if number == 0 else round(updates) <= state.global_step
    if not skips:
        return number, 0
    if not is_whole or not is_possible:
        raise ConfigError(
            f"{checkpoint} was written at epoch {state.epoch:g}, after {state.global_step} of {state.max_steps} "
            "updates, which is no place in a stream: its train_dataset had a length. Resume with such a one, or set "
            "ignore_data_skip=True to begin the stream anew."
        )
    return number, round(updates)
