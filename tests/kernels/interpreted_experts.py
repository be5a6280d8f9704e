"""The Triton kernels of experts in Triton's interpreter, against plain PyTorch in float64.

test_experts.py runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import pytest
import torch

from hf_megapack.kernels import experts, fused_experts, grouped

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", sorted(BOUNDS, key=str))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert ours.shape == expected.shape
    assert (ours.double() - expected).norm() <= bound * expected.norm()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (5, 35), (3, 1500)])
def test_weighted_swiglu_and_its_gradients(shape, dtype):
    num_tokens, num_channels = shape
    gate_up = random(num_tokens, 2 * num_channels, dtype=dtype)
    weights = random(num_tokens, dtype=torch.float32, seed=1)
    grad = random(num_tokens, num_channels, dtype=dtype, seed=2)
    wide, wide_weights = gate_up.double().requires_grad_(), weights.double().requires_grad_()
    expected = experts.weighted_swiglu(wide, wide_weights)
    expected_grads = torch.autograd.grad(expected, (wide, wide_weights), grad.double())
    assert_close(fused_experts.weighted_swiglu_forward(gate_up, weights), expected, BOUNDS[dtype])
    for gradients in (fused_experts.weighted_swiglu_gradients, experts.weighted_swiglu_backward):
        for ours, theirs in zip(gradients(gate_up, weights, grad), expected_grads, strict=True):
            assert_close(ours, theirs, BOUNDS[dtype])


@DTYPES
@pytest.mark.parametrize(("num_slots", "num_summands", "num_channels"), [(1, 1, 1), (7, 3, 33), (4, 8, 1500)])
def test_sums_of_rows(num_slots, num_summands, num_channels, dtype):
    rows = random(num_slots * num_summands, num_channels, dtype=dtype)
    index = torch.randperm(num_slots * num_summands, generator=torch.Generator().manual_seed(3))
    index = index.view(num_slots, num_summands)
    expected = rows.double()[index].sum(dim=1)
    assert_close(fused_experts.sums_of_rows(rows, index, dtype), expected, BOUNDS[dtype])
    assert_close(experts.sum_rows(rows, index), expected, BOUNDS[dtype])


@DTYPES
def test_sums_of_fewer_rows_than_there_is_room_for(dtype):
    """In float32 whatever the rows are; the last slot has none."""
    rows, index = random(5, 33, dtype=dtype), torch.tensor([[0, -1, 4], [-1, -1, 2], [1, 3, 0], [-1, -1, -1]])
    expected = torch.stack([rows.double()[[row for row in slot if row >= 0]].sum(dim=0) for slot in index.tolist()])
    for sums in (fused_experts.sums_of_rows, experts.sum_rows):
        ours = sums(rows, index, torch.float32)
        assert ours.dtype == torch.float32
        assert_close(ours, expected, BOUNDS[torch.float32])
    assert torch.equal(experts.sum_rows(rows[:0], index, torch.float32), torch.zeros(4, 33))


# The interpreter takes the bits of bfloat16 for numbers in a dot; float16 stands for both.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("counts", [(5,), (0, 3, 0), (70, 1, 0, 129), (0, 0)])
@pytest.mark.parametrize(("num_narrow", "num_wide"), [(8, 24), (16, 130), (72, 300)])
def test_sums_of_outer_products(counts, num_narrow, num_wide, dtype):
    """Experts without tokens, more tokens and channels than one step takes, sizes that are no power of two."""
    left, right = random(sum(counts), num_narrow, dtype=dtype), random(sum(counts), num_wide, dtype=dtype, seed=1)
    groups = grouped.TokenGroups.of(torch.tensor(counts), left.device)
    expected = grouped.grouped_outer(left.double(), right.double(), groups)
    loop = [a.T @ b for a, b in zip(left.double().split(counts), right.double().split(counts), strict=True)]
    assert torch.equal(expected, torch.stack(loop))
    ours = fused_experts.sums_of_outer_products(left, right, groups.ends_E)
    assert ours.dtype == torch.float32
    assert_close(ours, expected, 2e-6)
