"""Rows of slots and chosen experts, laid out and put together again, against loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.megatron.dispatch import _SumRows, _TakeRows, plan_rows


def routing(num_slots: int, num_experts: int, top_k: int, seed: int) -> torch.Tensor:
    """Return a random choice of `top_k` experts for each slot, some experts chosen often and some never."""
    generator = np.random.default_rng(seed)
    chances = generator.random(num_experts) ** 4 + 1e-9
    routing = torch.zeros(num_slots, num_experts, dtype=torch.bool)
    for slot in range(num_slots):
        chosen = generator.choice(num_experts, top_k, replace=False, p=chances / chances.sum())
        routing[slot, torch.from_numpy(chosen)] = True
    return routing


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_rows_are_sorted_by_expert_then_slot_and_every_slot_finds_its_own(num_slots, num_experts, data):
    top_k, seed = data.draw(st.integers(1, num_experts)), data.draw(st.integers(0, 1000))
    chosen = routing(num_slots, num_experts, top_k, seed)
    plan, pairs = plan_rows(chosen, top_k)
    expected = [(expert, slot) for expert in range(num_experts) for slot in range(num_slots) if chosen[slot, expert]]
    assert plan.slot_of_row.tolist() == [slot for _, slot in expected]
    assert pairs.tolist() == [expert * num_slots + slot for expert, slot in expected]
    for slot in range(num_slots):
        assert plan.rows_of_slot[slot].tolist() == [row for row, pair in enumerate(expected) if pair[1] == slot]


@pytest.mark.parametrize("seed", range(3))
def test_taking_and_summing_rows_are_each_others_transpose(seed):
    plan, _ = plan_rows(routing(11, 5, 3, seed), 3)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(33, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.equal(_TakeRows.apply(slots, plan), slots[plan.slot_of_row])
    expected = torch.zeros(11, 4, dtype=torch.float64).index_add_(0, plan.slot_of_row, rows)
    torch.testing.assert_close(_SumRows.apply(rows, plan), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: _TakeRows.apply(x, plan), slots)
    assert torch.autograd.gradcheck(lambda x: _SumRows.apply(x, plan), rows)


def test_a_slot_of_many_experts_is_summed_in_float32():
    """Each of 256 ones after the first 256 is half a step of bfloat16 there, and would be lost."""
    plan, _ = plan_rows(torch.ones(1, 512, dtype=torch.bool), 512)
    assert _SumRows.apply(torch.ones(512, 1, dtype=torch.bfloat16), plan).item() == 512.0
