"""Triton kernels between the two matrix products of a linear cross-entropy.

One read of the logits is enough. Each row's exponentials are written over its logits as soon as they are read, relative
to a reference that need not be the row's maximum: it is a logit of the row at most HEADROOM below it. The right factor
per row is known at the end and is applied to the product with the head, which is linear in it. Only the label's own
element is corrected before, so that a confident slot's `p - 1` is rounded relative to itself.

    exps[n, v] = exp(logit[n, v] - reference[n])                               `exponentiate_rows`
    exps[n, label] -= normaliser * exp(highest - reference[n])                 `settle_rows`
    grad[n] = (exps @ head)[n] * weight * exp(reference[n] - highest) / normaliser

bfloat16 has float32's exponents, so exponentials up to exp(HEADROOM) keep their precision.

Does no product and no communication. Rows and sizes are those of one chunk. Imports Triton.
"""

import torch
import triton
import triton.language as tl

# A reference is at most this far below the highest logit of its row; one that falls behind is raised, at the price of
# going over what the row has written so far.
HEADROOM = tl.constexpr(20.0)
# How far above the reference of the label's own rank the highest logit of all ranks counts: exp() of more than 88 would
# overflow in the label's element. Beyond it the rank's others are below 152,000 * exp(HEADROOM - FARTHEST) =
# 6e-13 of the whole, of which the label's element is nearly all.
FARTHEST = tl.constexpr(60.0)
SETTLE_ROWS = 128
# Rows of the statistics that exponentiate_rows leaves for settle_rows.
HIGHEST, LABEL_LOGIT, OTHERS, WEIGHTED_OTHERS, REFERENCE = range(5)
NUM_STATISTICS = 5


@triton.jit
def _exponentiate_rows(  # noqa: PLR0913 (a kernel takes pointers and strides one by one)
    logits_ptr,
    exps_ptr,
    labels_ptr,
    statistics_ptr,
    num_columns,
    logits_stride,
    exps_stride,
    statistics_stride,
    first_token,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    exps_ptr += row * exps_stride
    label = tl.load(labels_ptr + row) - first_token
    is_mine = (label >= 0) & (label < num_columns)
    label_logit = tl.load(logits_ptr + label, mask=is_mine, other=float("-inf")).to(tl.float32)
    # The label is often the highest: a good first reference.
    reference = label_logit
    highest = label_logit
    others, weighted_others = 0.0, 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < num_columns
        logits = tl.load(logits_ptr + columns, mask=is_column, other=float("-inf")).to(tl.float32)
        block_highest = tl.max(logits, axis=0)
        highest = tl.maximum(highest, block_highest)
        if block_highest > reference + HEADROOM:
            is_first = reference == float("-inf")
            shift = tl.where(is_first, 0.0, reference - block_highest)
            factor = tl.where(is_first, 0.0, tl.exp(shift))
            weighted_others = (weighted_others + shift * others) * factor
            others = others * factor
            reference = block_highest
            if WRITES:
                # Other threads may have written what this one reads.
                tl.debug_barrier()
                for earlier in tl.range(0, start, BLOCK, num_stages=1):
                    exp_ptr = exps_ptr + earlier + tl.arange(0, BLOCK)
                    tl.store(exp_ptr, (tl.load(exp_ptr).to(tl.float32) * factor).to(exps_ptr.dtype.element_ty))
        relative = logits - tl.where(reference == float("-inf"), 0.0, reference)
        exps = tl.exp(relative)
        other_exps = tl.where(columns == label, 0.0, exps)
        others += tl.sum(other_exps, axis=0)
        weighted_others += tl.sum(tl.where(other_exps == 0.0, 0.0, other_exps * relative), axis=0)
        if WRITES:
            # They lie on the logits, no further on than these: every thread must have read its own.
            tl.debug_barrier()
            tl.store(exps_ptr + columns, exps.to(exps_ptr.dtype.element_ty), mask=is_column)
    shift = tl.where(highest == float("-inf"), 0.0, reference - highest)
    factor = tl.exp(shift)
    statistics_ptr += row
    tl.store(statistics_ptr, highest)
    tl.store(statistics_ptr + statistics_stride, label_logit)
    tl.store(statistics_ptr + 2 * statistics_stride, others * factor)
    tl.store(statistics_ptr + 3 * statistics_stride, (weighted_others + shift * others) * factor)
    tl.store(statistics_ptr + 4 * statistics_stride, reference)


@triton.jit
def _settle_rows(  # noqa: PLR0913 (a kernel takes pointers and strides one by one)
    exps_ptr,
    labels_ptr,
    weights_ptr,
    statistics_ptr,
    nll_ptr,
    entropy_ptr,
    is_correct_ptr,
    factors_ptr,
    num_rows,
    num_columns,
    exps_stride,
    statistics_stride,
    first_token,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    statistics_ptr += rows
    highest = tl.load(statistics_ptr, mask=is_row, other=0.0)
    label_logit = tl.load(statistics_ptr + statistics_stride, mask=is_row, other=0.0)
    others = tl.load(statistics_ptr + 2 * statistics_stride, mask=is_row, other=1.0)
    weighted_others = tl.load(statistics_ptr + 3 * statistics_stride, mask=is_row, other=0.0)
    relative = label_logit - highest
    label_exp = tl.exp(relative)
    normaliser = others + label_exp
    weighted_logits = weighted_others + tl.where(label_exp == 0.0, 0.0, label_exp * relative)
    log_normaliser = tl.log(normaliser)
    tl.store(nll_ptr + rows, log_normaliser - relative, mask=is_row)
    tl.store(entropy_ptr + rows, log_normaliser - weighted_logits / normaliser, mask=is_row)
    tl.store(is_correct_ptr + rows, (label_logit == highest).to(tl.int8), mask=is_row)
    if WRITES:
        reference = tl.load(statistics_ptr + 4 * statistics_stride, mask=is_row, other=0.0)
        weight = tl.load(weights_ptr + rows, mask=is_row, other=0.0)
        label = tl.load(labels_ptr + rows, mask=is_row, other=0) - first_token
        is_mine = is_row & (label >= 0) & (label < num_columns)
        shift = highest - reference
        shift = tl.where(is_mine, tl.minimum(shift, FARTHEST), shift)
        tl.store(factors_ptr + rows, weight * tl.exp(-shift) / normaliser, mask=is_row)
        label_ptr = exps_ptr + rows.to(tl.int64) * exps_stride + label
        tl.store(label_ptr, (-others * tl.exp(shift)).to(exps_ptr.dtype.element_ty), mask=is_mine)


def exponentiate_rows(
    logits_NV: torch.Tensor,
    exps_NV: torch.Tensor | None,
    labels_N: torch.Tensor,
    *,
    first_token: int,
    block: int,
    num_warps: int,
) -> torch.Tensor:
    """Write each row's exponentials over its logits and return the rows' statistics.

    Args:
        logits_NV: bfloat16 or float32; each row contiguous.
        exps_NV: Where the exponentials go: each row may begin where that of `logits_NV` does, with elements no wider.
            None if only the statistics are wanted.
        labels_N: Token that each row predicts. int64.
        first_token: The token of the first column.
        block: Columns read at once, a power of two.
        num_warps: Warps per row.

    Returns:
        float32, shape (5, N): the highest logit; the label's logit, minus infinity if its column is not here; the sum
        of exp(logit - highest) and that of exp(logit - highest) * (logit - highest), both without the label; the
        reference of `exps_NV`, minus infinity for a row without finite logits.
    """
    num_rows, num_columns = logits_NV.shape
    statistics_5N = torch.empty((NUM_STATISTICS, num_rows), dtype=torch.float32, device=logits_NV.device)
    target_NV = logits_NV if exps_NV is None else exps_NV
    _exponentiate_rows[(num_rows,)](
        logits_NV,
        target_NV,
        labels_N,
        statistics_5N,
        num_columns,
        logits_NV.stride(0),
        target_NV.stride(0),
        statistics_5N.stride(0),
        first_token,
        WRITES=exps_NV is not None,
        BLOCK=block,
        num_warps=num_warps,
    )
    return statistics_5N


def settle_rows(
    exps_NV: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    statistics_5N: torch.Tensor,
    *,
    first_token: int,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor | None:
    """Write the rows' terms, replace the label's element of `exps_NV` and return the factors of the product's rows.

    Args:
        exps_NV: What `exponentiate_rows` wrote; None for the terms alone.
        labels_N: Token that each row predicts. int64.
        weights_N: Factor of each row's loss. float32.
        statistics_5N: As `exponentiate_rows` returns them, the first four over all columns of all ranks, the last of
            this rank's.
        first_token: The token of the first column.
        into: Negative log-likelihood and entropy, float32, and whether the label is a highest one, bool, each shape
            (N,).

    Returns:
        float32, shape (N,): `factors[n] * (exps_NV @ head)[n]` is the gradient of row n. None without `exps_NV`.
    """
    num_rows = labels_N.shape[0]
    writes = exps_NV is not None
    factors_N = torch.empty_like(weights_N) if writes else None
    nll_N, entropy_N, is_correct_N = into
    _settle_rows[(triton.cdiv(num_rows, SETTLE_ROWS),)](
        exps_NV if writes else statistics_5N,
        labels_N,
        weights_N,
        statistics_5N,
        nll_N,
        entropy_N,
        is_correct_N.view(torch.int8),
        factors_N if writes else weights_N,
        num_rows,
        exps_NV.shape[1] if writes else 0,
        exps_NV.stride(0) if writes else 0,
        statistics_5N.stride(0),
        first_token,
        WRITES=writes,
        ROWS=SETTLE_ROWS,
    )
    return factors_N
