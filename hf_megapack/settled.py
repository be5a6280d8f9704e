"""Fields of a config that are read once, when the trainer is built: setting one later would change nothing.

Data are rendered, rows are planned and the model is cut by them. What is read anew in every run is not among them.
"""

import dataclasses
from typing import Any

from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import ConfigError

_READ_ANEW = {
    "dataset_num_proc",
    "shuffle_unit",
    "group_by_prefix",
    "on_nonfinite",
    "dataloader_num_workers",
    "logging_nan_inf_filter",
    "remove_unused_columns",
}
_INHERITED = {"torch_compile", "full_determinism", "use_cpu", "tf32", "ddp_backend"}
SETTLED = frozenset(MegaPackConfig.__annotations__.keys() - _READ_ANEW | _INHERITED)


def settled_values(args: MegaPackConfig) -> dict[str, Any]:
    """Return the fields that a trainer is built by.

    Args:
        args: What it was given, after its own checks.
    """
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.name in SETTLED}


def check_settled(args: MegaPackConfig, values: dict[str, Any]) -> None:
    """Check that the fields by which a trainer was built have not been set since.

    Args:
        args: The trainer's arguments as they are now.
        values: What `settled_values` returned when it was built.

    Raises:
        ConfigError: Naming each with both values.
    """
    changed = {name: value for name, value in values.items() if getattr(args, name) != value}
    if changed:
        listed = "".join(
            f"\n  {name}: built with {value!r}, now {getattr(args, name)!r}" for name, value in changed.items()
        )
        raise ConfigError(
            f"Arguments were set after the trainer was built by them, which would change nothing:{listed}\n"
            "Build a new trainer with the new values, or set the old ones again."
        )
