"""The matrix products of a frozen linear with low-rank updates, and their gradients.

The factors of all projections that one linear fuses are stacked, so one product serves every A and one every B. The
update is computed first and the base product is accumulated onto it, in the matrix unit: it costs no pass over memory
of its own. Factors are float32 and get float32 gradients, whatever the activations' type.

Shapes: N slots, I inputs, O outputs, R the ranks of all projections together.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.function import FunctionCtx


class StackedFactors(NamedTuple):
    """The factors of one linear in the activations' type, made once per update.

    Attributes:
        a_RI: The A of every projection, one below the other.
        b_OR: The scaled B of every projection, each in the rows of its outputs and the columns of its rank, else zero.
    """

    a_RI: torch.Tensor
    b_OR: torch.Tensor


def full_precision_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right in at least float32: gradients of factors are sums over slots and rows."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


class Origin(NamedTuple):
    """How a tensor can be made again, at less cost than keeping it.

    Attributes:
        function: Makes the tensor out of its source.
        source: What the backward pass keeps anyway.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    source: torch.Tensor


def keep_origin(tensor: torch.Tensor, origin: Origin) -> torch.Tensor:
    """Note on a tensor how it can be made again, and return it."""
    tensor.megapack_origin = origin
    return tensor


def origin_of(tensor: torch.Tensor) -> Origin | None:
    """Return what `keep_origin` noted on this very tensor; None if nothing, or if it has been through an operation."""
    return getattr(tensor, "megapack_origin", None)


class FrozenLinearWithUpdate(torch.autograd.Function):
    """x W^T + x A^T B^T with W frozen: its inputs are x, W, A, B, the stacked copies of A and B, and x's origin."""

    @staticmethod
    def forward(ctx, input_NI, weight_OI, a_RI, b_OR, stacked, origin):  # noqa: D102, PLR0913 (a product's operands)
        inner_NR = input_NI @ stacked.a_RI.T
        output_NO = inner_NR @ stacked.b_OR.T
        # Through a view: torch 2.11 compiles a function whose very output is changed in place without any gradient.
        output_NO.view_as(output_NO).addmm_(input_NI, weight_OI.T)
        keep_input(ctx, input_NI, origin, inner_NR, weight_OI, *stacked)
        return output_NO

    @staticmethod
    def backward(ctx, grad_NO):  # noqa: D102
        input_NI, inner_NR, weight_OI, a_RI, b_OR = kept_input(ctx)
        grad_inner_NR = grad_NO @ b_OR
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_inner_NR @ a_RI
            grad_input.addmm_(grad_NO, weight_OI)
        grad_a = full_precision_product(grad_inner_NR.T, input_NI)
        grad_b = full_precision_product(grad_NO.T, inner_NR)
        return grad_input, None, grad_a, grad_b, None, None


class LowRankProduct(torch.autograd.Function):
    """x F^T for one stacked factor: its inputs are x, F in float32, F in x's type, and x's origin."""

    @staticmethod
    def forward(ctx, input_NI, _factor, stacked, origin):  # noqa: D102
        keep_input(ctx, input_NI, origin, stacked)
        return input_NI @ stacked.T

    @staticmethod
    def backward(ctx, grad_NO):  # noqa: D102
        input_NI, stacked = kept_input(ctx)
        grad_input = grad_NO @ stacked if ctx.needs_input_grad[0] else None
        return grad_input, full_precision_product(grad_NO.T, input_NI), None, None


def keep_input(ctx: FunctionCtx, input_NI: torch.Tensor, origin: Origin | None, *others: torch.Tensor) -> None:
    """Keep a product's input, or what it can be made from, and other tensors for the backward pass.

    Args:
        ctx: Of the autograd function.
        input_NI: The input.
        origin: How it can be made again, None to keep it.
        *others: Kept as they are.
    """
    ctx.function = None if origin is None else origin.function
    ctx.save_for_backward(input_NI if origin is None else origin.source, *others)


def kept_input(ctx: FunctionCtx) -> tuple[torch.Tensor, ...]:
    """Return the input of shape (N, I), made again if need be, and the other tensors that `keep_input` kept."""
    kept, *others = ctx.saved_tensors
    input_NI = kept if ctx.function is None else ctx.function(kept.detach()).flatten(0, -2)
    return input_NI, *others
