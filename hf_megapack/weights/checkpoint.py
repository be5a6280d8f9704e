"""Checkpoints on disk: a directory appears under its name complete and durable, or not at all.

Everything is written into a staging folder beside the final name, made durable with fsync and then renamed. One process
writes; what an interrupted one left behind has a recognisable name and is removed by `sweep_staging`. Which names
checkpoints have, how many are kept and which is the latest is the Trainer's matter.
"""

import os
import re
import secrets
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_megapack.errors import ExportError

_STAGING_NAME = re.compile(r"\..+\.staging-[0-9a-f]{16}")


@contextmanager
def publish_directory(path: str | os.PathLike[str]) -> Generator[Path]:
    """Fill a directory that appears under its name only once everything in it is safely on disk.

    Args:
        path: The final directory; its parents are created when missing.

    Yields:
        A new empty folder beside `path` to write into. When the block ends, its files and folders are synced and it is
        renamed to `path`; when the block raises, it is removed.

    Raises:
        ExportError: If `path` exists already, when entering or when publishing, or cannot be written.
    """
    path = Path(os.path.abspath(path))
    try:
        _refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = make_staging(path.parent, path.name)
    except OSError as error:
        raise ExportError(f"Cannot write beside {path}: {error}.") from error
    try:
        yield staging
        sync_tree(staging)
        _refuse_existing(path)
        os.rename(staging, path)
        sync_file(path.parent)
    except OSError as error:
        raise ExportError(f"Cannot publish {path}: {error}.") from error
    finally:
        # After the rename there is nothing left under this name.
        shutil.rmtree(staging, ignore_errors=True)


def sweep_staging(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove the staging folders that interrupted writers left in a directory.

    Call it when nothing is being written there, for instance once when training starts.

    Args:
        parent: The directory that holds checkpoints; it may be missing.

    Returns:
        The folders removed, sorted.
    """
    parent = Path(parent)
    if not parent.is_dir():
        return []
    found = sorted(entry for entry in parent.iterdir() if entry.is_dir() and _STAGING_NAME.fullmatch(entry.name))
    for folder in found:
        shutil.rmtree(folder)
    return found


def make_staging(parent: Path, name: str) -> Path:
    """Create an empty folder whose name `sweep_staging` recognises."""
    staging = parent / f".{name}.staging-{secrets.token_hex(8)}"
    staging.mkdir()
    return staging


def sync_file(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Apply `sync_file` to every regular file and folder under a folder, the folder itself last."""
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent) / name for name in names):
            if not path.is_symlink():
                sync_file(path)
        sync_file(Path(parent))


def save_optimizer_state(
    state: Mapping[str, torch.Tensor], path: str | os.PathLike[str], *, optimizer_name: str
) -> None:
    """Write optimizer tensors; equal tensors give equal files, but for the order of metadata in the header.

    Args:
        state: "<state name>/<PEFT key>" to full tensor, as in
            "exp_avg/base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight".
        path: File to write, inside a folder of `publish_directory`.
        optimizer_name: Class of the optimizer whose they are.

    Raises:
        ExportError: If a name has another form or the file cannot be written.
    """
    _check_optimizer_names(state, path)
    # safetensors refuses tensors that share storage, which views of one flat buffer do.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    try:
        save_file(tensors, path, metadata={"format": "pt", "optimizer": optimizer_name})
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot write the optimizer state {path}: {error}.") from error


def read_optimizer_state(path: str | os.PathLike[str], *, optimizer_name: str) -> dict[str, torch.Tensor]:
    """Read what `save_optimizer_state` wrote.

    Args:
        path: The file.
        optimizer_name: Class of the optimizer that is to go on with it.

    Returns:
        "<state name>/<PEFT key>" to tensor on the CPU, in the dtype that was saved.

    Raises:
        ExportError: If the file is missing, damaged or holds other names, or is another optimizer's.
    """
    if not Path(path).is_file():
        raise ExportError(f"There is no optimizer state at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            saved_name = file.metadata().get("optimizer")
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot read the optimizer state {path}: {error}.") from error
    if saved_name != optimizer_name:
        raise ExportError(
            f"The optimizer state {path} is that of {saved_name}, and this run's optimizer is {optimizer_name}. Resume "
            "with the same optimizer, or begin a new run from the checkpoint's adapter by passing its folder as model."
        )
    _check_optimizer_names(state, path)
    return state


def _check_optimizer_names(state: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    wrong = sorted(name for name in state if not re.fullmatch(r"[^/]+/base_model\.model\.[^/]+", name))
    if wrong:
        raise ExportError(f'Optimizer state {path}: {wrong[0]!r} is not "<state name>/<PEFT key>" ({len(wrong)} such).')


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ExportError(f"{path} exists already; a published directory is never changed.")
