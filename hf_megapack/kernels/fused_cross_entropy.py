"""Linear cross-entropy on a GPU: cuBLAS for the two products, Triton for one pass over the logits between them.

A chunk of slots has one buffer. Its rows hold the logits, then the exponentials in the same place, and behind these the
product with the head before it is rounded. The logits of bfloat16 inputs stay float32: rounding them to bfloat16 would
move a logit of 20 by up to 0.06, and its probability by as many parts.

Sizes are chosen from the shapes alone, never by timing: the order of sums, hence every bit of the result, is the same
in each run.

Shapes: N slots, D hidden size, V valid columns of the head on this rank. Imports Triton.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_megapack.kernels.cross_entropy import HeadPart, SlotTerms, empty_terms
from hf_megapack.kernels.cross_entropy_triton import (
    HIGHEST,
    LABEL_LOGIT,
    OTHERS,
    WEIGHTED_OTHERS,
    exponentiate_rows,
    settle_rows,
)

# Bytes of a chunk's buffer: 512 slots of a 152K vocabulary, with which the two products run at their speed.
BUFFER_BYTES = 320 * 2**20
# Rows of a matrix product's tile; a chunk is a multiple of it.
TILE_ROWS = 128
# Rows of the buffer begin at multiples of 256 bytes, so that loads are wide whatever the vocabulary's size.
ROW_ELEMENTS = 64
# exp() of less is zero in float32.
LOWEST_EXPONENT = -200.0


class Plan(NamedTuple):
    """How a linear cross-entropy is cut up.

    Attributes:
        rows: Slots of one chunk.
        logits_dtype: float32, or the inputs' dtype, which halves the buffer of bfloat16 inputs and rounds their logits.
        block: Columns that the kernel reads at once, a power of two.
        num_warps: Warps per row in the kernel.
    """

    rows: int
    logits_dtype: torch.dtype
    block: int
    num_warps: int


def plan_chunks(num_columns: int, hidden_size: int, dtype: torch.dtype) -> Plan:
    """Return the plan for a shape.

    Args:
        num_columns: Valid columns of the head on this rank.
        hidden_size: Hidden size.
        dtype: Of hidden states and head.

    Returns:
        Float32 logits; as many slots as fit BUFFER_BYTES, a multiple of TILE_ROWS and at least one tile.
    """
    row_bytes = 4 * _row_layout(num_columns, hidden_size, torch.float32, dtype)[0]
    rows = max(1, BUFFER_BYTES // row_bytes // TILE_ROWS) * TILE_ROWS
    if num_columns <= 4096:
        return Plan(rows, torch.float32, block=1024, num_warps=4)
    return Plan(rows, torch.float32, block=4096, num_warps=4)


def fused_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    head: HeadPart,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    wants_grad: bool,
    plan: Plan | None = None,
) -> SlotTerms:
    """Do what `linear_cross_entropy` says for bfloat16 or float32 inputs; `plan` defaults to that of `plan_chunks`."""
    weight_VD = head.weight_VD[: head.num_valid_columns]
    num_slots, hidden_size = hidden_ND.shape
    num_columns, dtype = weight_VD.shape[0], hidden_ND.dtype
    if plan is None:
        plan = plan_chunks(num_columns, hidden_size, dtype)
    terms = empty_terms(hidden_ND, head, wants_grad=wants_grad)
    width, behind_exps = _row_layout(num_columns, hidden_size, plan.logits_dtype, dtype)
    buffer = torch.empty((min(plan.rows, num_slots), width), dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, num_slots, plan.rows):
        part = slice(start, min(start + plan.rows, num_slots))
        rows = buffer[: part.stop - start]
        logits_NV = rows.view(plan.logits_dtype)[:, :num_columns]
        exps_NV = rows.view(dtype)[:, :num_columns] if wants_grad else None
        labels = labels_N[part].contiguous()
        _multiply(hidden_ND[part], weight_VD.T, logits_NV)
        statistics_5N = exponentiate_rows(
            logits_NV,
            exps_NV,
            labels,
            first_token=head.first_token,
            block=plan.block,
            num_warps=plan.num_warps,
        )
        if head.group is not None:
            _add_other_ranks(statistics_5N, head.group)
        factors_N = settle_rows(
            exps_NV,
            labels,
            weights_N[part].contiguous(),
            statistics_5N,
            first_token=head.first_token,
            into=(terms.nll_N[part], terms.entropy_N[part], terms.is_correct_N[part]),
        )
        if wants_grad:
            product_ND = rows[:, behind_exps : behind_exps + hidden_size]
            _multiply(exps_NV, weight_VD, product_ND)
            torch.mul(product_ND, factors_N[:, None], out=terms.grad_ND[part])
    return terms


def _row_layout(num_columns: int, hidden_size: int, logits_dtype: torch.dtype, dtype: torch.dtype) -> tuple[int, int]:
    """Return the width of a row of the buffer and where the exponentials in it end, both in float32 elements."""
    columns = _round_up(max(num_columns, 1))
    behind_exps = columns * dtype.itemsize // 4
    return _round_up(max(columns * logits_dtype.itemsize // 4, behind_exps + hidden_size)), behind_exps


def _round_up(size: int) -> int:
    return -(-size // ROW_ELEMENTS) * ROW_ELEMENTS


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write `left @ right` to `out`, whose dtype may be wider than theirs: then nothing is rounded to theirs."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        # torch's CPU has no product with a wider result; Triton's interpreter brings us here.
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def _add_other_ranks(statistics_5N: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Turn this rank's statistics into those of all ranks; the reference stays its own."""
    own_highest_N = statistics_5N[HIGHEST].clone()
    highest_2N = statistics_5N[HIGHEST : LABEL_LOGIT + 1]
    dist.all_reduce(highest_2N, dist.ReduceOp.MAX, group=group)
    shift_N = (own_highest_N - statistics_5N[HIGHEST]).clamp(min=LOWEST_EXPONENT)
    statistics_5N[WEIGHTED_OTHERS] += shift_N * statistics_5N[OTHERS]
    sums_2N = statistics_5N[OTHERS : WEIGHTED_OTHERS + 1]
    sums_2N *= shift_N.exp()
    dist.all_reduce(sums_2N, group=group)
