"""The config beside an adapter: written so that peft selects exactly what is in the file, read so that we do.

Equal adapters get equal configs, whatever order JSON puts their keys in.
"""

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

from hf_megapack.errors import ConfigError, ExportError
from hf_megapack.weights.adapter import LoraSpec, check_lora_config, lora_spec, refused_fields, resolve_lora
from hf_megapack.weights.layouts import Stored, is_one_expert
from hf_megapack.weights.targets import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    expert_parts,
    is_never_adapted,
    is_of_experts,
    names_parameter,
    parameter_paths,
    pattern_matches,
    selected_modules,
)

_CONVERSION = (
    " PiSSA, OLoRA, CorDA and LoftQ train on changed base weights: have peft convert such an adapter (save_pretrained "
    "with path_initial_model_for_weight_conversion) before you set init_lora_weights to true in its config."
)


def check_is_plain_lora(peft_config: LoraConfig) -> None:
    """Refuse a config of more than a plain LoRA adapter.

    Args:
        peft_config: As trained with or as read.

    Raises:
        ExportError: If `check_lora_config` refuses what it says about a finished adapter.
    """
    try:
        check_lora_config(_for_inference(peft_config))
    except ConfigError as error:
        raise ExportError(f"This is more than a plain LoRA adapter, or no valid one. {error}") from error


def check_is_complete(peft_config: LoraConfig, modules: Iterable[str], linear_names: Sequence[str]) -> None:
    """Check that an adapter has the modules that its config selects.

    Args:
        peft_config: The config that the adapter was trained with.
        modules: Its modules.
        linear_names: Hugging Face paths of all linear modules of the model.

    Raises:
        ExportError: If some are lacking or too many.
    """
    # peft's default targets depend on the model type, which nothing here knows.
    if peft_config.target_modules is None:
        return
    wanted, modules = resolve_lora(_for_inference(peft_config), linear_names).keys(), set(modules)
    lacking, surplus = sorted(wanted - modules), sorted(modules - wanted)
    if lacking or surplus:
        raise ExportError(
            f"The adapter is not the one its LoraConfig selects: {len(lacking)} modules are lacking {lacking[:3]}, "
            f"{len(surplus)} are too many {surplus[:3]}."
        )


def portable_config(
    peft_config: LoraConfig, stored: Sequence[Stored], linear_names: Sequence[str] | None
) -> LoraConfig:
    """Return the config of a file of format "peft".

    Args:
        peft_config: The config that the adapter was trained with.
        stored: What the file will hold.
        linear_names: Hugging Face paths of all linear modules of the model, or None if they are not known. With them
            targets are short names where those select exactly what is stored, else paths.

    Raises:
        ExportError: If the adapter cannot be expressed in a config.
    """
    config = _fresh(peft_config)
    specs = {item.name: item.spec for item in stored}
    targets = {item.target: item.spec for item in stored}
    paths = sorted(item.target for item in stored if item.is_parameter)
    _drop_idle_names(config, targets)
    if paths or specs != {name: lora_spec(config, name) for name in specs}:
        _set_patterns(config, targets)
    modules = sorted(item.target for item in stored if not item.is_parameter)
    config.target_modules = sorted({module.rpartition(".")[2] for module in modules})
    config.target_parameters = sorted({_without_layer(path) for path in paths}) or None
    if linear_names is None or not _reproduces(config, specs, linear_names):
        config.target_modules, config.target_parameters = modules, paths or None
    if not _reproduces(config, specs, linear_names or _linear_names(specs)):
        raise ExportError("The adapter's modules, ranks and scales cannot be expressed in an adapter_config.json.")
    return config


def per_expert_config(peft_config: LoraConfig, stored: Sequence[Stored]) -> LoraConfig:
    """Return the config of a file of format "per_expert".

    Inference engines take the names in the file, and one rank and alpha for all of them.

    Args:
        peft_config: The config that the adapter was trained with.
        stored: What the file will hold.

    Raises:
        ExportError: If modules differ in rank or alpha.
    """
    kinds = {(item.spec.rank, item.spec.alpha): item.key for item in stored}
    if len(kinds) > 1:
        listed = "; ".join(f"{key} has r={rank}, lora_alpha={alpha}" for (rank, alpha), key in sorted(kinds.items()))
        raise ExportError(
            f"export_format='per_expert' is for inference engines, which know one r and lora_alpha per adapter, but "
            f"{listed}. Use export_format='peft'."
        )
    config = _fresh(peft_config)
    ((config.r, config.lora_alpha),) = kinds
    config.rank_pattern, config.alpha_pattern = {}, {}
    names = {item.key.rpartition(".")[2] for item in stored}
    if any(is_one_expert(item.key) for item in stored):
        names.add("experts")
    config.target_modules = sorted(names)
    return config


def parsed_config(content: bytes, path: Path) -> LoraConfig:
    """Read adapter_config.json.

    Args:
        content: Its bytes.
        path: Its place, for messages.

    Raises:
        ExportError: If it is not the config of a plain LoRA adapter.
    """
    try:
        fields = json.loads(content)
        if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
            found = fields.get("peft_type") if isinstance(fields, dict) else type(fields).__name__
            raise ExportError(f"{path}: peft_type is {found!r}; only LORA adapters are read.")
        known = {field.name for field in dataclasses.fields(LoraConfig)}
        newer = sorted(name for name in fields.keys() - known if fields[name])
        if newer:
            raise ExportError(f"{path} sets {', '.join(newer)}, which peft {peft.__version__} does not know.")
        config = LoraConfig(**{name: value for name, value in fields.items() if name in known})
    except (ValueError, TypeError) as error:
        raise ExportError(f"{path} is no valid LoRA config: {error}.") from error
    try:
        check_is_plain_lora(config)
    except ExportError as error:
        advice = _CONVERSION if "init_lora_weights" in refused_fields(config) else ""
        raise ExportError(f"{path}: {error}{advice}") from error
    return config


def check_selects(config: LoraConfig, modules: Iterable[str]) -> None:
    """Check that target_modules select modules that the file holds.

    Args:
        config: The file's config.
        modules: The file's modules.

    Raises:
        ExportError: If one of them is not selected.
    """
    targets = config.target_modules
    if targets is None or (isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND):
        return
    ignored = [module for module in modules if not check_target_module_exists(config, module)]
    if ignored:
        raise ExportError(f"The config does not select {len(ignored)} modules of the file, as {ignored[0]}.")


def lacking_targets(config: LoraConfig, modules: Iterable[str], linear_names: Sequence[str]) -> list[str]:
    """Return what a file's config selects in a model and the file does not hold.

    Args:
        config: The file's config.
        modules: The file's modules, in our names.
        linear_names: Hugging Face paths of all linear modules of the model.
    """
    held = set(modules)
    held |= {f"{parts[0]}.{GATE_UP}" for parts in map(expert_parts, held) if parts and parts[1] in (GATE, UP)}
    ordinary = [name for name in linear_names if expert_parts(name) is None and not is_never_adapted(name)]
    if any(map(expert_parts, linear_names)):
        # In models with experts these names mean the experts to peft, which it then has among target_parameters.
        ordinary = [name for name in ordinary if name.rpartition(".")[2] not in (GATE, UP, DOWN)]
    wanted = selected_modules(config, ordinary) if config.target_modules else []
    named = config.target_parameters
    wanted += [module for path, module in parameter_paths(linear_names).items() if names_parameter(named, path)]
    return [name for name in wanted if name not in held]


def config_in_memory(config: LoraConfig, specs: Mapping[str, LoraSpec]) -> LoraConfig:
    """Return a config that `resolve_lora` turns into the adapters that were read.

    Args:
        config: The file's config.
        specs: The adapters as they are in memory.
    """
    config = copy.deepcopy(config)
    # Short names may reach routed experts here that they do not reach in peft.
    if not config.target_parameters and not any(map(is_of_experts, specs)):
        _drop_idle_names(config, specs)
        return config
    with_one_a = sorted(name for name in specs if (expert_parts(name) or ("", ""))[1] == GATE_UP)
    config.target_modules = specs.keys() - set(with_one_a)
    config.target_parameters = with_one_a or None
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    _set_patterns(config, specs)
    return config


def _fresh(peft_config: LoraConfig) -> LoraConfig:
    """Copy a config without the fields that say how training began or how its targets were chosen."""
    config = _for_inference(peft_config)
    config.peft_version = peft.__version__
    config.init_lora_weights = True
    config.auto_mapping = config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.target_parameters = None
    # JSON is written with sorted keys, but in peft the first key that matches wins.
    config.rank_pattern = dict(sorted((config.rank_pattern or {}).items()))
    config.alpha_pattern = dict(sorted((config.alpha_pattern or {}).items()))
    return config


def _for_inference(peft_config: LoraConfig) -> LoraConfig:
    """Copy a config without what limits training here but says nothing about what a finished adapter computes."""
    config = copy.deepcopy(peft_config)
    config.lora_dropout, config.revision, config.task_type, config.inference_mode = 0.0, None, "CAUSAL_LM", True
    return config


def _set_patterns(config: LoraConfig, specs: Mapping[str, LoraSpec]) -> None:
    config.rank_pattern = _pattern({target: spec.rank for target, spec in specs.items()}, config.r)
    config.alpha_pattern = _pattern({target: spec.alpha for target, spec in specs.items()}, config.lora_alpha)


def _pattern(values: Mapping[str, float], default: float) -> dict[str, Any]:
    """Name what differs from the default, by short name where all targets of that name agree, else by path.

    No two keys match one target, so their order means nothing.
    """
    by_ending: dict[str, dict[str, float]] = {}
    for target, value in values.items():
        by_ending.setdefault(_ending(target), {})[target] = value
    pattern: dict[str, Any] = {}
    for ending, group in by_ending.items():
        if len(set(group.values())) == 1:
            group = {ending: next(iter(group.values()))}
        pattern.update({name: value for name, value in group.items() if value != default})
    return pattern


def _ending(target: str) -> str:
    """Return the last component of a path, with "weight" the last two."""
    start, _, last = target.rpartition(".")
    return f"{start.rpartition('.')[2]}.{last}" if last == "weight" else last


def _without_layer(path: str) -> str:
    """Return what comes after the number of the layer, the whole path if there is none."""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else path


def _linear_names(names: Iterable[str]) -> list[str]:
    """Return names of linear modules among which a config that selects `names` can be resolved."""
    linear_names: list[str] = []
    for name in names:
        parts = expert_parts(name)
        linear_names += [f"{parts[0]}.{leaf}" for leaf in (GATE, UP, DOWN)] if parts else [name]
    return list(dict.fromkeys(linear_names))


def _reproduces(config: LoraConfig, specs: Mapping[str, LoraSpec], linear_names: Sequence[str]) -> bool:
    try:
        return resolve_lora(config, linear_names) == specs
    except ConfigError:
        return False


def _drop_idle_names(config: LoraConfig, modules: Iterable[str]) -> None:
    """Drop target names and pattern keys that other model families have: peft ignores them, `resolve_lora` does not."""
    modules = list(modules)
    if config.target_modules is not None and not isinstance(config.target_modules, str):
        config.target_modules = {
            target
            for target in config.target_modules
            if any(module == target or module.endswith(f".{target}") for module in modules)
        }
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field) or {}
        kept = {key: value for key, value in pattern.items() if any(pattern_matches(key, name) for name in modules)}
        setattr(config, field, kept)
