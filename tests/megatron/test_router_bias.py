"""The bias that a router adds to its scores belongs to the base model: the same bits whatever training does.

Megatron-Core would move it after every update, at learning rate zero too; the controls show that it does.
"""

import copy
import dataclasses
import importlib
import inspect

import pytest
import torch
from peft import LoraConfig

import hf_megapack.megatron  # noqa: F401 (the quiet import comes first)

# isort: split
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.host import host_device
from hf_megapack.megatron.moe import FrozenRouter
from hf_megapack.packing import Alignment
from tests.helpers.backend_args import backend_args
from tests.helpers.moe_reference import MOE_CONFIGS, save_moe_model
from tests.megatron.test_layouts import examples

# The package has a function of the module's name.
finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
PEFT_CONFIG = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
UPDATE_RATE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved GLM with random correction biases."""
    path = tmp_path_factory.mktemp("glm")
    save_moe_model(MOE_CONFIGS["glm4_moe"](), path)
    return path


def routers(backend: MegatronBackend) -> list[FrozenRouter]:
    """Return the routers of a model."""
    found = [module for module in backend.model.modules() if isinstance(module, TopKRouter)]
    assert len(found) == 2
    assert all(type(router) is FrozenRouter for router in found)
    return found


def biases(backend: MegatronBackend) -> list[torch.Tensor]:
    """Return copies of the biases."""
    return [router.expert_bias.clone() for router in routers(backend)]


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Return whether float32 tensors have the same bits."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, theirs, strict=True))


def mcore_update(model: list[torch.nn.Module], config) -> None:
    """Call Megatron-Core's own update of the bias."""
    function = finalize_model_grads._update_router_expert_bias
    groups = {}
    if "tp_dp_cp_group" in inspect.signature(function).parameters:
        groups["tp_dp_cp_group"] = moe_utils.get_default_pg_collection().tp_dp_cp
    function(model, config, **groups)


def route(router: TopKRouter) -> None:
    """Let a router of Megatron-Core choose experts for 64 tokens, as in training."""
    logits = torch.randn(64, 1, router.num_experts, generator=torch.Generator().manual_seed(0))
    # It compiles its counting, for which a machine may lack a compiler.
    with torch.compiler.set_stance("force_eager"):
        router.train().routing(logits)


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("learning_rate", [0.0, 1e-2])
def test_updates_evaluation_and_resume_leave_the_bias_as_it_was(folder, learning_rate, recompute):
    args = backend_args(recompute=recompute)
    backend = MegatronBackend(str(folder), args, PEFT_CONFIG)
    before = biases(backend)
    assert all(bias.dtype == torch.float32 for bias in before)
    assert all(bias.any() for bias in before)
    # Padding and a dummy row are part of the update.
    collator = PrefixTreeCollator(packed_sequence_length=400, alignment=Alignment(packed_multiple=64))
    optimizer = torch.optim.AdamW(backend.parameters.values(), lr=learning_rate)
    start = backend.adapter_state()
    for step in range(3):
        batch = collator(examples()[2 * step : 2 * step + 2])
        dummy = batch.schedule.is_dummy.copy()
        dummy[0, -1] = True
        backend.run_step(dataclasses.replace(batch, schedule=dataclasses.replace(batch.schedule, is_dummy=dummy)))
        optimizer.step()
        backend.eval_step(batch)
        assert same_bits(biases(backend), before)
    moved = any(not torch.equal(value, start[key]) for key, value in backend.adapter_state().items())
    assert moved is (learning_rate > 0)
    assert not any(router.local_tokens_per_expert.any() for router in routers(backend))
    saved, moments = backend.adapter_state(), backend.optimizer_state(optimizer)
    for router in routers(backend):
        assert not any(parameter.requires_grad for parameter in router.parameters())
    backend.close()
    resumed = MegatronBackend(str(folder), args, PEFT_CONFIG)
    resumed.load_adapter(saved)
    optimizer = torch.optim.AdamW(resumed.parameters.values(), lr=learning_rate)
    resumed.load_optimizer_state(optimizer, moments)
    resumed.run_step(collator(examples()[:2]))
    optimizer.step()
    assert same_bits(biases(resumed), before)
    resumed.close()


def test_megatrons_own_update_cannot_move_it_and_moves_its_own_routers(folder):
    backend = MegatronBackend(str(folder), backend_args(), PEFT_CONFIG)
    config, before = backend.model[0].config, biases(backend)
    assert config.moe_router_bias_update_rate == 0.0
    batch = PrefixTreeCollator(packed_sequence_length=100_000)(examples())
    backend.run_step(batch)
    backend.model.train()
    with host_device():
        mcore_update(list(backend.model), config)
        assert same_bits(biases(backend), before)
        # Without counts even a rate would change nothing.
        eager = copy.copy(config)
        eager.moe_router_bias_update_rate = UPDATE_RATE
        mcore_update(list(backend.model), eager)
        assert same_bits(biases(backend), before)

        control = TopKRouter(config=eager, pg_collection=moe_utils.get_default_pg_collection())
        control.load_state_dict(routers(backend)[0].state_dict())
        route(control)
        counts = control.local_tokens_per_expert.clone()
        mcore_update([control], eager)
    assert counts.sum() == 64 * config.moe_router_topk
    expected = before[0] + UPDATE_RATE * torch.sign(counts.mean() - counts)
    assert counts.ne(counts.mean()).any()
    assert torch.equal(control.expert_bias, expected)
    backend.close()


def test_a_balancing_that_keeps_a_bias_of_its_own_is_impossible(folder):
    """Megatron-Core 0.19 has one, quantile balancing, whose `qb_beta` training moves."""
    backend = MegatronBackend(str(folder), backend_args(), PEFT_CONFIG)
    config = copy.copy(backend.model[0].config)
    assert config.moe_router_load_balancing_type == "none"
    assert all(getattr(router, "qb_beta", None) is None for router in routers(backend))
    assert all(router.frozen_expert_bias for router in routers(backend))
    config.moe_router_load_balancing_type = "quantile_balancing"
    with host_device(), pytest.raises(AssertionError, match="quantile_balancing"):
        FrozenRouter(config=config, pg_collection=moe_utils.get_default_pg_collection())
    if hasattr(finalize_model_grads, "_update_router_qb_beta"):
        config.moe_router_score_function, config.moe_router_enable_expert_bias = "softmax", False
        with host_device():
            control = TopKRouter(config=config, pg_collection=moe_utils.get_default_pg_collection())
            route(control)
        assert control.qb_beta_accum.any()
    backend.close()


def test_the_bias_takes_part_in_the_choice_of_experts_and_not_in_their_weights(folder):
    backend = MegatronBackend(str(folder), backend_args(), PEFT_CONFIG)
    (router, _) = routers(backend)
    hidden = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(0))
    weights, chosen = router(hidden)
    router.expert_bias += torch.tensor([10.0] + [0.0] * 7)
    other_weights, other_chosen = router(hidden)
    assert other_chosen[:, 0].all()
    assert not chosen[:, 0].all()
    same = (chosen == other_chosen).all(dim=1)
    assert 0 < same.sum() < 64
    assert torch.equal(weights[same], other_weights[same])
    backend.close()
