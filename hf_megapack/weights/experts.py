"""Stacked adapters of experts: how their factors are laid out in PEFT files, and gate and up as one adapter.

In memory the experts of one projection of one layer are one stacked adapter: A of shape (E, r, in), B of shape
(E, out, r). Every conversion here moves numbers and computes none, so that it can be undone exactly.
"""

from collections.abc import Iterable, Mapping

import torch

from hf_megapack.errors import ExportError
from hf_megapack.weights.adapter import LoraSpec, scaling_of
from hf_megapack.weights.targets import GATE, GATE_UP, UP

Pair = tuple[torch.Tensor, torch.Tensor]
Adapters = dict[str, tuple[LoraSpec, Pair]]
"""Module path, or projection, to its adapter: what it is, and A and B."""


def alpha_for(scaling: float, rank: int, *, use_rslora: bool, guesses: tuple[float, ...] = ()) -> float:
    """Return an alpha that gives a scale, or the nearest scale that any alpha gives: the next double at most.

    Args:
        scaling: The scale.
        rank: The rank.
        use_rslora: Whether the scale is alpha / sqrt(rank) rather than alpha / rank.
        guesses: Values that are taken first if they do.

    Example:
        >>> alpha_for(2.0, 8, use_rslora=False)
        16
    """
    product = scaling / scaling_of(rank, 1.0, use_rslora=use_rslora)
    near = [product * (1 + steps * 2.0**-53) for steps in range(-4, 5)]
    candidates = (*guesses, *near)
    best = min(candidates, key=lambda alpha: abs(scaling_of(rank, alpha, use_rslora=use_rslora) - scaling))
    return int(best) if float(best).is_integer() else best


def flatten_experts(pair: Pair) -> Pair:
    """Bring stacked factors into the two dimensions that peft gives them.

    Args:
        pair: A of shape (E, r, in), B of shape (E, out, r).

    Returns:
        A of shape (E * r, in), the rows of one expert after those of another, and B of shape (out, r * E), the columns
        of one expert E apart.

    Example:
        >>> factor_a, factor_b = torch.tensor([[[0], [1]], [[10], [11]]]), torch.tensor([[[0, 1]], [[10, 11]]])
        >>> [part.flatten().tolist() for part in flatten_experts((factor_a, factor_b))]
        [[0, 1, 10, 11], [0, 10, 1, 11]]

    Source:
        `peft.tuners.lora.layer.ParamWrapper.get_delta_weight`, 0.21.2.
    """
    factor_a, factor_b = pair
    return factor_a.flatten(0, 1), factor_b.permute(1, 2, 0).flatten(1)


def stack_experts(pair: Pair, rank: int) -> Pair:
    """Undo `flatten_experts`.

    Args:
        pair: A of shape (E * rank, in), B of shape (out, rank * E).
        rank: The rank of one expert.
    """
    factor_a, factor_b = pair
    return factor_a.unflatten(0, (-1, rank)), factor_b.unflatten(1, (rank, -1)).permute(2, 0, 1)


def fuse_gate_up(experts: str, apart: Adapters, *, use_rslora: bool) -> tuple[LoraSpec, Pair]:
    """Return one adapter of gate and up together that does what independent ones do.

    Its A has their rows, its B their values in two blocks, and its rank and alpha are their sums.

    Args:
        experts: Path of the experts, for messages.
        apart: Adapter of gate, of up, or of both in this order.
        use_rslora: As in the config.

    Returns:
        The adapter; A of shape (E, sum of ranks, in), B of shape (E, 2 * out, sum of ranks).

    Raises:
        ExportError: If scales or sizes differ.
    """
    specs = [spec for spec, _ in apart.values()]
    sizes = {(factor_a.shape[2], factor_b.shape[1]) for _, (factor_a, factor_b) in apart.values()}
    if len({spec.scaling for spec in specs}) > 1 or len(sizes) > 1:
        raise ExportError(f"{GATE} and {UP} of {experts} differ in scale or in size: {specs}, (in, out) {sizes}.")
    rank = sum(spec.rank for spec in specs)
    alpha = sum(spec.alpha for spec in specs)
    alpha = alpha_for(specs[0].scaling, rank, use_rslora=use_rslora, guesses=(alpha,))
    stack_a = torch.cat([factor_a for _, (factor_a, _) in apart.values()], dim=1)
    (_, size) = sizes.pop()
    stack_b = stack_a.new_zeros(stack_a.shape[0], 2 * size, rank)
    for block, (_, (_, factor_b)) in zip(_blocks(stack_b, _ranks(apart)), apart.values(), strict=True):
        block.copy_(factor_b)
    return LoraSpec(rank, alpha, scaling_of(rank, alpha, use_rslora=use_rslora)), (stack_a, stack_b)


def split_gate_up(experts: str, pair: Pair, specs: Mapping[str, LoraSpec]) -> Adapters:
    """Undo `fuse_gate_up`.

    Args:
        experts: Path of the experts, for messages.
        pair: A and B of the one adapter.
        specs: What the adapters of gate, of up, or of both in this order are.

    Returns:
        The keys of `specs` to their adapters.

    Raises:
        ExportError: If something else than zeros would be lost.
    """
    stack_a, stack_b = pair
    ranks = {projection: spec.rank for projection, spec in specs.items()}
    if sum(ranks.values()) != stack_b.shape[2] or not _is_zero_beside(stack_b, ranks):
        raise ExportError(
            f"{experts}.{GATE_UP} is marked as independent adapters of {' and '.join(ranks)} with ranks "
            f"{list(ranks.values())}, but its lora_B is not made of their blocks."
        )
    parts = zip(specs.items(), stack_a.split(list(ranks.values()), dim=1), _blocks(stack_b, ranks), strict=True)
    return {projection: (spec, (part_a, part_b)) for (projection, spec), part_a, part_b in parts}


def are_block_diagonal(stacks_b: Iterable[torch.Tensor]) -> bool:
    """Say whether each B of gate and up consists of two equal blocks with exact zeros beside them.

    Args:
        stacks_b: Each of shape (E, 2 * out, rank).

    Returns:
        False also if one of the two blocks is zero everywhere: then nothing tells blocks from an untrained factor.
    """
    is_used = {GATE: False, UP: False}
    for stack_b in stacks_b:
        half, odd = divmod(stack_b.shape[2], 2)
        ranks = {GATE: half, UP: half}
        if odd or stack_b.shape[1] % 2 or not _is_zero_beside(stack_b, ranks):
            return False
        for projection, block in zip(ranks, _blocks(stack_b, ranks), strict=True):
            is_used[projection] |= bool(block.any())
    return all(is_used.values())


def _ranks(adapters: Adapters) -> dict[str, int]:
    return {projection: spec.rank for projection, (spec, _) in adapters.items()}


def _blocks(stack_b: torch.Tensor, ranks: Mapping[str, int]) -> list[torch.Tensor]:
    """Return the part of B that belongs to each projection: its half of the rows, and columns in their order."""
    gate_rows, up_rows = stack_b.chunk(2, dim=1)
    blocks, column = [], 0
    for projection, rank in ranks.items():
        rows = gate_rows if projection == GATE else up_rows
        blocks.append(rows[:, :, column : column + rank])
        column += rank
    return blocks


def _is_zero_beside(stack_b: torch.Tensor, ranks: Mapping[str, int]) -> bool:
    rest = stack_b.clone()
    for block in _blocks(rest, ranks):
        block.zero_()
    return not rest.any()
