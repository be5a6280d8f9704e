"""The products of a frozen linear whose outputs or inputs tensor parallelism splits, with low-rank updates or without.

What the ranks must sum, they sum in float32 and round once. On one GPU a matrix product does the same, so a split
linear differs from a whole one by float32's rounding, not by that of the activations' type; what crosses the ranks for
it is twice as wide as its 16-bit summands would be. Collectives keep these functions out of compiled graphs.

Shapes: N slots, L slots of this rank (N without sequence parallelism), I local inputs, O local outputs, R the ranks of
all projections together.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from hf_megapack.megatron.chunks import ModelChunks
from hf_megapack.megatron.lora_products import full_precision_product, keep_input, kept_input


class Crossing(NamedTuple):
    """How slots cross between the ranks that split a linear.

    Attributes:
        group: These ranks.
        sequence_parallel: Whether each has its own slots, in the order of ranks, of what is not split.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool

    def gather(self, own_LX: torch.Tensor) -> torch.Tensor:
        """Return all slots, shape (N, X)."""
        if not self.sequence_parallel:
            return own_LX
        all_NX = own_LX.new_empty(own_LX.shape[0] * self.group.size(), own_LX.shape[1])
        dist.all_gather_into_tensor(all_NX, own_LX.contiguous(), group=self.group)
        return all_NX

    def total(self, summand_NX: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks for this rank's slots, shape (L, X); the summand may be overwritten."""
        if not self.sequence_parallel:
            dist.all_reduce(summand_NX, group=self.group)
            return summand_NX
        own_LX = summand_NX.new_empty(summand_NX.shape[0] // self.group.size(), summand_NX.shape[1])
        dist.reduce_scatter_tensor(own_LX, summand_NX, group=self.group)
        return own_LX


def _rounded_sum(total: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return the sum in the update's type: what a product that is accumulated onto the update would give."""
    return torch.add(total, update, out=torch.empty_like(update))


class SplitOutputsWithUpdate(torch.autograd.Function):
    """x W^T + x A^T B^T where each rank has some rows of W and B: takes (L, I), returns (N, O)."""

    @staticmethod
    def forward(ctx, input_LI, weight_OI, a_RI, b_OR, stacked, origin, crossing):  # noqa: D102, PLR0913 (its operands)
        input_NI = crossing.gather(input_LI)
        inner_NR = input_NI @ stacked.a_RI.T
        output_NO = inner_NR @ stacked.b_OR.T
        output_NO.addmm_(input_NI, weight_OI.T)
        ctx.crossing = crossing
        keep_input(ctx, input_LI, origin, inner_NR, weight_OI, *stacked)
        return output_NO

    @staticmethod
    def backward(ctx, grad_NO):  # noqa: D102
        input_LI, inner_NR, weight_OI, a_RI, b_OR = kept_input(ctx)
        grad_inner_LR = ctx.crossing.total(full_precision_product(grad_NO, b_OR)).to(grad_NO.dtype)
        grad_input = None
        if ctx.needs_input_grad[0]:
            total_LI = ctx.crossing.total(full_precision_product(grad_NO, weight_OI))
            grad_input = _rounded_sum(total_LI, grad_inner_LR @ a_RI)
        grad_a = full_precision_product(grad_inner_LR.T, input_LI)
        grad_b = full_precision_product(grad_NO.T, inner_NR)
        return grad_input, None, grad_a, grad_b, None, None, None


class SplitInputsWithUpdate(torch.autograd.Function):
    """x W^T + x A^T B^T where each rank has some columns of W and A: takes (N, I), returns (L, O)."""

    @staticmethod
    def forward(ctx, input_NI, weight_OI, a_RI, b_OR, stacked, origin, crossing):  # noqa: D102, PLR0913 (its operands)
        inner_LR = crossing.total(full_precision_product(input_NI, stacked.a_RI.T)).to(input_NI.dtype)
        total_LO = crossing.total(full_precision_product(input_NI, weight_OI.T))
        ctx.crossing = crossing
        keep_input(ctx, input_NI, origin, inner_LR, weight_OI, *stacked)
        return _rounded_sum(total_LO, inner_LR @ stacked.b_OR.T)

    @staticmethod
    def backward(ctx, grad_LO):  # noqa: D102
        input_NI, inner_LR, weight_OI, a_RI, b_OR = kept_input(ctx)
        grad_NO = ctx.crossing.gather(grad_LO)
        grad_inner_NR = grad_NO @ b_OR
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_inner_NR @ a_RI
            grad_input.addmm_(grad_NO, weight_OI)
        grad_a = full_precision_product(grad_inner_NR.T, input_NI)
        grad_b = full_precision_product(grad_LO.T, inner_LR)
        return grad_input, None, grad_a, grad_b, None, None, None


class SplitOutputs(torch.autograd.Function):
    """x W^T where each rank has some rows of W: takes (L, I), returns (N, O)."""

    @staticmethod
    def forward(ctx, input_LI, weight_OI, crossing):  # noqa: D102
        ctx.crossing = crossing
        ctx.save_for_backward(weight_OI)
        return crossing.gather(input_LI) @ weight_OI.T

    @staticmethod
    def backward(ctx, grad_NO):  # noqa: D102
        (weight_OI,) = ctx.saved_tensors
        return ctx.crossing.total(full_precision_product(grad_NO, weight_OI)).to(grad_NO.dtype), None, None


class SplitInputs(torch.autograd.Function):
    """x W^T where each rank has some columns of W: takes (N, I), returns (L, O)."""

    @staticmethod
    def forward(ctx, input_NI, weight_OI, crossing):  # noqa: D102
        ctx.crossing = crossing
        ctx.save_for_backward(weight_OI)
        return crossing.total(full_precision_product(input_NI, weight_OI.T)).to(input_NI.dtype)

    @staticmethod
    def backward(ctx, grad_LO):  # noqa: D102
        (weight_OI,) = ctx.saved_tensors
        return ctx.crossing.gather(grad_LO) @ weight_OI, None, None


class SplitLinear(torch.nn.Module):
    """A frozen linear of Megatron-Core without an adapter, whose sums over ranks are rounded once.

    Args:
        base: The linear.
        crossing: Between the ranks that split it.
    """

    def __init__(self, base: ColumnParallelLinear | RowParallelLinear, crossing: Crossing):
        super().__init__()
        self.base = base
        self._crossing = crossing
        self._product = SplitInputs if isinstance(base, RowParallelLinear) else SplitOutputs

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, which some Megatron-Core code reads from its linears."""
        return self.base.weight

    @torch.compiler.disable
    def forward(self, input_TBD: torch.Tensor, *_args, **_kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias that the linear leaves to its caller."""
        output_NO = self._product.apply(input_TBD.flatten(0, -2), self.base.weight, self._crossing)
        output, bias = output_NO.unflatten(0, (-1, *input_TBD.shape[1:-1])), self.base.bias
        return (output, bias) if bias is None or self.base.skip_bias_add else (output + bias, None)


def round_sums_once(model: ModelChunks, paths: Iterable[str], crossing: Crossing) -> None:
    """Replace Megatron-Core's own linears, which round each rank's summand.

    Args:
        model: This rank's part of the model, its adapters attached.
        paths: Linears of the whole model; those with an adapter, and other packages', are left alone.
        crossing: Between the ranks that split them.
    """
    for path in paths:
        base = model.module(path)
        if isinstance(base, ColumnParallelLinear | RowParallelLinear):
            model.replace(path, SplitLinear(base, crossing))
