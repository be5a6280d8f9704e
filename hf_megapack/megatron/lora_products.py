"""The matrix products of a frozen linear with low-rank updates, and their gradients.

The factors of all projections that one linear fuses are stacked, so one product serves every A and one every B. The
update is computed first and the base product is accumulated onto it, in the matrix unit: it costs no pass over memory
of its own. Factors are float32 and get float32 gradients, whatever the activations' type.

Shapes: N slots, I inputs, O outputs, R the ranks of all projections together.
"""

from typing import NamedTuple

import torch


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


class FrozenLinearWithUpdate(torch.autograd.Function):
    """x W^T + x A^T B^T with W frozen: its inputs are x, W, A, B and the stacked copies of A and B."""

    @staticmethod
    def forward(ctx, input_NI, weight_OI, a_RI, b_OR, stacked):  # noqa: D102
        inner_NR = input_NI @ stacked.a_RI.T
        output_NO = inner_NR @ stacked.b_OR.T
        output_NO.addmm_(input_NI, weight_OI.T)
        ctx.save_for_backward(input_NI, inner_NR, weight_OI, *stacked)
        return output_NO

    @staticmethod
    def backward(ctx, grad_NO):  # noqa: D102
        input_NI, inner_NR, weight_OI, a_RI, b_OR = ctx.saved_tensors
        grad_inner_NR = grad_NO @ b_OR
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_inner_NR @ a_RI
            grad_input.addmm_(grad_NO, weight_OI)
        grad_a = full_precision_product(grad_inner_NR.T, input_NI)
        grad_b = full_precision_product(grad_NO.T, inner_NR)
        return grad_input, None, grad_a, grad_b, None


class LowRankProduct(torch.autograd.Function):
    """x F^T for one stacked factor: its inputs are x, F in float32 and F in x's type."""

    @staticmethod
    def forward(ctx, input_NI, _factor, stacked):  # noqa: D102
        ctx.save_for_backward(input_NI, stacked)
        return input_NI @ stacked.T

    @staticmethod
    def backward(ctx, grad_NO):  # noqa: D102
        input_NI, stacked = ctx.saved_tensors
        grad_input = grad_NO @ stacked if ctx.needs_input_grad[0] else None
        return grad_input, full_precision_product(grad_NO.T, input_NI), None
