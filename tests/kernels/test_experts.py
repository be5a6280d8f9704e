"""Products of tokens with their experts' matrices, and the kernels of experts in Triton's interpreter."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_megapack.kernels import grouped

INTERPRETED = Path(__file__).with_name("interpreted_experts.py")


def test_the_kernels_in_the_interpreter_equal_plain_pytorch():
    """A process of its own, since Triton reads TRITON_INTERPRET when it is first imported."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; it has no wheels for this platform")
    command = [sys.executable, "-m", "pytest", str(INTERPRETED), "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == 36
    assert "skipped" not in done.stdout


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
