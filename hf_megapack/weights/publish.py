"""Put the two files of an adapter into a directory so that readers find the old adapter or the new one, complete.

Never one's weights under the other's config. The names of the two files are peft's.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file

from hf_megapack.errors import ExportError
from hf_megapack.weights.checkpoint import make_staging, sweep_staging, sync_file, sync_tree

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

# Holds a complete synced adapter while its two files move into place; a reader may find either file still in here.
_PUBLISHING_NAME = ".adapter.publishing"


def publish_adapter(
    directory: Path, tensors: dict[str, torch.Tensor], config: LoraConfig, metadata: Mapping[str, str]
) -> None:
    """Write an adapter, in the place of an older one if there is one.

    Args:
        directory: Where to write; created when missing.
        tensors: What the weights file holds.
        config: What the config file says.
        metadata: Further entries of the weights file's header.

    Raises:
        ExportError: If the files cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _settle_interrupted(directory)
        _stage(directory, tensors, config, metadata)
        try:
            _publish(directory)
        except BaseException:
            # The new adapter is complete on disk and the old one may be gone already, so the way out is forward.
            _publish(directory)
            raise
    except (OSError, SafetensorError) as error:
        raise ExportError(f"Cannot write the adapter to {directory}: {error}.") from error


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Return config and weights, one or both still staged if an export is under way or was interrupted.

    Args:
        directory: The adapter.

    Raises:
        ExportError: If one of them is missing.
    """
    config_path, weights_path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    staged = directory / _PUBLISHING_NAME
    if not config_path.is_file() and (staged / CONFIG_NAME).is_file():
        config_path = staged / CONFIG_NAME
        if (staged / WEIGHTS_NAME).is_file():
            weights_path = staged / WEIGHTS_NAME
    for path in (config_path, weights_path):
        if not path.is_file():
            raise ExportError(
                f"{directory} holds no adapter that can be read: {path.name} is missing. Pickled adapters "
                f"(adapter_model.bin) are not read; save them again with peft."
            )
    return config_path, weights_path


def _stage(directory: Path, tensors: dict[str, torch.Tensor], config: LoraConfig, metadata: Mapping[str, str]) -> None:
    staging = make_staging(directory, "adapter")
    try:
        save_file(tensors, staging / WEIGHTS_NAME, metadata={"format": "pt", **metadata})
        if metadata:
            _sort_metadata(staging / WEIGHTS_NAME)
        config.save_pretrained(os.fspath(staging))
        sync_tree(staging)
        os.rename(staging, directory / _PUBLISHING_NAME)
        sync_file(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _sort_metadata(path: Path) -> None:
    """Put the entries of a safetensors header's metadata in order: safetensors 0.8 writes them in a random one."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise ExportError(f"{path}: the header of safetensors has a form that cannot be put in order.")
        file.seek(8)
        file.write(text.ljust(size))


def _publish(directory: Path) -> None:
    """Move a staged adapter into place; can be repeated after any interruption.

    Under an equal config, replacing the weights is the one atomic switch. Under another config the old one goes first,
    so that no reader pairs it with the new weights, and the new one comes last.
    """
    staged, config_path = directory / _PUBLISHING_NAME, directory / CONFIG_NAME
    staged_config = staged / CONFIG_NAME
    if staged_config.exists() and config_path.exists() and staged_config.read_bytes() != config_path.read_bytes():
        config_path.unlink()
        sync_file(directory)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        if (staged / name).exists():
            os.replace(staged / name, directory / name)
            sync_file(directory)
    if staged.exists():
        staged.rmdir()


def _settle_interrupted(directory: Path) -> None:
    """Bring a directory whose last export was interrupted back to one complete adapter."""
    sweep_staging(directory)
    if (directory / _PUBLISHING_NAME).exists():
        if (directory / CONFIG_NAME).exists():
            shutil.rmtree(directory / _PUBLISHING_NAME)
        else:
            _publish(directory)
