"""The Triton kernels of a layer's pointwise parts in Triton's interpreter, against plain PyTorch in float64.

test_pointwise.py runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import pytest
import torch

from hf_megapack.kernels.fused_pointwise import FusedNormAndResidual, FusedSplitHeads, FusedSwiglu
from hf_megapack.kernels.pointwise import HeadNorm, plain_norm_and_residual, plain_split_heads, plain_swiglu

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def compare(ours, plain, inputs, bound):
    """Compare values and gradients of the inputs under random weights."""
    results = []
    for function, tensors in ((ours, inputs), (plain, [x.double() for x in inputs])):
        tensors = [x.detach().requires_grad_() for x in tensors]
        outputs = function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
        grads = torch.autograd.grad(outputs, tensors, weights)
        results.append((*outputs, *grads))
    for name, (mine, twin) in enumerate(zip(*results, strict=True)):
        assert (mine.double() - twin).norm() <= bound * twin.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 70), (2, 1, 4200)])
def test_swiglu(shape, dtype):
    gate_up = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    compare(FusedSwiglu.apply, plain_swiglu, [gate_up], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 1, 70), (5, 128)])
def test_norm_and_residual(shape, read, dtype):
    """Widths that are no power of two, and streams or norms that nobody reads."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=generator).to(dtype) for size in (shape, shape[-1:]))

    def results(outputs):
        return tuple(output for output, is_read in zip(outputs, read, strict=True) if is_read)

    def ours(x):
        return results(FusedNormAndResidual.apply(x, weight, 1e-5))

    def plain(x):
        return results(plain_norm_and_residual(x, weight.double(), 1e-5))

    compare(ours, plain, [hidden], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_groups", "head_dim", "half"), [(4, 2, 16, 8), (6, 1, 24, 12), (3, 3, 16, 4), (9, 3, 20, 2)]
)
def test_split_heads(num_heads, num_groups, head_dim, half, has_norm, dtype):
    """Head sizes that are no power of two, heads turned in part, more heads than one program takes."""
    generator = torch.Generator().manual_seed(head_dim)
    mixed = torch.randn(5, (num_heads + 2 * num_groups) * head_dim, generator=generator).to(dtype)
    angles = torch.randn(5, 1, half, generator=generator)
    rotation = torch.stack((angles.cos(), angles.sin()))
    weights = [torch.randn(head_dim, generator=generator).to(dtype) for _ in range(2)]
    sizes = {"num_groups": num_groups, "head_dim": head_dim}

    def ours(x):
        return FusedSplitHeads.apply(x, rotation, HeadNorm(*weights, 1e-5) if has_norm else None, *sizes.values())

    def plain(x):
        norm = HeadNorm(*(w.double() for w in weights), 1e-5) if has_norm else None
        return plain_split_heads(x, rotation.double(), norm, **sizes)

    compare(ours, plain, [mixed], BOUNDS[dtype])


def test_no_slots():
    empty = torch.empty(0, 64, requires_grad=True)
    FusedSwiglu.apply(empty).sum().backward()
    sum(x.sum() for x in FusedNormAndResidual.apply(empty, torch.ones(64), 1e-5)).backward()
    query, _, _ = FusedSplitHeads.apply(empty, torch.empty(2, 0, 1, 8), None, 1, 16)
    query.sum().backward()
    assert query.shape == (0, 2, 16)
