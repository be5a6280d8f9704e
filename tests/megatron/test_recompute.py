"""What "auto" makes of the memory that is free. What a layer keeps is measured on the GPU, in test_gpu.py."""

import pytest

from hf_megapack.megatron.recompute import Choice, LayerMemory, choose


@pytest.mark.parametrize("num_slots", [1, 1000])
def test_a_smaller_budget_never_recomputes_less_and_what_is_chosen_fits(num_slots):
    memory = LayerMemory(kept=100, selective=60, full=10, transient=50)
    before = Choice(0, False)
    for budget in range(2000 * num_slots, 0, -num_slots * 7):
        choice = choose(memory, num_slots=num_slots, num_layers=8, budget=budget)
        assert choice >= before
        before = choice
        per_layer = memory.selective if choice.is_selective else memory.kept
        used = num_slots * (choice.num_full * memory.full + (8 - choice.num_full) * per_layer + memory.transient)
        assert used <= budget or choice == Choice(8, True)
    assert before == Choice(8, True)
