"""Which linear modules and parameters the names in a LoraConfig select, by peft's rules.

The experts of a layer are linear modules without an index here ("model.layers.0.mlp.experts.gate_proj"), although
transformers 5 keeps them as two stacked parameters: `experts.gate_up_proj` and `experts.down_proj`. target_modules
reach them under the former names, target_parameters under the latter. This module reads names only.
"""

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import (
    INCLUDE_LINEAR_LAYERS_SHORTHAND,
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
)
from peft.utils.other import get_pattern_key

from hf_megapack.errors import ConfigError

GATE, UP, DOWN, GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"

NEVER_ADAPTED = {
    **dict.fromkeys(("lm_head", "embed_out"), "the output head"),
    **dict.fromkeys(("embed_tokens", "embeddings", "wte"), "the embedding"),
    **dict.fromkeys(("gate", "router", "shared_expert_gate"), "a router"),
}
# Targets reach these in peft although the caller may list linear modules only, or a tied head not at all.
_ALWAYS_PROBED = ("lm_head", "model.embed_tokens")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_SHARED = {"shared_expert", "shared_experts"}
_EXPERT = re.compile(rf"(?P<experts>(?:.+\.)?experts)\.(?P<projection>{GATE}|{UP}|{DOWN}|{GATE_UP})")
# An index or the pattern of one, escaped dots included: experts.3, experts\.\d+, experts.[0-9], experts.(1|2)
_ONE_EXPERT = re.compile(r"experts\\?\.(?:\d|\\d|\[|\()")


def expert_parts(name: str) -> tuple[str, str] | None:
    """Split the path of an expert projection.

    Args:
        name: Hugging Face path of a linear module, without expert index.

    Returns:
        The path of the experts and the projection; None for any other module.

    Example:
        >>> expert_parts("model.layers.0.mlp.experts.up_proj")
        ('model.layers.0.mlp.experts', 'up_proj')
        >>> expert_parts("model.layers.0.mlp.shared_experts.up_proj")
    """
    match = _EXPERT.fullmatch(name)
    return (match["experts"], match["projection"]) if match else None


def is_of_experts(name: str) -> bool:
    """Say whether a path shows that its model has experts: it is of routed or of shared ones."""
    return expert_parts(name) is not None or not _SHARED.isdisjoint(name.split("."))


def never_message(target: str) -> str:
    """Say why a target stays frozen; its module is one of NEVER_ADAPTED."""
    what = NEVER_ADAPTED[module_of_target(target).rpartition(".")[2]]
    return f"The LoRA target {target!r} is {what}, which stays frozen; leave it out of the targets."


def is_never_adapted(target: str) -> bool:
    """Say whether a target names a module or its weight that stays frozen."""
    return module_of_target(target).rpartition(".")[2] in NEVER_ADAPTED


def module_of_target(target: str) -> str:
    """Return the module that a target names; an entry of target_parameters ends in ".weight" for ordinary ones."""
    return target.removesuffix(".weight")


def names_parameter(targets: Iterable[str] | None, parameter: str) -> bool:
    """Say whether entries of target_parameters select a parameter path, by peft's rule."""
    return any(parameter == target or parameter.endswith(f".{target}") for target in targets or ())


def pattern_matches(key: str, name: str) -> bool:
    """Say whether a key of rank_pattern or alpha_pattern matches a module or parameter path, by peft's rule."""
    # peft answers the path itself when nothing matches, which is a match only if the key is that very path.
    return get_pattern_key([key], name) == key


def default_targets(model_type: str | None, *, has_experts: bool, has_parameters: bool) -> set[str]:
    """Return what peft takes for target_modules=None.

    Args:
        model_type: `config.model_type` of the model.
        has_experts: Whether the model has experts: what peft has as default for such is lost when it converts configs.
        has_parameters: Whether target_parameters are given, so that there need not be any modules.

    Raises:
        ConfigError: If there is no default and no parameters.
    """
    targets = None if has_experts else TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type or "")
    if targets is None and not has_parameters:
        described = "models with experts" if has_experts else f"model type {model_type!r}"
        raise ConfigError(
            f"LoraConfig.target_modules is None and peft has no default for {described}; name the targets, or use "
            f'"all-linear".'
        )
    return set(targets or ())


def selected_modules(config: LoraConfig, names: Iterable[str]) -> list[str]:
    """Return the names that target_modules select, in their order."""
    return [name for name in names if check_target_module_exists(config, name)]


def probed_names(linear_names: Sequence[str]) -> list[str]:
    """Return paths that targets may reach although they are no linear modules that LoRA adapts: head, routers."""
    blocks = {parts[0].rpartition(".experts")[0] for parts in map(expert_parts, linear_names) if parts}
    return [*_ALWAYS_PROBED, *(f"{block}.{router}" for block in sorted(blocks) for router in _ROUTERS)]


def parameter_paths(linear_names: Iterable[str]) -> dict[str, str]:
    """Return the path of each parameter that target_parameters may select, to the module that it is in our names.

    Args:
        linear_names: Hugging Face paths of all linear modules of the model.
    """
    paths: dict[str, str] = {}
    for name in linear_names:
        parts = expert_parts(name)
        if parts is None:
            paths[f"{name}.weight"] = name
        elif parts[1] == DOWN:
            paths[name] = name
        else:
            paths[f"{parts[0]}.{GATE_UP}"] = f"{parts[0]}.{GATE_UP}"
    return paths


def selected_parameters(config: LoraConfig, linear_names: Sequence[str]) -> dict[str, str]:
    """Return what target_parameters select.

    Args:
        config: Source of target_parameters and of the fields that peft does not apply to them.
        linear_names: Hugging Face paths of all linear modules of the model.

    Returns:
        Path of each selected parameter, which rank_pattern and alpha_pattern see, to the module that it is in our
        names: "...experts.gate_up_proj" and "...experts.down_proj" to themselves, "....weight" to its module.

    Raises:
        ConfigError: If an entry selects nothing, too much, or what another field seems to exclude.
    """
    entries = sorted(config.target_parameters or ())
    if not entries:
        return {}
    if config.layers_to_transform not in (None, []):
        raise ConfigError(
            f"layers_to_transform={config.layers_to_transform!r} does not filter target_parameters in peft; name their "
            f"layers in target_parameters and leave layers_to_transform out."
        )
    parameters = parameter_paths(linear_names)
    for entry in entries:
        if entry in ("weight", "bias"):
            raise ConfigError(f"target_parameters holds {entry!r}, which every layer has; name the module too.")
        if not any(names_parameter([entry], parameter) for parameter in parameters):
            raise ConfigError(
                f"The LoRA target parameter {entry!r} matches nothing; parameters here end in "
                f"{', '.join(sorted({_ending(parameter) for parameter in parameters}))}. {_hint([entry])}"
                "Remove or correct the entry."
            )
    selected = {path: name for path, name in parameters.items() if names_parameter(entries, path)}
    for path, name in selected.items():
        if is_never_adapted(path):
            raise ConfigError(never_message(path))
        if config.exclude_modules and is_excluded(config, [path, name]):
            raise ConfigError(
                f"target_parameters selects {path!r} and exclude_modules={config.exclude_modules!r} excludes it; peft "
                "does not exclude parameters. Leave it out of one of them."
            )
    return selected


def is_excluded(config: LoraConfig, names: Iterable[str]) -> bool:
    """Say whether exclude_modules match one of the names."""
    # Excluding follows the rule of targeting without layer filters, so peft's targeting answers the question.
    return bool(selected_modules(LoraConfig(target_modules=config.exclude_modules), names))


def check_target_entries(config: LoraConfig, linear_names: Sequence[str]) -> None:
    """Check that every entry of a list of target_modules has an effect.

    Args:
        config: Its target_modules are a list or set.
        linear_names: Hugging Face paths of all linear modules of the model.

    Raises:
        ConfigError: If an entry matches nothing, or is a full path beside layers_to_transform.
    """
    layers = config.layers_to_transform
    filters_layers = layers is not None and layers != []
    everything = (*linear_names, *ancestors(linear_names))
    for target in sorted(config.target_modules or ()):
        if filters_layers and target in linear_names:
            raise ConfigError(
                f"target_modules names the full path {target!r}, which layers_to_transform={layers!r} does not filter "
                f"in peft; use one of the two."
            )
        if not any(name == target or name.endswith(f".{target}") for name in everything):
            raise ConfigError(
                f"The LoRA target {target!r} matches nothing; linear modules here end in "
                f"{last_components(linear_names)}. {_hint_for_list(target)}Remove or correct the entry."
            )


def check_layers(config: LoraConfig, linear_names: Sequence[str]) -> None:
    """Check that every entry of layers_to_transform has an effect.

    Args:
        config: Source of it.
        linear_names: Hugging Face paths of all linear modules of the model.

    Raises:
        ConfigError: If an entry selects no module.
    """
    layers = config.layers_to_transform
    for layer in layers if isinstance(layers, Collection) else ():
        alone = copy.copy(config)
        alone.layers_to_transform = [layer]
        if not selected_modules(alone, linear_names):
            raise ConfigError(
                f"layers_to_transform={layers!r} names layer {layer}, in which nothing is selected. "
                "Layers count from 0: correct it, or leave it out."
            )


def check_pattern_keys(config: LoraConfig, targets: Mapping[str, str]) -> None:
    """Check that every key of rank_pattern and alpha_pattern has an effect.

    Args:
        config: Source of the patterns.
        targets: Adapted module to the path that patterns see.

    Raises:
        ConfigError: If a key matches no adapted module.
    """
    for field in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, field) or {}:
            if not any(pattern_matches(key, target) for target in targets.values()):
                raise ConfigError(
                    f"LoraConfig.{field} has the key {key!r}, which matches no adapted module. {_hint([key])}".rstrip()
                )


def warn_if_nothing_is_excluded(config: LoraConfig, linear_names: Sequence[str]) -> None:
    """Warn, as peft does, when exclude_modules match nothing."""
    everything = (*linear_names, *ancestors(linear_names), *probed_names(linear_names))
    if config.exclude_modules and not is_excluded(config, everything):
        warnings.warn(f"exclude_modules={config.exclude_modules!r} excludes nothing.", stacklevel=3)


def nothing_selected_message(config: LoraConfig, linear_names: Sequence[str]) -> str:
    """Say that a config selects no linear module, and what the names look like."""
    targets = config.target_modules
    return (
        f"The LoRA target matches nothing: target_modules={targets!r}, exclude_modules={config.exclude_modules!r}, "
        f"layers_to_transform={config.layers_to_transform!r} select none of the {len(linear_names)} linear modules. "
        f"Names here end in {last_components(linear_names)}. {_hint([targets] if isinstance(targets, str) else ())}"
    ).rstrip()


def ancestors(names: Iterable[str]) -> set[str]:
    """Return every path that is above one of the names."""
    found: set[str] = set()
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def last_components(names: Iterable[str]) -> str:
    """List the names' last components, those that stay frozen left out."""
    endings = {name.rpartition(".")[2] for name in names}
    return ", ".join(sorted(endings - NEVER_ADAPTED.keys()))


def _ending(path: str) -> str:
    return ".".join(path.split(".")[-2:])


def _hint(patterns: Iterable[str]) -> str:
    if any(_ONE_EXPERT.search(pattern) for pattern in patterns):
        return "The experts of a layer are adapted together: name them without index, as experts.up_proj. "
    return ""


def _hint_for_list(target: str) -> str:
    if target.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND or re.search(r"[*+?|()\[\]\\]", target):
        return f"A list holds names; give this one alone, as target_modules={target!r}. "
    return _hint([target])
