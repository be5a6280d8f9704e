"""Read peft's LoraConfig: which linear modules get an adapter, of which rank and scale, and how its factors begin.

Selection is decided by peft's own matching functions, so a config means here what it means in `peft.get_peft_model`,
except that target_modules reach routed experts too. A config that asks for anything this package does not do is refused
by name. This module reads names only: it needs no model, no weights and no Megatron.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.other import get_pattern_key

from hf_megapack.errors import ConfigError
from hf_megapack.weights.targets import (
    GATE,
    GATE_UP,
    NEVER_ADAPTED,
    UP,
    ancestors,
    check_layers,
    check_pattern_keys,
    check_target_entries,
    default_targets,
    expert_parts,
    is_never_adapted,
    names_parameter,
    never_message,
    nothing_selected_message,
    probed_names,
    selected_modules,
    selected_parameters,
    warn_if_nothing_is_excluded,
)

_HONOURED = (
    "task_type",
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "init_lora_weights",
)
_IRRELEVANT = (
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
)
_NO_VARIANT = "only plain LoRA is trained here; leave it at its default"
_REFUSED = {
    "revision": "save that revision of the base model to a folder and pass the folder as model",
    "lora_dropout": "shared prefixes are computed once, so dropout cannot differ between examples; set lora_dropout=0",
    "fan_in_fan_out": "the targets are linear layers, whose weight is (out, in); leave it False",
    "bias": 'base weights, biases included, stay frozen; set bias="none"',
    "modules_to_save": "only LoRA factors are trained; leave it None",
    "megatron_config": "parallel sizes are fields of MegaPackConfig; leave it None",
    "trainable_token_indices": "embeddings stay frozen; leave it None",
    "loftq_config": "it replaces the base weights; leave it empty",
    "eva_config": "it needs a pass over the data before training; leave it None",
    "corda_config": "it replaces the base weights; leave it None",
    "lora_ga_config": "it replaces the base weights; leave it None",
    "layer_replication": "the layers are those of the base model; leave it None",
    "lora_bias": "adapters have no bias; leave it False",
    "ensure_weight_tying": "lm_head and embed_tokens cannot be targets, so there is nothing to tie; leave it False",
    "use_dora": _NO_VARIANT,
    "velora_config": _NO_VARIANT,
    "alora_invocation_tokens": _NO_VARIANT,
    "use_qalora": _NO_VARIANT,
    "monteclora_config": _NO_VARIANT,
    "use_bdlora": _NO_VARIANT,
    "arrow_config": _NO_VARIANT,
    "kasa_config": _NO_VARIANT,
}

# peft fails on other values of these that are falsy, and on a file that holds them.
_NEVER_EMPTY = ("bias", "trainable_token_indices")

LORA_FIELDS: dict[str, Literal["honoured", "refused", "irrelevant"]] = {
    **dict.fromkeys(_HONOURED, "honoured"),
    **dict.fromkeys(_REFUSED, "refused"),
    **dict.fromkeys(_IRRELEVANT, "irrelevant"),
}
"""What becomes of each field of LoraConfig. A refused field may keep its default; an irrelevant one changes nothing."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter of one linear module, or of the same projection of every expert of one layer.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Numerator of the scale, as configured.
        scaling: Factor on B A x: alpha / rank, or alpha / sqrt(rank) with use_rslora.
    """

    rank: int
    alpha: float
    scaling: float


def refused_fields(peft_config: LoraConfig) -> dict[str, str]:
    """Return each field that is set to something not honoured, with what to do about it.

    Args:
        peft_config: The config to look at.

    Returns:
        Field name to advice; empty when every field is honoured, irrelevant or at its default.
    """
    found: dict[str, str] = {}
    for field in dataclasses.fields(peft_config):
        value = getattr(peft_config, field.name)
        unknown = field.name not in LORA_FIELDS
        # A refusable field of LoraConfig is off when falsy; an empty list asks for nothing either.
        is_set = bool(value) or field.name in _NEVER_EMPTY
        if (field.name in _REFUSED or unknown) and is_set and value != field.default:
            found[field.name] = (
                "this version of hf_megapack does not know the field" if unknown else _REFUSED[field.name]
            )
    init = peft_config.init_lora_weights
    if not isinstance(init, bool) and str(init).lower() != "gaussian":
        found["init_lora_weights"] = 'it needs the base weights or replaces them; use True, False or "gaussian"'
    if peft_config.task_type not in (None, "CAUSAL_LM"):
        found["task_type"] = 'only causal language models are trained; use "CAUSAL_LM" or leave it None'
    return found


def check_lora_config(peft_config: LoraConfig) -> None:
    """Refuse a config that would train something else than it says, as far as that shows without a model.

    Args:
        peft_config: What the user gave as `peft_config`.

    Raises:
        ConfigError: If it is not peft's LoraConfig, sets a refused field, names the head, an embedding or a router as
            target, or has a rank, an alpha, a layer or a regular expression that cannot be used.
    """
    if type(peft_config) is not LoraConfig:
        raise ConfigError(f"peft_config must be a peft.LoraConfig, got {type(peft_config).__name__}.")
    refused = refused_fields(peft_config)
    if refused:
        listed = "; ".join(f"{name}={getattr(peft_config, name)!r} ({why})" for name, why in refused.items())
        raise ConfigError(f"LoraConfig sets what is not honoured here: {listed}.")
    ranks = {"r": peft_config.r, **_prefixed("rank_pattern", peft_config.rank_pattern)}
    for where, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ConfigError(f"LoraConfig.{where} must be a positive integer, got {rank!r}.")
    alphas = {"lora_alpha": peft_config.lora_alpha, **_prefixed("alpha_pattern", peft_config.alpha_pattern)}
    for where, alpha in alphas.items():
        if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
            raise ConfigError(f"LoraConfig.{where} must be a finite number other than 0, got {alpha!r}.")
    for where in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"):
        _check_patterns(where, getattr(peft_config, where))
    _check_layer_numbers(peft_config.layers_to_transform)
    targets, parameters = peft_config.target_modules, peft_config.target_parameters
    listed = () if targets is None or isinstance(targets, str) else targets
    for target in [*listed, *(parameters or ())]:
        if is_never_adapted(target):
            raise ConfigError(never_message(target))


def resolve_lora(
    peft_config: LoraConfig, linear_names: Sequence[str], *, model_type: str | None = None
) -> dict[str, LoraSpec]:
    """Decide which linear modules get an adapter, as `peft.get_peft_model` would on the same model.

    It is stricter than peft in three places where a config silently does less than it says: every entry of
    `target_modules`, `target_parameters` and `layers_to_transform` and every key of `rank_pattern` and `alpha_pattern`
    must match something, and `layers_to_transform` cannot be combined with a full module path or with
    `target_parameters`, which peft does not filter. As in peft, `exclude_modules` that excludes nothing is only a
    warning.

    It goes beyond peft where routed experts are concerned: `target_modules`, "all-linear" included, select their
    projections under the names in `linear_names`. Experts that `target_parameters` names are adapted as it says, one A
    for gate and up, whatever `target_modules` selects of them.

    Args:
        peft_config: peft's LoraConfig with Hugging Face target names.
        linear_names: Hugging Face paths of all linear modules of the whole model (not of one pipeline stage), the
            output head included. Experts are named once a layer: "...mlp.experts.gate_proj", "up_proj", "down_proj".
        model_type: `config.model_type` of the model; only needed to look up peft's default targets for
            `target_modules=None`.

    Returns:
        Module path to its adapter, in the order of `linear_names`; never empty. Experts with one A for gate and up
        have the path "...mlp.experts.gate_up_proj".

    Raises:
        ConfigError: If `check_lora_config` refuses the config, a target is missing or matches nothing, a target is
            the output head, an embedding, a router or a module that is not linear, or gate and up of the same experts
            are scaled differently.

    Example:
        >>> names = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"]
        >>> resolve_lora(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), names)
        {'model.layers.0.self_attn.q_proj': LoraSpec(rank=4, alpha=8, scaling=2.0)}
    """
    check_lora_config(peft_config)
    config = copy.copy(peft_config)
    by_parameter = selected_parameters(config, linear_names)
    if config.target_modules is None:
        has_experts = any(map(expert_parts, linear_names))
        config.target_modules = default_targets(model_type, has_experts=has_experts, has_parameters=bool(by_parameter))
    is_regex = isinstance(config.target_modules, str)
    is_all_linear = is_regex and config.target_modules.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
    if is_all_linear:
        config.target_modules = {name for name in linear_names if not is_never_adapted(name)}
    elif not is_regex:
        check_target_entries(config, linear_names)
    by_module = selected_modules(config, linear_names)
    for name in [*by_module, *selected_modules(config, probed_names(linear_names))]:
        if name.rpartition(".")[2] in NEVER_ADAPTED:
            raise ConfigError(never_message(name))
    # A full path selects nothing else, and there may be thousands of them.
    containers = [] if is_all_linear else selected_modules(config, sorted(ancestors(linear_names)))
    if containers:
        raise ConfigError(
            f"target_modules={peft_config.target_modules!r} selects {containers[0]!r}, which is not a linear module; "
            f"name the linear modules below it."
        )
    targets = _ordered_targets(by_module, by_parameter, linear_names)
    if not targets:
        raise ConfigError(nothing_selected_message(peft_config, linear_names))
    check_pattern_keys(config, targets)
    check_layers(config, linear_names)
    warn_if_nothing_is_excluded(config, linear_names)
    specs = {name: _spec_of(config, target) for name, target in targets.items()}
    _check_equal_scaling(specs)
    return specs


def lora_spec(peft_config: LoraConfig, name: str) -> LoraSpec:
    """Return the adapter that a module gets once it is selected.

    Args:
        peft_config: Source of r, lora_alpha, their patterns and use_rslora. The first pattern key that matches wins.
            Patterns see a weight that target_parameters select under its own path, which ends in ".weight".
        name: Hugging Face path of the module.

    Returns:
        Its rank, alpha and scale.
    """
    weight = f"{name}.weight"
    is_parameter = expert_parts(name) is None and names_parameter(peft_config.target_parameters, weight)
    return _spec_of(peft_config, weight if is_parameter else name)


def scaling_of(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """Return the factor on B A x, as peft computes it."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def initial_lora_weights(
    spec: LoraSpec,
    in_features: int,
    out_features: int,
    init: bool | str,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the factors of a fresh adapter from the distributions that peft uses.

    Args:
        spec: The adapter; its rank is used.
        in_features: Width of the module's input.
        out_features: Width of the module's output.
        init: `LoraConfig.init_lora_weights`. True: A uniform in +-1/sqrt(in_features), B zero. "gaussian": A normal
            with deviation 1/rank, B zero. False: A as with True, B uniform in +-1/sqrt(rank), so that the adapter
            changes the model from the start.
        generator: CPU source of randomness; the same state gives the same factors.

    Returns:
        A, float32, shape (rank, in_features), and B, float32, shape (out_features, rank).

    Raises:
        ConfigError: If `init` is none of the three.

    Source:
        `peft.tuners.lora.layer.LoraLayer.reset_lora_parameters`, 0.21.2, and the initialisation of `torch.nn.Linear`.
    """
    factor_a = torch.empty(spec.rank, in_features)
    factor_b = torch.zeros(out_features, spec.rank)
    if isinstance(init, str) and init.lower() == "gaussian":
        factor_a.normal_(0.0, 1.0 / spec.rank, generator=generator)
    elif isinstance(init, bool):
        torch.nn.init.kaiming_uniform_(factor_a, a=math.sqrt(5), generator=generator)
        if not init:
            torch.nn.init.kaiming_uniform_(factor_b, a=math.sqrt(5), generator=generator)
    else:
        raise ConfigError(f'init_lora_weights must be True, False or "gaussian", got {init!r}.')
    return factor_a, factor_b


def _spec_of(peft_config: LoraConfig, target: str) -> LoraSpec:
    ranks, alphas = peft_config.rank_pattern or {}, peft_config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), target), peft_config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), target), peft_config.lora_alpha)
    return LoraSpec(rank, alpha, scaling_of(rank, alpha, use_rslora=bool(peft_config.use_rslora)))


def _ordered_targets(
    by_module: Iterable[str], by_parameter: dict[str, str], linear_names: Sequence[str]
) -> dict[str, str]:
    """Return each adapted module with the path that patterns see, in the order of the model."""
    modules, parameters = set(by_module), {name: path for path, name in by_parameter.items()}
    doubled = [name for name in by_module if name in parameters and expert_parts(name) is None]
    if doubled:
        raise ConfigError(
            f"{doubled[0]!r} is selected by target_modules and its weight by target_parameters; use one of the two."
        )
    targets: dict[str, str] = {}
    for name in linear_names:
        parts = expert_parts(name)
        fused = f"{parts[0]}.{GATE_UP}" if parts and parts[1] in (GATE, UP) else name
        if fused in parameters:
            targets.setdefault(fused, parameters[fused])
        elif name in modules:
            targets[name] = name
    return targets


def _check_equal_scaling(specs: dict[str, LoraSpec]) -> None:
    for name, spec in specs.items():
        parts = expert_parts(name)
        other = specs.get(f"{parts[0]}.{UP}") if parts and parts[1] == GATE else None
        if other is not None and other.scaling != spec.scaling:
            raise ConfigError(
                f"{name} has rank {spec.rank} and alpha {spec.alpha}, {UP} beside it {other.rank} and {other.alpha}: "
                f"their scales {spec.scaling:g} and {other.scaling:g} differ, and an adapter of both is one parameter "
                "in peft. Choose alpha_pattern so that the scales are equal."
            )


def _check_patterns(where: str, value: str | Iterable[str] | None) -> None:
    for pattern in (value,) if isinstance(value, str) else value or ():
        if not isinstance(pattern, str):
            raise ConfigError(f"LoraConfig.{where} holds {pattern!r}, which is no string.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"LoraConfig.{where} holds {pattern!r}, no regular expression: {error}.") from error


def _check_layer_numbers(layers: object) -> None:
    numbers = layers if isinstance(layers, Collection) else [] if layers is None else [layers]
    if isinstance(layers, str) or not all(isinstance(number, int) for number in numbers):
        raise ConfigError(
            f"LoraConfig.layers_to_transform must be the number of a layer or a list of such, got {layers!r}."
        )


def _prefixed(field: str, pattern: dict[str, float] | None) -> dict[str, float]:
    return {f"{field}[{key!r}]": value for key, value in (pattern or {}).items()}
