"""Products of tokens with their experts' matrices, and the kernels of experts in Triton's interpreter."""

import pytest
import torch

from hf_megapack.kernels import grouped
from tests.helpers.interpreter import run_in_interpreter


def test_the_kernels_in_the_interpreter_equal_plain_pytorch():
    assert run_in_interpreter("interpreted_experts.py") == 38


@pytest.mark.parametrize("counts", [(5,), (0, 3, 0, 7), (0, 0)])
def test_products_go_through_each_tokens_own_matrix(counts, monkeypatch):
    """The loop against one product per token; torch's grouped kernel, which has a CPU version, against the loop."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(sum(counts), 8, generator=generator), torch.randn(sum(counts), 16, generator=generator)
    weight = torch.randn(len(counts), 16, 8, generator=generator)
    groups = grouped.TokenGroups.of(torch.tensor(counts), x.device)
    assert groups.sizes() == list(counts)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    forward, back = grouped.grouped_product(x, weight, groups), grouped.grouped_product_back(y, weight, groups)
    outer = grouped.grouped_outer(y, x, groups)
    torch.testing.assert_close(forward, torch.einsum("ni,noi->no", x, weight[owner]))
    torch.testing.assert_close(back, torch.einsum("no,noi->ni", y, weight[owner]))
    expected = torch.zeros_like(weight).index_add_(0, owner, torch.einsum("no,ni->noi", y, x))
    torch.testing.assert_close(outer, expected)
    monkeypatch.setattr(grouped, "_has_kernel", lambda tokens, *_sizes: len(tokens) > 0)
    torch.testing.assert_close(grouped.grouped_product(x, weight, groups), forward)
    torch.testing.assert_close(grouped.grouped_product_back(y, weight, groups), back)


def test_sums_of_low_precision_products_are_float32():
    x = torch.ones(300, 8, dtype=torch.bfloat16)
    groups = grouped.TokenGroups.of(torch.tensor([300]), x.device)
    outer = grouped.grouped_outer(x, x, groups)
    assert outer.dtype == torch.float32
    # 300 is no bfloat16 number.
    assert torch.equal(outer, torch.full((1, 8, 8), 300.0))
