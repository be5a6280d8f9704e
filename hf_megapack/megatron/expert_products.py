"""Frozen experts with low-rank updates as one operation, and its gradients.

What the backward pass keeps is in view: a token's input, the result of the first product, and the narrow products of
the adapters; the input and the activation can be made again instead. Factors are float32 and get float32 gradients,
whatever the activations' type.

Shapes: N tokens sorted by expert, E experts, D hidden size, F inner size of an expert, I inputs, O outputs, R the ranks
of all projections of one input together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_megapack.kernels.experts import weighted_swiglu, weighted_swiglu_backward
from hf_megapack.kernels.grouped import TokenGroups, grouped_outer, grouped_product, grouped_product_back
from hf_megapack.megatron.lora_products import Origin


class ExpertFactors(NamedTuple):
    """The adapters of all experts for one input, in the activations' type, made once per update.

    Attributes:
        a_ERI: The A of every projection, one below the other.
        b_EOR: The scaled B of every projection, each in the rows of its outputs and the columns of its rank, else zero.
    """

    a_ERI: torch.Tensor
    b_EOR: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrozenExperts:
    """What does not change while a row runs.

    Attributes:
        fc1: Gate and up of each expert. Shape (E, 2 * F, D).
        fc2: Down of each expert. Shape (E, D, F).
        factors1: Adapters of gate and up, None for none.
        factors2: Adapters of down, None for none.
        groups: Which tokens belong to which expert.
        origin: How the tokens can be made again, None if they are to be kept.
        is_recomputed: Whether the backward pass makes the activation again.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    factors1: ExpertFactors | None
    factors2: ExpertFactors | None
    groups: TokenGroups
    origin: Origin | None
    is_recomputed: bool


class ExpertProducts(torch.autograd.Function):
    """down(silu(gate(x)) * up(x) * weight) of x, the weights, float32 A and B of both matrices, and what is frozen."""

    @staticmethod
    def forward(ctx, hidden_ND, weights_N, _a1, _b1, _a2, _b2, experts):  # noqa: D102
        gate_up, inner1 = _product(hidden_ND, experts.fc1, experts.factors1, experts.groups)
        activation = weighted_swiglu(gate_up, weights_N)
        output, inner2 = _product(activation, experts.fc2, experts.factors2, experts.groups)
        ctx.experts = experts
        ctx.save_for_backward(
            hidden_ND if experts.origin is None else experts.origin.source,
            weights_N,
            gate_up,
            None if experts.is_recomputed else activation,
            inner1,
            inner2,
        )
        return output

    @staticmethod
    def backward(ctx, grad_ND):  # noqa: D102
        experts = ctx.experts
        source, weights_N, gate_up, activation, inner1, inner2 = ctx.saved_tensors
        if activation is None:
            activation = weighted_swiglu(gate_up, weights_N)
        grad, *grads2 = _product_back(
            grad_ND.contiguous(), (activation, inner2), experts.fc2, experts.factors2, experts.groups
        )
        del activation
        grad_gate_up, grad_weights = weighted_swiglu_backward(gate_up, weights_N, grad)
        hidden_ND = None
        if experts.factors1 is not None:
            hidden_ND = source if experts.origin is None else experts.origin.function(source)
        grad_hidden, *grads1 = _product_back(
            grad_gate_up,
            (hidden_ND, inner1),
            experts.fc1,
            experts.factors1,
            experts.groups,
            wants_input=ctx.needs_input_grad[0],
        )
        return grad_hidden, grad_weights, *grads1, *grads2, None


def _product(
    input_NI: torch.Tensor, weight_EOI: torch.Tensor, factors: ExpertFactors | None, groups: TokenGroups
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x W^T + x A^T B^T, and x A^T."""
    output_NO = grouped_product(input_NI, weight_EOI, groups)
    if factors is None:
        return output_NO, None
    inner_NR = grouped_product(input_NI, factors.a_ERI, groups)
    output_NO += grouped_product(inner_NR, factors.b_EOR, groups)
    return output_NO, inner_NR


def _product_back(
    grad_NO: torch.Tensor,
    kept: tuple[torch.Tensor | None, torch.Tensor | None],
    weight_EOI: torch.Tensor,
    factors: ExpertFactors | None,
    groups: TokenGroups,
    *,
    wants_input: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, A and B."""
    input_NI, inner_NR = kept
    grad_input = grouped_product_back(grad_NO, weight_EOI, groups) if wants_input else None
    if factors is None:
        return grad_input, None, None
    grad_inner = grouped_product_back(grad_NO, factors.b_EOR, groups)
    if wants_input:
        grad_input += grouped_product_back(grad_inner, factors.a_ERI, groups)
    return grad_input, grouped_outer(grad_inner, input_NI, groups), grouped_outer(grad_NO, inner_NR, groups)
