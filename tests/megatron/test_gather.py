"""The dispatcher that gathers slots: its plan against loops, and itself against the all-to-all and one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hf_megapack.megatron.dispatch import SortingDispatcher
from hf_megapack.megatron.experts import Experts
from hf_megapack.megatron.gather import (
    GatheringDispatcher,
    SlotShares,
    _SumRowsOfAll,
    _TakeRowsOfAll,
    chosen_experts,
    plan_gathered,
)
from hf_megapack.megatron.host import compute_device, host_device
from hf_megapack.megatron.lora_products import origin_of
from hf_megapack.weights.adapter import LoraSpec
from tests.helpers.spawn import run_ranks
from tests.megatron.test_dispatch import routing

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 3, 5, 4
# Of each rank; the last of two ranks has fewer than the first, the second of three more.
NUM_SLOTS = {2: (12, 7), 3: (7, 12, 1)}
LEAVES = ("gate_proj", "up_proj", "down_proj")
on_host = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are those of a CPU")


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), st.data())
def test_rows_are_sorted_by_expert_then_gathered_slot_and_those_of_other_ranks_are_left_out(
    num_ranks, num_places, num_local_experts, data
):
    num_experts = num_ranks * num_local_experts
    top_k, rank = data.draw(st.integers(1, num_experts)), data.draw(st.integers(0, num_ranks - 1))
    lengths = data.draw(st.lists(st.integers(1, num_places), min_size=num_ranks, max_size=num_ranks))
    first = rank * num_local_experts
    chosen = [routing(length, num_experts, top_k, seed) for seed, length in enumerate(lengths)]
    gathered = torch.full((num_ranks * num_places, top_k), -1)
    for index, part in enumerate(chosen):
        gathered[index * num_places : index * num_places + len(part)] = chosen_experts(part, top_k)
    plan = plan_gathered(gathered.int() - first, num_local_experts, None)
    expected = [
        (expert, index * num_places + slot)
        for expert in range(first, first + num_local_experts)
        for index, part in enumerate(chosen)
        for slot in range(len(part))
        if part[slot, expert]
    ]
    assert plan.slot_of_row.tolist() == [slot for _, slot in expected]
    assert gathered.flatten()[plan.choice_of_row].tolist() == [expert for expert, _ in expected]
    counts = [sum(owner == expert for owner, _ in expected) for expert in range(first, first + num_local_experts)]
    assert plan.counts.tolist() == counts
    for slot, rows in enumerate(plan.rows_of_slot.tolist()):
        assert [row for row in rows if row >= 0] == [row for row, pair in enumerate(expected) if pair[1] == slot]
        assert len(rows) == top_k


def make_experts(first: int, num_experts: int, dtype: torch.dtype) -> Experts:
    """Return some of the experts of a layer, the same whoever makes them."""
    sizes = SimpleNamespace(hidden_size=HIDDEN, moe_ffn_hidden_size=INNER, params_dtype=dtype)
    module = Experts(num_experts, sizes)
    for leaf, rank in zip(LEAVES, (2, 3, 2), strict=True):
        module.adapt(leaf, LoraSpec(rank, 2 * rank, 2.0))
    if dtype == torch.float64:
        module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            every = torch.randn(NUM_EXPERTS, *parameter.shape[1:], generator=generator, dtype=torch.float64)
            parameter.copy_(every[first : first + num_experts] * 0.5)
    module.fc1.requires_grad_(False)
    module.fc2.requires_grad_(False)
    return module


def make_layer(case: str, world_size: int, dtype: torch.dtype) -> list[dict]:
    """Return what comes to a layer on each rank: slots, choices, weights, and the gradient of the output."""
    generator, ranks = torch.Generator().manual_seed(1), []
    for rank, length in enumerate(NUM_SLOTS[world_size]):
        chosen = routing(length, NUM_EXPERTS, TOP_K, seed=rank)
        if case == "lopsided":
            # All rows go to the first rank's experts, or to the first two's; the last gets none.
            chosen = torch.arange(NUM_EXPERTS).expand(length, -1) < TOP_K
        weights = torch.rand(length, NUM_EXPERTS, generator=generator, dtype=torch.float64) + 0.1
        slots, grad = torch.randn(2, length, 1, HIDDEN, generator=generator, dtype=torch.float64)
        wide = torch.promote_types(dtype, torch.float32)
        made = {"slots": slots.to(dtype), "weights": (weights * chosen).to(wide), "grad": grad.to(dtype)}
        ranks.append({name: value.to(compute_device()) for name, value in (made | {"routing": chosen}).items()})
    return ranks


def make_dispatcher(kind: type, group: dist.ProcessGroup | None):
    config = SimpleNamespace(moe_router_topk=TOP_K, num_moe_experts=NUM_EXPERTS)
    return kind(config, SimpleNamespace(ep=group, expt_tp=None, tp_ep=group))


def run_layer(dispatcher, experts: Experts, given: dict) -> dict[str, torch.Tensor]:
    """Take one rank through a layer of experts and back, in Megatron-Core's order, and return all that was seen."""
    slots, weights = (given[name].detach().clone().requires_grad_() for name in ("slots", "weights"))
    experts.stack_factors(wants_grad=True)
    sent = dispatcher.dispatch_preprocess(slots, given["routing"], weights)
    rows, counts, row_weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    seen = {"rows": rows, "counts": counts, "row weights": row_weights, "has origin": origin_of(rows) is not None}
    results, _ = experts(rows, counts, row_weights)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(results)))
    output.backward(given["grad"])
    experts.collect_gradients()
    factors = {f"lora_{kind} {leaf}": getattr(experts, f"lora_{kind}")[leaf].grad for leaf in LEAVES for kind in "ab"}
    assert output.shape == slots.shape
    return seen | {"results": results, "output": output, "slots": slots.grad, "weights": weights.grad} | factors


def compare_dispatchers(rank: int, world_size: int) -> None:
    """Compare the two dispatchers with each other to the bit where they should be, and with one process."""
    num_local, group, lengths = NUM_EXPERTS // world_size, dist.group.WORLD, NUM_SLOTS[world_size]
    cases = [(case, dtype) for case in ("any", "lopsided") for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    for case, dtype in cases:
        layer = make_layer(case, world_size, dtype)
        everything = {name: torch.cat([part[name] for part in layer]) for name in layer[0]}
        alone = run_layer(make_dispatcher(SortingDispatcher, None), make_experts(0, NUM_EXPERTS, dtype), everything)
        for is_recomputed in (False, True):
            seen = []
            for kind in (SortingDispatcher, GatheringDispatcher):
                dispatcher, experts = make_dispatcher(kind, group), make_experts(rank * num_local, num_local, dtype)
                experts.is_recomputed = is_recomputed
                if kind is GatheringDispatcher:
                    dispatcher.expect(max(lengths), is_recomputed=is_recomputed)
                with host_device():
                    seen.append(run_layer(dispatcher, experts, layer[rank]))
            theirs, ours = seen
            assert ours["has origin"] == (is_recomputed and world_size < TOP_K)
            assert (case == "lopsided" and rank == world_size - 1) == (len(ours["rows"]) == 0)
            summed = ("has origin", "output", "slots")
            assert all(torch.equal(ours[name], value) for name, value in theirs.items() if name not in summed)
            bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
            for name in ("output", "slots", "weights"):
                for expected in (theirs[name], alone[name][own]):
                    torch.testing.assert_close(ours[name], expected, rtol=bound, atol=bound)
            mine = slice(rank * num_local, (rank + 1) * num_local)
            for name in (name for name in alone if name.startswith("lora")):
                torch.testing.assert_close(ours[name], alone[name][mine], rtol=10 * bound, atol=10 * bound)
                assert case == "lopsided" or ours[name].abs().max() > 0.1


@on_host
@pytest.mark.parametrize("world_size", [2, 3])
def test_both_dispatchers_compute_what_one_process_computes(world_size):
    run_ranks(compare_dispatchers, world_size, world_size)


def sum_many_ones(rank: int) -> None:
    """Send ones through 257 experts of the first rank and one of the second, there and back."""
    experts, device = torch.arange(258, dtype=torch.int32, device=compute_device()).expand(2, -1), compute_device()
    shares = SlotShares(dist.group.WORLD, 1, 1)
    plan = plan_gathered(experts - rank * 257, 257, shares)
    assert plan.counts.sum() == (514, 2)[rank]
    rows = torch.ones(len(plan.slot_of_row), 1, dtype=torch.bfloat16, device=device)
    assert _SumRowsOfAll.apply(rows, plan).item() == 258.0
    slot = torch.ones(1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    gathered = torch.ones(2, 1, dtype=torch.bfloat16, device=device), torch.ones(2, 258, device=device)
    taken, _ = _TakeRowsOfAll.apply(slot, torch.ones(1, 258, device=device, requires_grad=True), gathered, plan)
    taken.backward(rows)
    assert slot.grad.item() == 258.0


@on_host
def test_sums_of_ranks_travel_in_float32():
    """257 is no bfloat16 number: rounded to 256 before the last one is added, the sum would end as 256."""
    run_ranks(sum_many_ones, 2)


def be_longer_than_expected(rank: int) -> None:
    dispatcher = make_dispatcher(GatheringDispatcher, dist.group.WORLD)
    layer = make_layer("any", 2, torch.float32)[rank]
    for expected in (0, 7):
        dispatcher.expect(expected, is_recomputed=False)
        try:
            dispatcher.dispatch_preprocess(layer["slots"], layer["routing"], layer["weights"])
        except AssertionError:
            continue
        assert (expected, rank) == (7, 1)


@on_host
def test_a_row_that_nobody_told_of_stops_before_anything_is_sent():
    run_ranks(be_longer_than_expected, 2)


def test_chosen_experts_of_a_slot_ascend():
    chosen = routing(40, 9, 4, seed=5)
    expected = np.stack([np.flatnonzero(slot) for slot in chosen.numpy()])
    assert chosen_experts(chosen, 4).tolist() == expected.tolist()
