"""What a mixture of experts does to its tokens besides matrix products: weighted activation, and rows summed.

On a GPU each is one Triton kernel; elsewhere, and for other dtypes, the plain PyTorch here. Every sum has one order.

Shapes: T slots, K experts of a slot, N = T * K tokens sorted by expert, D hidden size, F inner size of an expert.
"""

import torch
from torch.nn.functional import silu

from hf_megapack.kernels.pointwise import FUSED_DTYPES


def weighted_swiglu(gate_up_NC: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up * weight of each token.

    Args:
        gate_up_NC: The gate half, then the up half. Floating, contiguous, shape (N, 2 * F).
        weights_N: The router's weight of each token's expert. float32 or wider, shape (N,).

    Returns:
        Same dtype as `gate_up_NC`, shape (N, F).
    """
    if _is_fused(gate_up_NC):
        from hf_megapack.kernels.fused_experts import weighted_swiglu_forward

        return weighted_swiglu_forward(gate_up_NC, weights_N)
    gate, up = gate_up_NC.chunk(2, dim=-1)
    return (silu(gate) * up * weights_N[:, None]).to(gate_up_NC.dtype)


def weighted_swiglu_backward(
    gate_up_NC: torch.Tensor, weights_N: torch.Tensor, grad_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `weighted_swiglu` for its two inputs.

    Args:
        gate_up_NC: As `weighted_swiglu` was given.
        weights_N: As `weighted_swiglu` was given.
        grad_NF: Gradient of its result. Contiguous.

    Returns:
        Shapes and dtypes of the inputs.
    """
    if _is_fused(gate_up_NC):
        from hf_megapack.kernels.fused_experts import weighted_swiglu_gradients

        return weighted_swiglu_gradients(gate_up_NC, weights_N, grad_NF)
    wide = torch.promote_types(gate_up_NC.dtype, torch.float32)
    gate, up = gate_up_NC.to(wide).chunk(2, dim=-1)
    sigmoid, grad = gate.sigmoid(), grad_NF.to(wide)
    activation = gate * sigmoid
    grad_weights = (grad * activation * up).sum(dim=-1).to(weights_N.dtype)
    weighted = grad * weights_N.to(wide)[:, None]
    grad_gate = weighted * up * (sigmoid + activation * (1 - sigmoid))
    return torch.cat((grad_gate, weighted * activation), dim=-1).to(gate_up_NC.dtype), grad_weights


def sum_rows(rows_ND: torch.Tensor, index_TK: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of up to K given rows for each slot, summed in at least float32 in the order given.

    Args:
        rows_ND: Floating, contiguous, shape (N, D).
        index_TK: Which rows; below 0 stands for none. int64, shape (T, K).
        dtype: Of the result, None for that of the rows.

    Returns:
        Shape (T, D); zeros for a slot of no row.
    """
    dtype = dtype or rows_ND.dtype
    if not len(rows_ND):
        return rows_ND.new_zeros(len(index_TK), rows_ND.shape[1], dtype=dtype)
    if _is_fused(rows_ND):
        from hf_megapack.kernels.fused_experts import sums_of_rows

        return sums_of_rows(rows_ND, index_TK, dtype)
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    index = index_TK.flatten()
    chosen_TKD = rows_ND.index_select(0, index.clamp(min=0)).masked_fill(index[:, None] < 0, 0)
    return chosen_TKD.unflatten(0, index_TK.shape).sum(dim=1, dtype=wide).to(dtype)


def _is_fused(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in FUSED_DTYPES and len(tensor) > 0
