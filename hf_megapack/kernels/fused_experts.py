"""The Triton kernels behind `experts` and `grouped`.

Each result is written by one program, which sums in float32 in a fixed order: the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl

# Channels that one program handles at a time.
CHANNEL_BLOCK = 1024
# Tokens, narrow and wide dimension of one step of an outer product.
TOKEN_BLOCK, NARROW_BLOCK, WIDE_BLOCK = 64, 64, 128
_SMALLEST_DOT = 16


@triton.jit
def _weighted_swiglu(gate_up, weights, output, num_channels, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + token).to(tl.float32)
    row = gate_up + token * 2 * num_channels
    for start in range(0, num_channels, block):
        channel = start + tl.arange(0, block)
        inside = channel < num_channels
        gate = tl.load(row + channel, mask=inside).to(tl.float32)
        up = tl.load(row + num_channels + channel, mask=inside).to(tl.float32)
        result = gate * tl.sigmoid(gate) * up * weight
        tl.store(output + token * num_channels + channel, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_swiglu_backward(  # noqa: PLR0913 (a kernel's arguments)
    gate_up, weights, grad, grad_gate_up, grad_weights, num_channels, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + token).to(tl.float32)
    row = token * 2 * num_channels
    dtype = grad_gate_up.dtype.element_ty
    partial = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, num_channels, block):
        channel = start + tl.arange(0, block)
        inside = channel < num_channels
        gate = tl.load(gate_up + row + channel, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row + num_channels + channel, mask=inside, other=0.0).to(tl.float32)
        grad_output = tl.load(grad + token * num_channels + channel, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        activation = gate * sigmoid
        partial += grad_output * activation * up
        weighted = grad_output * weight
        grad_gate = weighted * up * (sigmoid + activation * (1 - sigmoid))
        tl.store(grad_gate_up + row + channel, grad_gate.to(dtype), mask=inside)
        tl.store(grad_gate_up + row + num_channels + channel, (weighted * activation).to(dtype), mask=inside)
    tl.store(grad_weights + token, tl.sum(partial, axis=0).to(grad_weights.dtype.element_ty))


@triton.jit
def _sum_rows(rows, index, output, num_channels, num_summands, block: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < num_channels
    total = tl.zeros((block,), dtype=tl.float32)
    for summand in range(num_summands):
        row = tl.load(index + slot * num_summands + summand)
        total += tl.load(rows + row * num_channels + channel, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(output + slot * num_channels + channel, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _outer_products(  # noqa: PLR0913 (a kernel's arguments)
    narrow, wide, ends, output, num_narrow, num_wide,
    token_block: tl.constexpr, narrow_block: tl.constexpr, wide_block: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * narrow_block + tl.arange(0, narrow_block)
    column = tl.program_id(0) * wide_block + tl.arange(0, wide_block)
    has_row, has_column = row < num_narrow, column < num_wide
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((narrow_block, wide_block), dtype=tl.float32)
    for start in range(first, end, token_block):
        token = (start + tl.arange(0, token_block)).to(tl.int64)
        has_token = (token < end)[:, None]
        left = tl.load(
            narrow + token[:, None] * num_narrow + row[None, :], mask=has_token & has_row[None, :], other=0.0
        )
        right = tl.load(
            wide + token[:, None] * num_wide + column[None, :], mask=has_token & has_column[None, :], other=0.0
        )
        total += tl.dot(tl.trans(left), right)
    place = output + (expert * num_narrow + row[:, None]) * num_wide + column[None, :]
    tl.store(place, total, mask=has_row[:, None] & has_column[None, :])


def weighted_swiglu_forward(gate_up_NC: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Do what `experts.weighted_swiglu` says, for at least one token."""
    num_tokens, num_channels = gate_up_NC.shape[0], gate_up_NC.shape[1] // 2
    output = gate_up_NC.new_empty(num_tokens, num_channels)
    block = min(triton.next_power_of_2(num_channels), CHANNEL_BLOCK)
    _weighted_swiglu[(num_tokens,)](gate_up_NC, weights_N.contiguous(), output, num_channels, block=block)
    return output


def weighted_swiglu_gradients(
    gate_up_NC: torch.Tensor, weights_N: torch.Tensor, grad_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `experts.weighted_swiglu_backward` says, for at least one token."""
    num_tokens, num_channels = gate_up_NC.shape[0], gate_up_NC.shape[1] // 2
    grad_gate_up, grad_weights = torch.empty_like(gate_up_NC), torch.empty_like(weights_N)
    block = min(triton.next_power_of_2(num_channels), CHANNEL_BLOCK)
    _weighted_swiglu_backward[(num_tokens,)](
        gate_up_NC, weights_N.contiguous(), grad_NF, grad_gate_up, grad_weights, num_channels, block=block
    )
    return grad_gate_up, grad_weights


def sums_of_rows(rows_ND: torch.Tensor, index_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Do what `experts.sum_rows` says, for at least one row."""
    num_slots, num_summands = index_TK.shape
    num_channels = rows_ND.shape[1]
    output = rows_ND.new_empty(num_slots, num_channels, dtype=dtype)
    block = min(triton.next_power_of_2(num_channels), CHANNEL_BLOCK)
    grid = (num_slots, triton.cdiv(num_channels, block))
    _sum_rows[grid](rows_ND, index_TK.contiguous(), output, num_channels, num_summands, block=block)
    return output


def sums_of_outer_products(narrow_NR: torch.Tensor, wide_NI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Sum the outer products of two vectors over the tokens of each expert.

    Args:
        narrow_NR: Tokens sorted by expert. Contiguous, shape (N, R).
        wide_NI: The same tokens. Same dtype, contiguous, shape (N, I).
        ends_E: Tokens up to and including each expert's. int32, shape (E,).

    Returns:
        float32, shape (E, R, I).
    """
    num_experts, num_narrow, num_wide = len(ends_E), narrow_NR.shape[1], wide_NI.shape[1]
    output = narrow_NR.new_empty(num_experts, num_narrow, num_wide, dtype=torch.float32)
    narrow_block = min(max(triton.next_power_of_2(num_narrow), _SMALLEST_DOT), NARROW_BLOCK)
    grid = (triton.cdiv(num_wide, WIDE_BLOCK), triton.cdiv(num_narrow, narrow_block), num_experts)
    _outer_products[grid](
        narrow_NR, wide_NI, ends_E, output, num_narrow, num_wide,
        token_block=TOKEN_BLOCK, narrow_block=narrow_block, wide_block=WIDE_BLOCK,
    )  # fmt: skip
    return output
