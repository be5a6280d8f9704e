"""The two formats of PEFT files, and what their adapters are called in each.

A file of format "peft" holds what peft makes of transformers 5's stacked experts: one adapter for gate and up together
and one for down. A file of format "per_expert" holds one for every expert and projection, as transformers 4 had them
and as inference engines read them. Ordinary modules are stored alike; `hf_megapack.weights.experts` does the rest.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_megapack.errors import ExportError
from hf_megapack.weights.adapter import LoraSpec, scaling_of
from hf_megapack.weights.experts import (
    Adapters,
    Pair,
    alpha_for,
    are_block_diagonal,
    flatten_experts,
    fuse_gate_up,
    split_gate_up,
    stack_experts,
)
from hf_megapack.weights.targets import DOWN, GATE, GATE_UP, UP, expert_parts

Marks = dict[str, dict[str, tuple[int, float]]]
"""Path of a layer's experts to rank and alpha of each projection that the file's tensors do not show."""

# In peft, target_modules of these names mean the experts of a model that has some, and only them.
_CLAIMED_BY_EXPERTS = (GATE, UP, DOWN)
_ONE_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<leaf>[^.]+)")
_PLAIN = {GATE: GATE, UP: UP, DOWN: DOWN}
# What checkpoints of each model type call the block that experts are in, and the projections of one expert.
_ONE_BY_ONE = {
    "glm4_moe": ("mlp", _PLAIN),
    "mixtral": ("block_sparse_moe", {GATE: "w1", UP: "w3", DOWN: "w2"}),
    "qwen2_moe": ("mlp", _PLAIN),
    "qwen3_moe": ("mlp", _PLAIN),
}
_PROJECTION_OF = {leaf: projection for _, leaves in _ONE_BY_ONE.values() for projection, leaf in leaves.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One adapter as a file holds it.

    Attributes:
        key: The part of its two tensor names between "base_model.model." and ".lora_A.weight".
        target: What the config selects it by and what patterns see: a module path, or a parameter path.
        is_parameter: Whether target_parameters select it.
        spec: Its rank, alpha and scale.
        pair: A of shape (rows, in) and B of shape (out, rows); rows is the rank, for stacked experts times E.
    """

    key: str
    target: str
    is_parameter: bool = False
    spec: LoraSpec
    pair: Pair

    @property
    def name(self) -> str:
        """Path of the module, or of an experts' parameter."""
        return self.target.removesuffix(".weight") if self.is_parameter else self.target


def is_one_expert(key: str) -> bool:
    """Say whether a key of a file names a projection of a single expert."""
    match = _ONE_EXPERT.fullmatch(key)
    return match is not None and match["leaf"] in _PROJECTION_OF


def is_stacked(key: str) -> bool:
    """Say whether a key of a file names stacked experts."""
    return key.endswith((".experts", ".experts.base_layer"))


def to_peft_layout(adapters: Adapters, *, use_rslora: bool, has_experts: bool) -> tuple[list[Stored], Marks]:
    """Return what a file of format "peft" holds.

    In a model with experts, gate, up and down projections outside them are selected by the names of their weights: as
    target_modules, peft 0.20 and 0.21 take the names for the experts' and drop these adapters without an error.

    Args:
        adapters: The adapters in memory.
        use_rslora: As in the config.
        has_experts: Whether the model has experts, adapted or not.

    Returns:
        The stored adapters, and the marks of gate and up where they are independent.

    Raises:
        ExportError: If gate and up of the same experts do not belong together.
    """
    stored, marks = [], {}
    for name, (spec, pair) in adapters.items():
        if expert_parts(name) is None:
            by_weight = has_experts and name.rpartition(".")[2] in _CLAIMED_BY_EXPERTS
            target = f"{name}.weight" if by_weight else name
            stored.append(Stored(key=name, target=target, is_parameter=by_weight, spec=spec, pair=pair))
    for experts, found in _by_experts(adapters).items():
        apart = {projection: found[projection] for projection in (GATE, UP) if projection in found}
        if apart and GATE_UP in found:
            raise ExportError(f"{experts} has an adapter of {GATE_UP} and others of {', '.join(apart)}.")
        if apart:
            found[GATE_UP] = fuse_gate_up(experts, apart, use_rslora=use_rslora)
            marks[experts] = {projection: (spec.rank, spec.alpha) for projection, (spec, _) in apart.items()}
        # peft nests its wrappers: of two parameters the first lies inside the second, under base_layer.
        key = experts
        for projection in (DOWN, GATE_UP):
            if projection in found:
                spec, pair = found[projection]
                target = f"{experts}.{projection}"
                stored.append(Stored(key=key, target=target, is_parameter=True, spec=spec, pair=flatten_experts(pair)))
                key = f"{experts}.base_layer"
    return stored, marks


def to_per_expert_layout(adapters: Adapters, model_type: str | None) -> tuple[list[Stored], Marks]:
    """Return what a file of format "per_expert" holds.

    Args:
        adapters: The adapters in memory.
        model_type: `config.model_type` of the model, which decides what an expert's projections are called.

    Returns:
        The stored adapters, and the marks of gate and up where they have one A.

    Raises:
        ExportError: If the names are not known, or a layer has adapters for some projections of its experts only.
    """
    stored = [
        Stored(key=name, target=name, spec=spec, pair=pair)
        for name, (spec, pair) in adapters.items()
        if expert_parts(name) is None
    ]
    marks: Marks = {}
    for experts, found in _by_experts(adapters).items():
        if model_type not in _ONE_BY_ONE:
            raise ExportError(
                f"How checkpoints of model_type {model_type!r} name single experts is not known, only those of "
                f"{', '.join(sorted(_ONE_BY_ONE))}. Give model_type, or use export_format='peft'."
            )
        if GATE_UP in found:
            spec, (factor_a, factor_b) = found[GATE_UP]
            halves = zip((GATE, UP), factor_b.chunk(2, dim=1), strict=True)
            found |= {projection: (spec, (factor_a, half)) for projection, half in halves}
            marks[experts] = {GATE_UP: (spec.rank, spec.alpha)}
        missing = [projection for projection in (GATE, UP, DOWN) if projection not in found]
        if missing:
            raise ExportError(
                f"{experts} has no adapter of {', '.join(missing)}; engines that read experts one by one need all "
                "three projections. Adapt them, or use export_format='peft'."
            )
        block, leaves = _ONE_BY_ONE[model_type]
        parent = f"{experts.removesuffix('.mlp.experts')}.{block}.experts"
        for projection in (GATE, UP, DOWN):
            spec, stacks = found[projection]
            for index, pair in enumerate(zip(*stacks, strict=True)):
                key = f"{parent}.{index}.{leaves[projection]}"
                stored.append(Stored(key=key, target=key, spec=spec, pair=pair))
    return stored, marks


def from_stored(stored: list[Stored], marks: Marks, *, use_rslora: bool) -> Adapters:
    """Return the adapters of a file of either format as they are in memory.

    Gate and up in one adapter come apart if the file's marks say that they were written so or, without marks, if every
    B consists of two blocks with exact zeros beside them, as peft makes them of experts that were stored one by one
    (not with use_rslora, where half the rank has no exact alpha).

    Args:
        stored: What the file holds.
        marks: The file's marks, {} if it has none.
        use_rslora: As in the config.

    Raises:
        ExportError: If experts are missing or differ in rank or scale, or the marks do not fit.
    """
    adapters: Adapters = {}
    single: dict[str, dict[int, Stored]] = {}
    for item in stored:
        if is_one_expert(item.key):
            name, index = _stacked_name(item.key)
            single.setdefault(name, {})[index] = item
        else:
            pair = stack_experts(item.pair, item.spec.rank) if is_stacked(item.key) else item.pair
            adapters[item.name] = (item.spec, pair)
    adapters |= {name: _stacked(name, items) for name, items in single.items()}
    by_experts = _by_experts(adapters)
    fused = [found[GATE_UP] for found in by_experts.values() if GATE_UP in found]
    in_halves = not marks and not use_rslora and are_block_diagonal(stack_b for _, (_, stack_b) in fused)
    unknown = sorted(marks.keys() - by_experts.keys())
    if unknown:
        raise ExportError(f"The file has a mark for {unknown[0]}, but no adapter.")
    for experts, found in by_experts.items():
        marked = marks.get(experts, {})
        if GATE_UP in marked:
            adapters[f"{experts}.{GATE_UP}"] = _joined(experts, found)
            del adapters[f"{experts}.{GATE}"], adapters[f"{experts}.{UP}"]
        elif GATE_UP in found and (marked or in_halves):
            spec, pair = found[GATE_UP]
            specs = _parts_of(spec, marked, use_rslora=use_rslora)
            parts = split_gate_up(experts, pair, specs)
            del adapters[f"{experts}.{GATE_UP}"]
            adapters |= {f"{experts}.{projection}": part for projection, part in parts.items()}
    return adapters


def _by_experts(adapters: Adapters) -> dict[str, Adapters]:
    """Return the adapters of each layer's experts by projection, after checking that they are equally many."""
    found: dict[str, Adapters] = {}
    for name, adapter in adapters.items():
        if parts := expert_parts(name):
            found.setdefault(parts[0], {})[parts[1]] = adapter
    for experts, by_projection in found.items():
        numbers = {projection: len(pair[0]) for projection, (_, pair) in by_projection.items()}
        if len(set(numbers.values())) > 1:
            raise ExportError(f"The projections of {experts} have different numbers of experts: {numbers}.")
    return found


def _stacked_name(key: str) -> tuple[str, int]:
    match = _ONE_EXPERT.fullmatch(key)
    assert match is not None
    experts = match["experts"].replace(".block_sparse_moe.", ".mlp.")
    return f"{experts}.{_PROJECTION_OF[match['leaf']]}", int(match["index"])


def _stacked(name: str, items: Mapping[int, Stored]) -> tuple[LoraSpec, Pair]:
    """Put the adapters of single experts together."""
    missing = sorted(set(range(max(items) + 1)) - items.keys())
    if missing:
        raise ExportError(f"{name} has adapters for {len(items)} experts, but none for expert {missing[0]}.")
    ordered = [items[index] for index in range(len(items))]
    kinds = {(item.spec, *(tuple(factor.shape) for factor in item.pair)) for item in ordered}
    if len(kinds) > 1:
        raise ExportError(f"The experts of {name} differ in rank, alpha or shape: {sorted(map(str, kinds))[:2]}.")
    stack_a, stack_b = (torch.stack(factors) for factors in zip(*(item.pair for item in ordered), strict=True))
    return ordered[0].spec, (stack_a, stack_b)


def _joined(experts: str, found: Adapters) -> tuple[LoraSpec, Pair]:
    """Undo what writing experts one by one does to gate and up with one A."""
    if not {GATE, UP} <= found.keys() or not torch.equal(found[GATE][1][0], found[UP][1][0]):
        raise ExportError(f"{experts} is marked as having one lora_A for {GATE} and {UP}, but has not.")
    (spec, (stack_a, gate_b)), (_, (_, up_b)) = found[GATE], found[UP]
    return spec, (stack_a, torch.cat([gate_b, up_b], dim=1))


def _parts_of(spec: LoraSpec, marked: Mapping[str, tuple[int, float]], *, use_rslora: bool) -> dict[str, LoraSpec]:
    """Return what the adapters of gate and up in one are: by the file's marks, or else two equal ones."""
    half = (spec.rank // 2, spec.alpha / 2)
    parts = {}
    for projection, (rank, alpha) in (marked or {GATE: half, UP: half}).items():
        # The mark's alpha is the one trained with, unless somebody has rescaled the adapter in its config since.
        if not math.isclose(scaling_of(rank, alpha, use_rslora=use_rslora), spec.scaling, rel_tol=2.0**-51):
            alpha = alpha_for(spec.scaling, rank, use_rslora=use_rslora)
        alpha = int(alpha) if float(alpha).is_integer() else alpha
        parts[projection] = LoraSpec(rank, alpha, scaling_of(rank, alpha, use_rslora=use_rslora))
    return parts
