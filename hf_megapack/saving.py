"""The part of a checkpoint that only training needs: optimizer moments and learning-rate schedule."""

from pathlib import Path

import torch
from torch.optim.lr_scheduler import LRScheduler

from hf_megapack.errors import ExportError
from hf_megapack.weights.checkpoint import read_optimizer_state, write_optimizer_state

_SCHEDULER_FILE = "scheduler.pt"


def write_training_state(folder: Path, moments: dict[str, torch.Tensor], scheduler: LRScheduler):
    """Write what `read_training_state` reads.

    Args:
        folder: A staging folder.
        moments: Optimizer state as full tensors under PEFT keys.
        scheduler: The learning-rate schedule.
    """
    write_optimizer_state(moments, folder)
    torch.save(scheduler.state_dict(), folder / _SCHEDULER_FILE)


def read_training_state(folder: Path, scheduler: LRScheduler) -> dict[str, torch.Tensor]:
    """Restore the schedule and return the optimizer's state.

    Args:
        folder: A checkpoint.
        scheduler: The schedule to restore.

    Returns:
        Optimizer state as full tensors under PEFT keys.

    Raises:
        ExportError: If the checkpoint holds an adapter only.
    """
    file = folder / _SCHEDULER_FILE
    if not file.exists():
        raise ExportError(
            f"{folder} has no {_SCHEDULER_FILE}: it was saved with save_only_model=True and cannot be resumed. To "
            "start a new run from its adapter, pass that folder as model."
        )
    scheduler.load_state_dict(torch.load(file, weights_only=True))
    return read_optimizer_state(folder)
