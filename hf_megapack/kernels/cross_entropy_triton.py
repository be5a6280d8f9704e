"""Triton kernels around the two matrix products of a linear cross-entropy.

A slot's logits come in chunks of columns. The sums and the product with the head go on from chunk to chunk as those of
FlashAttention do from block to block: exponentials are relative to a reference, which is raised, together with all
that was summed so far, when a logit lies HEADROOM above it. The label's column takes no part in this; its share of the
gradient is added at the end in float32, so that a confident slot's `p - 1`, minus the sum of the others, loses nothing.

    exps[n, v] = exp(logit[n, v] - reference[n]), 0 for the label              `exponentiate_rows`
    product[n] = sum of exps[n, v] * head[v] over the columns                  cuBLAS
    grad[n] = weight / normaliser * (exp(reference[n] - highest) * product[n] - others * head[label])
                                                                               `settle_rows`

bfloat16 has float32's exponents, so exponentials up to exp(HEADROOM) keep their precision.

Does no product and no communication. Imports Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# A reference is at most this far below the highest logit of its row's others.
HEADROOM = tl.constexpr(20.0)
# Elements of a gradient that `settle_rows` computes at once.
SETTLE_BLOCK = 1024
# The statistics of a row, float32: its highest logit; the label's; the sum of exp(logit - reference) and that of
# exp(logit - reference) * (logit - reference) over all other tokens; the reference.
HIGHEST, LABEL_LOGIT, OTHERS, WEIGHTED_OTHERS, REFERENCE = range(5)
NUM_STATISTICS = 5
# exp() of less is zero in float32.
LOWEST = tl.constexpr(-200.0)


class Rows(NamedTuple):
    """What goes with some slots through the vocabulary.

    Attributes:
        labels_N: Token that each predicts. int64, contiguous.
        statistics_5N: Of the columns so far. float32, contiguous. At the beginning the sums are 0 and the rest minus
            infinity; the label's logit stays so if its column is not here, and the reference while no logit is finite.
        product_ND: Sum of exps[n, v] * head[v] over the columns so far. float32, contiguous; None if it is not wanted,
            or of no columns.
    """

    labels_N: torch.Tensor
    statistics_5N: torch.Tensor
    product_ND: torch.Tensor | None


@triton.jit
def _add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second


@triton.jit
def _scale(ptr, size, factor, BLOCK: tl.constexpr):
    for begin in tl.range(0, size, BLOCK, num_stages=1):
        elements = begin + tl.arange(0, BLOCK)
        is_element = elements < size
        scaled = tl.load(ptr + elements, mask=is_element).to(tl.float32) * factor
        tl.store(ptr + elements, scaled.to(ptr.dtype.element_ty), mask=is_element)


@triton.jit
def _read_statistics(ptr, stride):
    others, weighted_others = tl.load(ptr + 2 * stride), tl.load(ptr + 3 * stride)
    return tl.load(ptr), tl.load(ptr + stride), others, weighted_others, tl.load(ptr + 4 * stride)


@triton.jit
def _write_statistics(ptr, stride, highest, label_logit, others, weighted_others, reference):  # noqa: PLR0913 - one by one
    tl.store(ptr, highest)
    tl.store(ptr + stride, label_logit)
    tl.store(ptr + 2 * stride, others)
    tl.store(ptr + 3 * stride, weighted_others)
    tl.store(ptr + 4 * stride, reference)


@triton.jit
def _take_label(logits_ptr, label, num_columns, label_logit):
    """Take the label's logit out of the row, if its column is here."""
    if (label >= 0) & (label < num_columns):
        label_logit = tl.load(logits_ptr + label).to(tl.float32)
        # Every thread has it before it goes, and sees none afterwards.
        tl.debug_barrier()
        tl.store(logits_ptr + label, float("-inf"))
        tl.debug_barrier()
    return label_logit


@triton.jit
def _exponentiate_rows(  # noqa: PLR0913 (a kernel takes pointers and strides one by one)
    logits_ptr,
    exps_ptr,
    product_ptr,
    labels_ptr,
    statistics_ptr,
    num_columns,
    hidden_size,
    logits_stride,
    exps_stride,
    product_stride,
    statistics_stride,
    first_token,
    WRITES: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    exps_ptr += row * exps_stride
    product_ptr += row * product_stride
    statistics_ptr += row
    highest, label_logit, others, weighted_others, reference = _read_statistics(statistics_ptr, statistics_stride)
    label_logit = _take_label(logits_ptr, tl.load(labels_ptr + row) - first_token, num_columns, label_logit)
    highest = tl.maximum(highest, label_logit)
    columns = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        # On their way while this block is computed.
        later = columns + BLOCK
        later_logits = tl.load(logits_ptr + later, mask=later < num_columns, other=float("-inf"))
        block_highest = tl.max(logits, axis=0)
        highest = tl.maximum(highest, block_highest)
        if block_highest > reference + HEADROOM:
            shift = tl.maximum(reference - block_highest, LOWEST)
            factor = tl.exp(shift)
            weighted_others = (weighted_others + shift * others) * factor
            others = others * factor
            reference = block_highest
            if WRITES:
                # Other threads may have written what this one reads.
                tl.debug_barrier()
                _scale(exps_ptr, start, factor, BLOCK)
            if HAS_PRODUCT:
                _scale(product_ptr, hidden_size, factor, BLOCK)
        from_reference = tl.where(reference == float("-inf"), 0.0, reference)
        # A logit of minus infinity adds nothing to either sum.
        relative = tl.maximum(logits - from_reference, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        exps = tl.exp(relative)
        block_others, block_weighted = tl.reduce((exps, exps * relative), 0, _add_pairs)
        others += block_others
        weighted_others += block_weighted
        if WRITES:
            # They lie on the logits, no further on than these: every thread must have read its own.
            tl.debug_barrier()
            tl.store(exps_ptr + columns, exps.to(exps_ptr.dtype.element_ty), mask=columns < num_columns)
        logits = later_logits.to(tl.float32)
    _write_statistics(statistics_ptr, statistics_stride, highest, label_logit, others, weighted_others, reference)


@triton.jit
def _settle_rows(  # noqa: PLR0913 (a kernel takes pointers and strides one by one)
    product_ptr,
    head_ptr,
    labels_ptr,
    factors_ptr,
    grad_ptr,
    num_columns,
    hidden_size,
    product_stride,
    head_stride,
    factors_stride,
    grad_stride,
    first_token,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < hidden_size
    label = tl.load(labels_ptr + row) - first_token
    is_mine = (label >= 0) & (label < num_columns)
    grad = tl.load(product_ptr + row * product_stride + elements, mask=is_element) * tl.load(factors_ptr + row)
    label_row = tl.load(head_ptr + label * head_stride + elements, mask=is_element & is_mine, other=0.0)
    grad -= tl.where(is_mine, tl.load(factors_ptr + factors_stride + row), 0.0) * label_row.to(tl.float32)
    tl.store(grad_ptr + row * grad_stride + elements, grad.to(grad_ptr.dtype.element_ty), mask=is_element)


def exponentiate_rows(
    logits_NC: torch.Tensor, exps_NC: torch.Tensor | None, rows: Rows, *, first_token: int, block: int, num_warps: int
) -> None:
    """Write a chunk's exponentials over its logits and go on with the rows' statistics.

    Args:
        logits_NC: The C columns of this chunk, bfloat16 or float32; each row contiguous. Not to be used afterwards.
        exps_NC: Where the exponentials go: each row may begin where that of `logits_NC` does, with elements no wider.
            None if only the statistics are wanted.
        rows: The statistics are changed, and the product is scaled where the row's reference is raised.
        first_token: The token of the first column.
        block: Columns read at once, a power of two.
        num_warps: Warps per row.
    """
    num_rows, num_columns = logits_NC.shape
    target_NC = logits_NC if exps_NC is None else exps_NC
    has_product = rows.product_ND is not None
    product_ND = rows.product_ND if has_product else rows.statistics_5N
    _exponentiate_rows[(num_rows,)](
        logits_NC,
        target_NC,
        product_ND,
        rows.labels_N,
        rows.statistics_5N,
        num_columns,
        product_ND.shape[1],
        logits_NC.stride(0),
        target_NC.stride(0),
        product_ND.stride(0),
        rows.statistics_5N.stride(0),
        first_token,
        WRITES=exps_NC is not None,
        HAS_PRODUCT=has_product,
        BLOCK=block,
        num_warps=num_warps,
    )


def settle_rows(
    rows: Rows, head_VD: torch.Tensor, factors_2N: torch.Tensor, *, first_token: int, grad_ND: torch.Tensor
) -> None:
    """Write the gradient: the product by its factors, less the label's row of the head by its own.

    Args:
        rows: With the product.
        head_VD: Each row contiguous. A label that is not among its rows has no share.
        factors_2N: Of the product and of the label's row. float32, contiguous.
        first_token: The token of the head's first row.
        grad_ND: Where the gradient goes, rounded to its dtype once; each row contiguous.
    """
    num_rows, hidden_size = rows.product_ND.shape
    _settle_rows[(num_rows, triton.cdiv(hidden_size, SETTLE_BLOCK))](
        rows.product_ND,
        head_VD,
        rows.labels_N,
        factors_2N,
        grad_ND,
        head_VD.shape[0],
        hidden_size,
        rows.product_ND.stride(0),
        head_VD.stride(0),
        factors_2N.stride(0),
        grad_ND.stride(0),
        first_token,
        BLOCK=SETTLE_BLOCK,
    )
