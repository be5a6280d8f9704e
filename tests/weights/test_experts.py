"""Layouts of experts' factors: what peft computes from them, and that every conversion can be undone exactly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from hf_megapack.errors import ExportError
from hf_megapack.weights.adapter import LoraSpec, scaling_of
from hf_megapack.weights.experts import (
    alpha_for,
    are_block_diagonal,
    flatten_experts,
    fuse_gate_up,
    split_gate_up,
    stack_experts,
)

# peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def random_pair(num_experts, rank, in_features, out_features, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_experts, rank, in_features), (num_experts, out_features, rank)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def spec_of(rank, scaling, use_rslora=False):
    alpha = scaling * (math.sqrt(rank) if use_rslora else rank)
    return LoraSpec(rank, alpha, scaling)


SIZES = st.tuples(*(st.integers(1, 5) for _ in range(4)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SIZES)
def test_flat_factors_can_be_stacked_again(sizes):
    pair = random_pair(*sizes)
    num_experts, rank, in_features, out_features = sizes
    flat = flatten_experts(pair)
    shapes = (num_experts * rank, in_features), (out_features, rank * num_experts)
    assert tuple(tuple(factor.shape) for factor in flat) == shapes
    for back, factor in zip(stack_experts(flat, rank), pair, strict=True):
        assert torch.equal(back, factor)


class Experts(torch.nn.Module):
    """Nothing but a stacked weight."""

    def __init__(self, num_experts, out_features, in_features):
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.zeros(num_experts, out_features, in_features))


@pytest.mark.parametrize("sizes", [(4, 2, 8, 6), (3, 5, 4, 4), (2, 1, 3, 7)])
def test_peft_makes_of_flat_factors_what_each_expert_should_get(sizes):
    num_experts, rank, in_features, out_features = sizes
    model = torch.nn.ModuleDict({"experts": Experts(num_experts, out_features, in_features)})
    config = LoraConfig(r=rank, lora_alpha=3, target_modules=[], target_parameters=["experts.down_proj"])
    wrapper = get_peft_model(model, config).base_model.model["experts"]
    pair = random_pair(*sizes)
    flat_a, flat_b = flatten_experts(pair)
    wrapper.lora_A["default"].weight.data = flat_a
    wrapper.lora_B["default"].weight.data = flat_b
    expected = torch.stack([3 / rank * factor_b @ factor_a for factor_a, factor_b in zip(*pair, strict=True)])
    torch.testing.assert_close(wrapper.get_delta_weight("default"), expected)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(SIZES, st.integers(1, 5), st.sampled_from(["both", "gate", "up"]), st.booleans(), st.integers(1, 64))
def test_fused_adapter_does_what_two_do_and_comes_apart_exactly(sizes, up_rank, which, use_rslora, quarters):
    num_experts, gate_rank, in_features, out_features = sizes
    scaling = quarters / 4
    apart = {
        "gate_proj": (
            spec_of(gate_rank, scaling, use_rslora),
            random_pair(num_experts, gate_rank, in_features, out_features, seed=1),
        ),
        "up_proj": (
            spec_of(up_rank, scaling, use_rslora),
            random_pair(num_experts, up_rank, in_features, out_features, seed=2),
        ),
    }
    if which != "both":
        apart = {f"{which}_proj": apart[f"{which}_proj"]}
    spec, pair = fuse_gate_up("e", apart, use_rslora=use_rslora)
    assert spec.rank == sum(part.rank for part, _ in apart.values())
    assert spec.scaling == scaling_of(spec.rank, spec.alpha, use_rslora=use_rslora)
    # The next double at most: float32 factors do not show it.
    assert math.isclose(spec.scaling, scaling, rel_tol=2.0**-52)

    delta = pair[1].double() @ pair[0].double()
    halves = dict(zip(("gate_proj", "up_proj"), delta.chunk(2, dim=1), strict=True))
    for projection, half in halves.items():
        expected = torch.zeros_like(half)
        if projection in apart:
            factor_a, factor_b = apart[projection][1]
            expected = factor_b.double() @ factor_a.double()
        torch.testing.assert_close(half, expected, rtol=1e-12, atol=1e-12)

    back = split_gate_up("e", pair, {projection: part for projection, (part, _) in apart.items()})
    assert list(back) == list(apart)
    for projection, (part, factors) in back.items():
        assert part == apart[projection][0]
        assert all(torch.equal(found, given) for found, given in zip(factors, apart[projection][1], strict=True))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 300), st.floats(2.0**-10, 2.0**10), st.booleans())
def test_alpha_gives_its_scale(rank, scaling, use_rslora):
    """The next double at most, and exactly where the rank is a power of two."""
    found = scaling_of(rank, alpha_for(scaling, rank, use_rslora=use_rslora), use_rslora=use_rslora)
    assert math.isclose(found, scaling, rel_tol=2.0**-52)
    if not use_rslora and rank & (rank - 1) == 0:
        assert found == scaling


def test_alpha_is_the_sum_for_equal_scales():
    """No rounding where users would see it: 5 / 3 has no exact double, twice 5 over twice 3 is the same one."""
    for rank in range(1, 40):
        for alpha in (1, 5, 16, 7.5):
            assert alpha_for(alpha / rank, 2 * rank, use_rslora=False, guesses=(2 * alpha,)) == 2 * alpha


def test_blocks_are_recognised_only_where_they_are_certain():
    specs = {"gate_proj": spec_of(2, 1.0), "up_proj": spec_of(2, 1.0)}
    apart = {name: (spec, random_pair(3, 2, 4, 5, seed)) for seed, (name, spec) in enumerate(specs.items())}
    _, (_, blocks) = fuse_gate_up("e", apart, use_rslora=False)
    assert are_block_diagonal([blocks])
    # An expert without a token has zeros; an adapter without any has nothing to tell.
    untrained = blocks.clone()
    untrained[1] = 0
    assert are_block_diagonal([untrained, torch.zeros_like(blocks)])
    assert not are_block_diagonal([torch.zeros_like(blocks)])
    assert not are_block_diagonal([blocks, torch.randn(3, 10, 4)])
    assert not are_block_diagonal([blocks[..., :3]])
    only_gate = blocks.clone()
    only_gate[:, 5:] = 0
    assert not are_block_diagonal([only_gate])
    assert not are_block_diagonal([])
    touched = blocks.clone()
    touched[2, 9, 0] = 1e-30
    assert not are_block_diagonal([touched])
    with pytest.raises(ExportError, match="not made of their blocks"):
        split_gate_up("e", (torch.zeros(3, 4, 4), touched), specs)
