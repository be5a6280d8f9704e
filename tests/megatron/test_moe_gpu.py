"""Experts on a GPU: grouped and Triton kernels against the loops, models against transformers, two GPUs against one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.kernels import experts as pointwise
from hf_megapack.kernels import grouped
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.dispatch import _SumRows, plan_rows
from hf_megapack.megatron.experts import Experts
from hf_megapack.weights.adapter import LoraSpec
from tests.helpers.backend_args import backend_args
from tests.helpers.moe_reference import MOE_CONFIGS, MoeReference, save_moe_model
from tests.helpers.reference_model import mape, random_adapter
from tests.helpers.spawn import run_ranks
from tests.megatron.test_gather import compare_dispatchers, sum_many_ones
from tests.megatron.test_layouts import examples, pack
from tests.megatron.test_moe import PEFT_CONFIG
from tests.megatron.test_moe_layouts import LAYOUTS, run_layouts, visit

COUNTS = {"even": (64,) * 8, "uneven": (0, 700, 1, 0, 33, 7, 250, 9), "one": (0, 0, 5, 0, 0, 0, 0, 0)}
BOUND = 1e-2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16)


def assert_close(ours: torch.Tensor, twin: torch.Tensor, bound: float = BOUND) -> None:
    assert ours.shape == twin.shape
    assert (ours.double() - twin.double()).norm() <= bound * twin.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("num_out", "num_in"), [(1536, 2048), (2048, 768), (32, 2048), (1536, 16), (72, 136)])
def test_grouped_products_equal_the_loop(counts, num_out, num_in):
    groups = grouped.TokenGroups.of(torch.tensor(counts), torch.device("cuda"))
    x, y = random(sum(counts), num_in), random(sum(counts), num_out, seed=1)
    weight = random(len(counts), num_out, num_in, seed=2)
    assert grouped._has_kernel(x, *weight.shape[1:])
    assert_close(
        grouped.grouped_product(x, weight, groups), grouped.grouped_product(x.double(), weight.double(), groups)
    )
    back = grouped.grouped_product_back(y, weight, groups)
    assert_close(back, grouped.grouped_product_back(y.double(), weight.double(), groups))
    outer = grouped.grouped_outer(y, x, groups)
    assert outer.dtype == torch.float32
    assert_close(outer, grouped.grouped_outer(y.double(), x.double(), groups), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activation_and_sums_equal_plain_pytorch(dtype):
    bound = BOUND if dtype == torch.bfloat16 else 1e-5
    gate_up, grad = random(333, 2 * 768).to(dtype), random(333, 768, seed=1).to(dtype)
    weights = random(333, seed=2).float()
    inputs = gate_up.double(), weights.double()
    assert_close(pointwise.weighted_swiglu(gate_up, weights), pointwise.weighted_swiglu(*inputs), bound)
    ours = pointwise.weighted_swiglu_backward(gate_up, weights, grad)
    for mine, twin in zip(ours, pointwise.weighted_swiglu_backward(*inputs, grad.double()), strict=True):
        assert_close(mine, twin, bound)
    routing = torch.rand(500, 32, device="cuda").argsort(dim=1) < 8
    plan, _ = plan_rows(routing, 8)
    rows = random(4000, 2048, seed=3).to(dtype)
    expected = torch.zeros(500, 2048, dtype=torch.float64, device="cuda").index_add_(0, plan.slot_of_row, rows.double())
    assert_close(_SumRows.apply(rows, plan), expected, bound)
    # Every other row belongs to another rank.
    index = plan.rows_of_slot.where(plan.rows_of_slot % 2 == 0, -1)
    expected = (rows.double() * (torch.arange(4000, device="cuda") % 2 == 0)[:, None])[plan.rows_of_slot].sum(dim=1)
    partial = pointwise.sum_rows(rows, index, torch.float32)
    assert partial.dtype == torch.float32
    assert_close(partial, expected, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("ranks", [(16, 16, 16), (3, 5, 4)])
def test_adapted_experts_equal_their_twin_in_values_and_gradients(counts, ranks):
    """Also ranks that the kernels cannot take as they are, and experts without tokens."""
    num_tokens, results = sum(counts), []
    config = SimpleNamespace(hidden_size=256, moe_ffn_hidden_size=128, params_dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float64):
        module = Experts(len(counts), config)
        for leaf, rank in zip(("gate_proj", "up_proj", "down_proj"), ranks, strict=True):
            module.adapt(leaf, LoraSpec(rank, 2 * rank, 2.0))
        with torch.no_grad():
            for seed, parameter in enumerate(module.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed) * 0.1)
        module.fc1.requires_grad_(False)
        module.fc2.requires_grad_(False)
        module.to(dtype) if dtype == torch.float64 else None
        hidden = random(num_tokens, 256, seed=20).to(dtype).requires_grad_()
        weights = random(num_tokens, seed=21).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        module.stack_factors(wants_grad=True)
        output, _ = module(hidden, torch.tensor(counts, device="cuda"), weights)
        output.backward(random(num_tokens, 256, seed=22).to(dtype))
        module.collect_gradients()
        factors = [p.grad for _, p in module.named_parameters() if p.requires_grad]
        results.append([output, hidden.grad, weights.grad, *factors])
    assert len(results[0]) == 3 + 6
    for ours, twin in zip(*results, strict=True):
        assert_close(ours, twin, 2 * BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["off", "selective", "full"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe_groups"])
def test_packed_training_follows_transformers(name, recompute, tmp_path, monkeypatch):
    """IEEE float32 on both sides; wider bounds than on the CPU because the kernels sum in another order."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    save_moe_model(MOE_CONFIGS[name](), tmp_path)
    backend = MegatronBackend(str(tmp_path), backend_args(recompute=recompute), PEFT_CONFIG)
    state = random_adapter(backend.adapter_state(), std=0.1)
    backend.load_adapter(state)
    loss, gradients = MoeReference(tmp_path, PEFT_CONFIG, state).step(examples())
    for capacity in (100_000, 450):
        result = backend.run_step(PrefixTreeCollator(packed_sequence_length=capacity)(examples()))
        assert result.loss == pytest.approx(loss, rel=1e-4)
        assert max(mape(backend.parameters[k].grad.cpu(), g) for k, g in gradients.items()) < 0.05


@pytest.mark.gpu
def test_an_update_in_bfloat16_repeats_to_the_bit(tmp_path):
    save_moe_model(MOE_CONFIGS["glm4_moe"](), tmp_path)
    backend = MegatronBackend(str(tmp_path), backend_args(bf16=True), PEFT_CONFIG)
    backend.load_adapter(random_adapter(backend.adapter_state(), std=0.1))
    batch = PrefixTreeCollator(packed_sequence_length=800)(examples())
    runs = [(backend.run_step(batch), {k: p.grad.clone() for k, p in backend.parameters.items()}) for _ in range(2)]
    assert runs[0][0].loss == runs[1][0].loss
    experts = [key for key in runs[0][1] if ".experts." in key]
    assert experts
    assert all(torch.equal(runs[0][1][key], runs[1][1][key]) for key in experts)


@pytest.mark.multi_gpu(2)
def test_both_dispatchers_of_two_gpus_compute_what_one_computes():
    run_ranks(compare_dispatchers, 2, 2)
    run_ranks(sum_many_ones, 2)


def gather_in_bfloat16(rank: int, folder: Path) -> None:
    """Compare an update with itself, and in float32 with that of the other dispatcher; four experts for each slot."""
    for recompute in ("off", "selective"):
        seen = {}
        for bf16, kind, run in (
            (True, "allgather", 0),
            (True, "allgather", 1),
            (False, "alltoall", 0),
            (False, "allgather", 0),
        ):
            args = backend_args(bf16=bf16, expert_parallel_size=2, moe_token_dispatcher_type=kind, recompute=recompute)
            backend = MegatronBackend(str(folder), args, PEFT_CONFIG)
            backend.load_adapter(random_adapter(backend.adapter_state(), std=0.1))
            result = backend.run_step(pack(backend, args, examples()))
            seen[bf16, kind, run] = result.loss, {key: p.grad.clone() for key, p in backend.parameters.items()}
            backend.close()
        (loss, gradients), (again, repeated) = seen[True, "allgather", 0], seen[True, "allgather", 1]
        assert loss == again
        experts = [key for key in gradients if ".experts." in key]
        assert experts
        assert all(torch.equal(gradients[key], repeated[key]) for key in experts)
        (loss, gradients), (expected, others) = seen[False, "allgather", 0], seen[False, "alltoall", 0]
        assert loss == pytest.approx(expected, rel=1e-5)
        assert loss == pytest.approx(again, rel=2e-2)
        assert max(mape(gradients[key].cpu(), others[key].cpu()) for key in gradients) < 0.1


@pytest.mark.multi_gpu(2)
def test_two_gpus_that_gather_repeat_an_update_to_the_bit_and_compute_that_of_the_all_to_all(tmp_path):
    save_moe_model(MOE_CONFIGS["glm4_moe_groups"](), tmp_path)
    run_ranks(gather_in_bfloat16, 2, tmp_path, timeout_seconds=500)


@pytest.mark.multi_gpu(2)
def test_two_gpus_compute_what_one_computes(tmp_path):
    """IEEE float32; wider bounds than on the CPU because kernels sum in another order."""
    save_moe_model(MOE_CONFIGS["qwen2_moe"](), tmp_path)
    run_ranks(run_layouts, 2, 2, tmp_path, timeout_seconds=500)
    alone = visit(0, {}, tmp_path, None)
    for name in LAYOUTS[2]:
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]
        for seen in ranks:
            for what in ("step", "single", "recomputed"):
                ours, expected = seen[what], alone[what]
                assert ours["result"].loss == pytest.approx(expected["result"].loss, rel=1e-4), name
                assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-3), name
                worst = max(mape(ours["gradients"][key], value) for key, value in expected["gradients"].items())
                assert worst < 0.1, name
        first, second = (seen["local"] for seen in ranks)
        for key in first.keys() & second.keys():
            if first[key][0] == second[key][0]:
                assert torch.equal(first[key][1], second[key][1]), (name, key)
