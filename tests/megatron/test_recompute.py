"""What "auto" makes of the memory that is free. What a layer keeps is measured on the GPU, in test_gpu.py."""

from types import SimpleNamespace

import pytest
import torch

from hf_megapack.megatron.recompute import Choice, LayerMemory, RecomputePolicy, choose


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


def test_a_layer_with_experts_keeps_rows_for_each_chosen_expert():
    """Counted by hand for 3 of 4 layers with experts: bfloat16, 2 of 8 experts, a shared one."""
    fields = {
        "params_dtype": torch.bfloat16,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "hidden_size": 10,
        "num_attention_heads": 2,
        "kv_channels": 4,
        "num_query_groups": 1,
        "ffn_hidden_size": 100,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 7,
        "moe_shared_expert_intermediate_size": 5,
        "moe_layer_freq": [0, 1, 1, 1],
        "expert_model_parallel_size": 1,
        "gathers_slots": False,
    }
    attention = 2 * 10 + 2 * (8 + 2 * 4) + 8
    sparse, dense = 2 * 2 * 7 + 3 * 5, 2 * 100
    memory = LayerMemory.of(SimpleNamespace(**fields))
    assert memory.selective == int(2 * (attention + 0.75 * sparse + 0.25 * dense))
    assert memory.kept == int(2 * (attention + 2 * 10 + 0.75 * (sparse + 2 * (10 + 7)) + 0.25 * (dense + 100)))
    # What other ranks have sent is not sent again.
    split = LayerMemory.of(SimpleNamespace(**fields | {"expert_model_parallel_size": 2}))
    assert split.selective == int(2 * (attention + 0.75 * (sparse + 2 * 10) + 0.25 * dense))
    assert split.kept == memory.kept
    # Gathered slots are kept instead where they are fewer: two for each of these, which go to three experts.
    fields |= {"expert_model_parallel_size": 2, "moe_router_topk": 3, "ffn_hidden_size": 1}
    sent, gathered = (LayerMemory.of(SimpleNamespace(**fields | {"gathers_slots": flag})) for flag in (False, True))
    assert sent.selective - gathered.selective == int(2 * 0.75 * (3 - 2) * 10)
    assert sent.kept == gathered.kept
    # Gathered slots, and twice as much in float32 for the sums that leave and for those that come.
    assert gathered.transient - sent.transient == (2 * (1 + 2 + 2) * 2 * 10)


@pytest.mark.parametrize(("expert_size", "expected"), [(1, [0, 4]), (2, [4, 4])])
def test_ranks_that_share_experts_recompute_together_whatever_the_length_of_their_rows(expert_size, expected):
    layout = SimpleNamespace(rank=1, context_size=1, expert_size=expert_size, pipeline_size=1, world_size=1)
    layers = [SimpleNamespace(input_layernorm=Part(), pre_mlp_layernorm=Part(), mlp=Part()) for _ in range(4)]
    config = SimpleNamespace(recompute_granularity="full", recompute_num_layers=None)
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers), config=config)
    policy = RecomputePolicy.__new__(RecomputePolicy)
    policy._mode, policy._layout, policy._may_be_selective, policy._told = "auto", layout, False, set()
    policy._memory = LayerMemory(kept=100, selective=60, full=10, transient=50)
    policy.begin_update(10)
    policy._budget = 1000
    assert [policy.apply(chunk, num_slots).num_full for num_slots in (2, 10)] == expected


class Part:
    """A part of a layer that can be recomputed."""

    is_recomputed = False
