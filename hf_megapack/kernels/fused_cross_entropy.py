"""Linear cross-entropy on a GPU: cuBLAS for the two products, a Triton kernel between them.

A thousand slots go through the vocabulary chunk by chunk of its columns, and the loss and the hidden gradient are
there at its end: as in FlashAttention, both are sums relative to a reference that follows the highest logit. One chunk
of logits exists at a time, and its exponentials take its place. The logits of bfloat16 inputs stay float32: rounding
them to bfloat16 would move a logit of 20 by up to 0.06, and its probability by as many parts.

Sizes are chosen from the shapes and the kind of GPU, never by timing: the order of sums, hence every bit of the
result, is the same in each run.

Source:
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.

Shapes: N slots, D hidden size, V valid columns of the head on this rank, C columns of a chunk. Imports Triton.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_megapack.kernels.cross_entropy import HeadPart, SlotTerms, empty_terms, write_terms
from hf_megapack.kernels.cross_entropy_triton import (
    HIGHEST,
    LABEL_LOGIT,
    LOWEST,
    NUM_STATISTICS,
    OTHERS,
    REFERENCE,
    WEIGHTED_OTHERS,
    Rows,
    exponentiate_rows,
    settle_rows,
)

# Slots that go through the vocabulary together at most.
MOST_ROWS = 2048
# Logits of a chunk at most: 128 MiB of float32.
MOST_LOGITS = 2**25
# Rows and columns that a processor computes at once in the products that cuBLAS chooses here, on Hopper.
TILE_ROWS, TILE_COLUMNS = 256, 128


class Plan(NamedTuple):
    """How a linear cross-entropy is cut up.

    Attributes:
        rows: Slots that go through the vocabulary together.
        columns: Columns of the head that are computed at once.
        logits_dtype: float32, or the inputs' dtype, which halves the buffer of bfloat16 inputs and rounds their logits.
        block: Columns that the kernel reads at once, a power of two.
        num_warps: Warps per row in the kernel.
    """

    rows: int
    columns: int
    logits_dtype: torch.dtype
    block: int
    num_warps: int


def plan_chunks(num_slots: int, num_columns: int, num_processors: int) -> Plan:
    """Return the plan for a shape: float32 logits, about equal chunks whose tiles keep all processors busy to the end.

    Args:
        num_slots: Slots.
        num_columns: Valid columns of the head on this rank.
        num_processors: Multiprocessors of the GPU.
    """
    rows = _even_part(num_slots, MOST_ROWS, TILE_ROWS)
    row_tiles = rows // TILE_ROWS
    # With so many columns the tiles are a multiple of the processors.
    unit = TILE_COLUMNS * num_processors // math.gcd(num_processors, row_tiles)
    columns = _even_part(num_columns, MOST_LOGITS // rows, unit)
    return Plan(rows, columns, torch.float32, block=4096 if columns > 4096 else 1024, num_warps=4)


def _even_part(size: int, most: int, unit: int) -> int:
    """Return the size of the fewest equal parts, rounded up to a multiple of `unit`: at most `most`, or one unit."""
    parts = max(1, -(-size // max(unit, most // unit * unit)))
    return max(1, -(-size // parts // unit)) * unit


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
    num_slots, hidden_size = hidden_ND.shape
    if plan is None:
        plan = plan_chunks(num_slots, head.num_valid_columns, _num_processors(hidden_ND.device))
    terms = empty_terms(hidden_ND, head, wants_grad=wants_grad)
    most = min(plan.rows, num_slots)
    width = -(-min(plan.columns, head.num_valid_columns) // TILE_COLUMNS) * TILE_COLUMNS
    buffer = torch.empty((most, width), dtype=plan.logits_dtype, device=hidden_ND.device)
    products = buffer.new_empty((most, hidden_size), dtype=torch.float32) if wants_grad else None
    for start in range(0, num_slots, plan.rows):
        part = slice(start, min(start + plan.rows, num_slots))
        labels = labels_N[part].contiguous()
        rows = Rows(labels, _no_statistics(labels), None if products is None else products[: len(labels)])
        _pass_vocabulary(hidden_ND[part], head, rows, buffer[: len(labels)], plan)
        factors_2N = _settle_terms(terms, part, rows.statistics_5N, weights_N[part], head.group)
        if wants_grad:
            weight_VD = head.weight_VD[: head.num_valid_columns]
            settle_rows(rows, weight_VD, factors_2N, first_token=head.first_token, grad_ND=terms.grad_ND[part])
    return terms


def _no_statistics(labels_N: torch.Tensor) -> torch.Tensor:
    """Return the statistics of slots that have seen no column."""
    statistics_5N = labels_N.new_full((NUM_STATISTICS, len(labels_N)), -torch.inf, dtype=torch.float32)
    statistics_5N[OTHERS : WEIGHTED_OTHERS + 1] = 0
    return statistics_5N


def _pass_vocabulary(hidden_ND: torch.Tensor, head: HeadPart, rows: Rows, buffer: torch.Tensor, plan: Plan) -> None:
    """Complete the slots' statistics, and their product if it is wanted."""
    if rows.product_ND is not None and head.num_valid_columns == 0:
        rows.product_ND.zero_()
    for start in range(0, head.num_valid_columns, plan.columns):
        chunk_CD = head.weight_VD[start : min(start + plan.columns, head.num_valid_columns)]
        logits_NC = buffer[:, : len(chunk_CD)]
        exps_NC = None if rows.product_ND is None else buffer.view(hidden_ND.dtype)[:, : len(chunk_CD)]
        _multiply(hidden_ND, chunk_CD.T, logits_NC)
        exponentiate_rows(
            logits_NC,
            exps_NC,
            rows if start else rows._replace(product_ND=None),
            first_token=head.first_token + start,
            block=plan.block,
            num_warps=plan.num_warps,
        )
        if exps_NC is not None:
            _multiply(exps_NC, chunk_CD, rows.product_ND, adds=start > 0)


def _settle_terms(
    terms: SlotTerms, part: slice, statistics_5N: torch.Tensor, weights_N: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Write the slots' terms; return the factors of this rank's product and of the label's row in the gradient."""
    highest_2N, sums_2N = statistics_5N[HIGHEST : LABEL_LOGIT + 1], statistics_5N[OTHERS : WEIGHTED_OTHERS + 1]
    if group is not None:
        dist.all_reduce(highest_2N, dist.ReduceOp.MAX, group=group)
    highest_N, label_logit_N = highest_2N
    # From this rank's reference to the highest logit of all ranks.
    shift_N = (statistics_5N[REFERENCE] - highest_N).clamp(min=LOWEST.value)
    factor_N = shift_N.exp()
    sums_2N[1] += shift_N * sums_2N[0]
    sums_2N *= factor_N
    if group is not None:
        dist.all_reduce(sums_2N, group=group)
    weights_N = weights_N / write_terms(terms, part, label_logit_N - highest_N, *sums_2N)
    return torch.stack((weights_N * factor_N, weights_N * sums_2N[0]))


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> None:
    """Write `left @ right` to `out` or add it there; where `out` has a wider dtype, nothing is rounded to theirs."""
    beta = 1 if adds else 0
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta, out=out)
    elif left.is_cuda:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, out=out)
    else:
        # torch's CPU has no product with a wider result; Triton's interpreter brings us here.
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=beta, out=out)
