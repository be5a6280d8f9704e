"""A linear that is split over ranks against the whole one: values, gradients, and how often results are rounded."""

import pytest
import torch

from hf_megapack.megatron.lora_products import FrozenLinearWithUpdate, StackedFactors
from hf_megapack.megatron.split_products import (
    Crossing,
    SplitInputs,
    SplitInputsWithUpdate,
    SplitOutputs,
    SplitOutputsWithUpdate,
)
from tests.helpers.thread_ranks import run_on_threads

NUM_SLOTS, NUM_IN, NUM_OUT, RANK, RANKS = 24, 96, 64, 8, 2


def stacked(a, b, dtype):
    return StackedFactors(a.to(dtype), b.to(dtype))


def whole(x, weight, a, b, grad):
    """Return the output and the gradients of x, A and B."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    output = FrozenLinearWithUpdate.apply(leaves[0], weight, *leaves[1:], stacked(a, b, x.dtype), None)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


def split(group, function, operands, grad, *, sequence_parallel):
    """Return this rank's output and gradients."""
    x, weight, a, b = operands
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    crossing = Crossing(group, sequence_parallel)
    output = function.apply(leaves[0], weight, *leaves[1:], stacked(a, b, x.dtype), None, crossing)
    return output.detach(), *torch.autograd.grad(output, leaves, grad)


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def case(request):
    generator, dtype = torch.Generator().manual_seed(0), request.param
    shapes = ((NUM_SLOTS, NUM_IN), (NUM_OUT, NUM_IN), (RANK, NUM_IN), (NUM_OUT, RANK), (NUM_SLOTS, NUM_OUT))
    x, weight, a, b, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(dtype), weight.to(dtype), (a / 4).to(wide), (b / 4).to(wide), grad.to(dtype)


def assert_like(ours, expected):
    """Equal in float64; in bfloat16 the same bits but where float32 sums in another order cross a rounding boundary."""
    if expected.dtype == torch.bfloat16:
        assert (ours != expected).float().mean() < 0.03
        torch.testing.assert_close(ours, expected, rtol=2**-7, atol=0.02)
    else:
        tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-2
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_outputs(case, sequence_parallel, monkeypatch):
    x, weight, a, b, grad = case
    rows = NUM_OUT // RANKS

    def run(group):
        part = slice(group.rank() * rows, (group.rank() + 1) * rows)
        own = x.chunk(RANKS)[group.rank()] if sequence_parallel else x
        operands = (own, weight[part], a, b[part])
        return split(group, SplitOutputsWithUpdate, operands, grad[:, part], sequence_parallel=sequence_parallel)

    outputs, grads_x, grads_a, grads_b = zip(*run_on_threads(RANKS, run, monkeypatch), strict=True)
    output, grad_x, grad_a, grad_b = whole(x, weight, a, b, grad)
    assert_like(torch.cat(outputs, dim=1), output)
    assert_like(torch.cat(grads_b), grad_b)
    if sequence_parallel:
        assert_like(torch.cat(grads_x), grad_x)
        assert_like(sum(grads_a), grad_a)
    else:
        for own_x, own_a in zip(grads_x, grads_a, strict=True):
            assert_like(own_x, grad_x)
            assert_like(own_a, grad_a)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_inputs(case, sequence_parallel, monkeypatch):
    x, weight, a, b, grad = case
    columns = NUM_IN // RANKS

    def run(group):
        part = slice(group.rank() * columns, (group.rank() + 1) * columns)
        own_grad = grad.chunk(RANKS)[group.rank()] if sequence_parallel else grad
        operands = (x[:, part], weight[:, part], a[:, part], b)
        return split(group, SplitInputsWithUpdate, operands, own_grad, sequence_parallel=sequence_parallel)

    outputs, grads_x, grads_a, grads_b = zip(*run_on_threads(RANKS, run, monkeypatch), strict=True)
    output, grad_x, grad_a, grad_b = whole(x, weight, a, b, grad)
    assert_like(torch.cat(grads_x, dim=1), grad_x)
    assert_like(torch.cat(grads_a, dim=1), grad_a)
    if sequence_parallel:
        assert_like(torch.cat(outputs), output)
        assert_like(sum(grads_b), grad_b)
    else:
        for own_output, own_b in zip(outputs, grads_b, strict=True):
            assert_like(own_output, output)
            assert_like(own_b, grad_b)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("function", [SplitOutputs, SplitInputs])
def test_without_an_update(case, function, sequence_parallel, monkeypatch):
    x, weight, _, _, grad = case
    splits_outputs = function is SplitOutputs

    def own_slots(tensor, group):
        return tensor.chunk(RANKS)[group.rank()] if sequence_parallel else tensor

    def own_features(tensor, group, dim):
        return tensor.chunk(RANKS, dim=dim)[group.rank()]

    def run(group):
        own_x = own_slots(x, group) if splits_outputs else own_features(x, group, 1)
        own_grad = own_features(grad, group, 1) if splits_outputs else own_slots(grad, group)
        leaf = own_x.clone().requires_grad_()
        part = own_features(weight, group, 0 if splits_outputs else 1)
        output = function.apply(leaf, part, Crossing(group, sequence_parallel))
        return output.detach(), *torch.autograd.grad(output, leaf, own_grad)

    results = run_on_threads(RANKS, run, monkeypatch)
    for parts, whole, is_split in zip(zip(*results, strict=True), (x @ weight.T, grad @ weight), (1, 0), strict=True):
        if splits_outputs == bool(is_split):
            assert_like(torch.cat(parts, dim=1), whole)
        elif sequence_parallel:
            assert_like(torch.cat(parts), whole)
        else:
            for part in parts:
                assert_like(part, whole)
