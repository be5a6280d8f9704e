"""Matrix products of tokens that are sorted by expert, each with the matrix of its own expert.

In bfloat16 on a GPU each is one kernel, and the host never learns how many tokens an expert has; elsewhere, for other
dtypes and for unaligned sizes, a loop over the experts, the plain twin.

Shapes: N tokens, E experts, I inputs, O outputs.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import grouped_mm, linear

# The kernels want rows of 16 bytes.
ALIGNMENT = 8


class TokenGroups(NamedTuple):
    """Which tokens belong to which expert.

    Attributes:
        ends_E: Number of tokens of all experts up to and including each one. int32 on the tokens' device, shape (E,).
    """

    ends_E: torch.Tensor

    @classmethod
    def of(cls, counts_E: torch.Tensor, device: torch.device) -> "TokenGroups":
        """Return the groups of so many tokens per expert.

        Args:
            counts_E: Integer, shape (E,); some may be 0.
            device: Where the tokens are.
        """
        return cls(counts_E.to(device, non_blocking=True).cumsum(0, dtype=torch.int32))

    def sizes(self) -> list[int]:
        """Return the number of tokens of each expert; the host waits for the device."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).tolist()


def grouped_product(input_NI: torch.Tensor, weight_EOI: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
    """Return x W^T for each token x and its expert's W.

    Args:
        input_NI: Tokens sorted by expert. Floating, contiguous, shape (N, I).
        weight_EOI: Same dtype, contiguous, shape (E, O, I).
        groups: Which tokens belong to which expert.

    Returns:
        Same dtype, shape (N, O).
    """
    if _has_kernel(input_NI, *weight_EOI.shape[1:]):
        return grouped_mm(input_NI, weight_EOI.transpose(1, 2), offs=groups.ends_E)
    parts = input_NI.split(groups.sizes())
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weight_EOI.unbind(), strict=True)])


def grouped_product_back(grad_NO: torch.Tensor, weight_EOI: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
    """Return y W for each token y and its expert's W: the way back through `grouped_product`.

    Args:
        grad_NO: Tokens sorted by expert. Floating, contiguous, shape (N, O).
        weight_EOI: Same dtype, contiguous, shape (E, O, I).
        groups: Which tokens belong to which expert.

    Returns:
        Same dtype, shape (N, I).
    """
    if _has_kernel(grad_NO, *weight_EOI.shape[1:]):
        return grouped_mm(grad_NO, weight_EOI, offs=groups.ends_E)
    parts = grad_NO.split(groups.sizes())
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EOI.unbind(), strict=True)])


def grouped_outer(left_NO: torch.Tensor, right_NI: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
    """Return the sum of y x^T over the tokens of each expert, in at least float32; one of O and I should be small.

    Args:
        left_NO: Tokens y sorted by expert. Floating, contiguous, shape (N, O).
        right_NI: The same tokens x. Same dtype, contiguous, shape (N, I).
        groups: Which tokens belong to which expert.

    Returns:
        float32 or wider, shape (E, O, I); zero for an expert without tokens.
    """
    if _has_kernel(left_NO, left_NO.shape[1], right_NI.shape[1]):
        from hf_megapack.kernels.fused_experts import sums_of_outer_products

        if left_NO.shape[1] <= right_NI.shape[1]:
            return sums_of_outer_products(left_NO, right_NI, groups.ends_E)
        return sums_of_outer_products(right_NI, left_NO, groups.ends_E).transpose(1, 2)
    wide, sizes = torch.promote_types(left_NO.dtype, torch.float32), groups.sizes()
    parts = zip(left_NO.to(wide).split(sizes), right_NI.to(wide).split(sizes), strict=True)
    return torch.stack([left.T @ right for left, right in parts])


def _has_kernel(tokens: torch.Tensor, *sizes: int) -> bool:
    """Whether the kernels compute this: bfloat16 on a GPU, at least one token, aligned rows."""
    is_fast = tokens.is_cuda and tokens.dtype == torch.bfloat16 and len(tokens) > 0
    return is_fast and not any(size % ALIGNMENT for size in sizes)
