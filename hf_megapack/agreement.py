"""Processes that were given different arguments would each train the model in its own way: they are refused.

Every function here is a collective: every rank calls it.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers.trainer_utils import get_last_checkpoint

from hf_megapack.arguments import PER_PROCESS
from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError
from hf_megapack.ranks import find_differences

# What of an adapter's config may differ: where the base model lies, and what says nothing of the adapter.
_LOCAL = ("base_model_name_or_path", "runtime_config", "auto_mapping", "peft_version")


def check_arguments(args: MegaPackConfig, peft_config: LoraConfig) -> None:
    """Check that every process was given the same arguments.

    Args:
        args: Compared but for PER_PROCESS, which only rank 0 or nothing that is trained depends on.
        peft_config: Compared but for the base model's name: nodes may keep their models in different places.

    Raises:
        ConfigError: Naming each argument that differs, with rank 0's value and this rank's.
    """
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in PER_PROCESS}
    adapter = {f"peft_config.{name}": value for name, value in peft_config.to_dict().items() if name not in _LOCAL}
    _refuse_differences({name: _as_text(value) for name, value in (given | adapter).items()}, args)


def check_checkpoint(checkpoint: str | bool | None, args: MegaPackConfig) -> None:
    """Check that every process resumes, from a checkpoint of one name, or none does.

    Args:
        checkpoint: `resume_from_checkpoint` as train() was given it; True stands for the newest in `output_dir`.
        args: The training arguments.

    Raises:
        ConfigError: If ranks differ, or there is no such folder. Its place may differ: nodes may have copies of their
            own.
    """
    given, fault = checkpoint, None
    if checkpoint is True:
        checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        fault = f"output_dir={str(args.output_dir)!r} holds no checkpoint" if checkpoint is None else None
    elif checkpoint and not Path(checkpoint).is_dir():
        fault = "there is no such folder"
    name = Path(checkpoint).name if checkpoint else "none"
    _refuse_differences({"resume_from_checkpoint": f"{name} ({fault})" if fault else name}, args)
    if fault:
        raise ConfigError(
            f"resume_from_checkpoint={given!r}, but {fault}. Give the folder of a checkpoint, True for the newest in "
            "output_dir, or leave it out to begin anew."
        )


def _refuse_differences(values: dict[str, str], args: MegaPackConfig) -> None:
    here = args.process_index
    listed = "".join(
        f"\n  {name}: rank 0 has {text}, "
        + (f"rank {here} has {values.get(name)}" if values.get(name) != text else "another rank does not")
        for name, text in find_differences(values, args.device).items()
    )
    if listed:
        raise ConfigError(
            f"The processes were given different arguments, and each would train the model in its own way:{listed}\n"
            "Give all of them the same: one file and one storage for all nodes, and no value that is drawn at random "
            "or made from the rank."
        )


def _as_text(value: Any) -> str:
    """Return a text that equal values have in every process: each has its own order of sets, and its own addresses."""
    text = repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
