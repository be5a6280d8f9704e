"""Models with experts against transformers with hand-made adapters, one unpacked example at a time.

Tiny random models of every family, float32 on both sides, the same random adapter (B not zero) on attention, dense
MLPs, shared experts and every expert.
"""

import dataclasses

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_megapack.batch import PackedBatch
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import ConfigError
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.experts import Experts, attach_expert_lora, expert_names
from hf_megapack.megatron.families import family_of
from hf_megapack.weights.adapter import LoraSpec
from tests.helpers.backend_args import backend_args
from tests.helpers.moe_reference import MOE_CONFIGS, MoeReference, save_moe_model
from tests.helpers.reference_model import CONFIGS, mape, random_adapter
from tests.megatron.test_layouts import examples

LOSS_BOUND = 1e-6
GRADIENT_BOUND_PERCENT = PACKING_BOUND_PERCENT = 0.001
CAPACITIES = (100_000, 800, 450)
PEFT_CONFIG = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules="all-linear",
    rank_pattern={"q_proj": 2, "experts.up_proj": 6},
    # The scales of gate_proj and up_proj are equal, as an adapter of both in peft needs.
    alpha_pattern={"experts.up_proj": 12, "experts.down_proj": 3},
    task_type="CAUSAL_LM",
)


@pytest.fixture(scope="module", params=sorted(MOE_CONFIGS))
def pair(request, tmp_path_factory):
    """A model on Megatron-Core and in transformers, with the same adapter."""
    folder = tmp_path_factory.mktemp(request.param)
    save_moe_model(MOE_CONFIGS[request.param](), folder, shard_size="200KB")
    backend = MegatronBackend(str(folder), backend_args(), PEFT_CONFIG)
    state = random_adapter(backend.adapter_state(), std=0.1)
    backend.load_adapter(state)
    yield backend, MoeReference(folder, PEFT_CONFIG, state), folder
    backend.close()


def unpacked(chosen) -> PackedBatch:
    """Return an update with a row for each example."""
    make = PrefixTreeCollator(packed_sequence_length=100_000, packing_strategy="ffd")
    rows = [make([example]).rows[0] for example in chosen]
    batch = make(chosen)
    order = np.arange(len(rows), dtype=np.int32)[None]
    schedule = dataclasses.replace(batch.schedule, row_index=order, is_dummy=np.zeros(order.shape, dtype=bool))
    return dataclasses.replace(batch, rows=rows, schedule=schedule)


def worst_gradient(backend, expected) -> float:
    """Return the largest difference of a factor's gradient, in per cent."""
    assert set(backend.parameters) == set(expected)
    return max(mape(backend.parameters[key].grad, value) for key, value in expected.items())


def test_logits_equal_those_of_transformers(pair):
    backend, reference, folder = pair
    row = PrefixTreeCollator(packed_sequence_length=100_000)(examples()[:1]).rows[0]
    with torch.no_grad():
        expected = reference.model(torch.from_numpy(row.input_ids).long()[None]).logits[0]
    logits = backend.logits(row)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        other = plain(torch.from_numpy(row.input_ids).long()[None]).logits[0]
    assert (other - expected).abs().max() > 1e-2 * expected.abs().max(), "the adapter does nothing"


def test_loss_and_every_gradient_equal_those_of_transformers(pair):
    backend, reference, _ = pair
    loss, gradients = reference.step(examples())
    assert any(value.dim() == 3 for value in gradients.values())
    batches = [PrefixTreeCollator(packed_sequence_length=capacity)(examples()) for capacity in CAPACITIES]
    assert batches[0].num_logical_tokens > 1.5 * sum(len(row.input_ids) for row in batches[0].rows)
    assert len({len(batch.rows) for batch in batches}) == len(CAPACITIES)
    for batch in batches:
        assert backend.run_step(batch).loss == pytest.approx(loss, rel=LOSS_BOUND)
        assert worst_gradient(backend, gradients) < GRADIENT_BOUND_PERCENT
        assert backend.eval_step(batch).loss == pytest.approx(loss, rel=LOSS_BOUND)


def test_packing_changes_nothing(pair):
    """The same update with every example in a row of its own, on the same code: only the packing differs."""
    backend, _, _ = pair
    packed = PrefixTreeCollator(packed_sequence_length=100_000)(examples())
    apart = unpacked(examples())
    assert len(packed.rows) == 1
    assert len(apart.rows) == len(examples())
    results = []
    for batch in (packed, apart):
        results.append((backend.run_step(batch), {key: p.grad.clone() for key, p in backend.parameters.items()}))
    (ours, gradients), (expected, others) = results
    assert ours.loss == pytest.approx(expected.loss, rel=LOSS_BOUND)
    assert (ours.num_correct, ours.num_loss_tokens) == (expected.num_correct, expected.num_loss_tokens)
    assert max(mape(gradients[key], value) for key, value in others.items()) < PACKING_BOUND_PERCENT


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen2_moe"])
def test_recomputing_activations_changes_no_bit(name, recompute, tmp_path):
    save_moe_model(MOE_CONFIGS[name](), tmp_path)
    batch = PrefixTreeCollator(packed_sequence_length=800)(examples()[:6])
    results = []
    for mode in ("off", recompute):
        backend = MegatronBackend(str(tmp_path), backend_args(recompute=mode), PEFT_CONFIG)
        backend.load_adapter(random_adapter(backend.adapter_state(), std=0.1))
        results.append((backend.run_step(batch), {key: p.grad for key, p in backend.parameters.items()}))
        experts = [module for module in backend.model.modules() if isinstance(module, Experts)]
        assert any(module.is_recomputed for module in experts) is (mode == "selective")
        backend.close()
    (result, gradients), (other, others) = results
    assert result == other
    assert all(torch.equal(value, others[key]) for key, value in gradients.items())


def test_an_update_repeats_to_the_bit(pair):
    backend, _, _ = pair
    batch = PrefixTreeCollator(packed_sequence_length=800)(examples())
    runs = [(backend.run_step(batch), {k: p.grad.clone() for k, p in backend.parameters.items()}) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][key]) for key, value in runs[0][1].items())


def test_an_adapter_of_gate_and_up_together_is_that_of_both_apart_with_equal_a(tmp_path):
    """One A for both is the special case of two equal ones; its gradient is the sum of theirs."""
    save_moe_model(MOE_CONFIGS["qwen3_moe"](), tmp_path)
    batch = PrefixTreeCollator(packed_sequence_length=800)(examples()[:4])
    targets = "mlp.experts.gate_up_proj"
    together = MegatronBackend(str(tmp_path), backend_args(), LoraConfig(r=3, target_parameters=[targets]))
    name = "base_model.model.model.layers.2.mlp.experts"
    state = random_adapter(together.adapter_state(), std=0.1)
    together.load_adapter(state)
    loss = together.run_step(batch).loss
    gradient = together.parameters[f"{name}.gate_up_proj.lora_A.weight"].grad
    together.close()

    apart = MegatronBackend(str(tmp_path), backend_args(), LoraConfig(r=3, target_modules=["gate_proj", "up_proj"]))
    zero = {key: torch.zeros_like(value) for key, value in apart.adapter_state().items()}
    for key, value in state.items():
        both = value.chunk(2, dim=1) if ".lora_B." in key else (value, value)
        for leaf, part in zip(("gate_proj", "up_proj"), both, strict=True):
            zero[key.replace("gate_up_proj", leaf)] = part
    apart.load_adapter(zero)
    assert apart.run_step(batch).loss == pytest.approx(loss, rel=1e-6)
    parts = [apart.parameters[f"{name}.{leaf}.lora_A.weight"].grad for leaf in ("gate_proj", "up_proj")]
    assert mape(sum(parts), gradient) < GRADIENT_BOUND_PERCENT
    apart.close()


def test_a_projection_is_not_adapted_both_apart_and_together(pair):
    backend, _, _ = pair
    rules = family_of(backend.hf_config).rules(backend.hf_config)
    names = sorted(name for name in expert_names(rules) if name.endswith(("up_proj", "gate_up_proj")))[:2]
    with pytest.raises(ConfigError, match=r"gate_up_proj and .*up_proj both adapt"):
        attach_expert_lora(backend.model, rules, dict.fromkeys(names, LoraSpec(2, 2, 1.0)))


@pytest.mark.parametrize(
    ("config", "message"),
    [(CONFIGS["llama"], "has no shared expert"), (MOE_CONFIGS["glm4_moe"], "needs a CUDA device")],
    ids=["dense", "glm4_moe"],
)
def test_overlap_of_a_shared_expert_is_refused_where_it_cannot_be(config, message):
    with pytest.raises(ConfigError, match=message):
        MegatronBackend(config(), backend_args(moe_shared_expert_overlap=True), LoraConfig(target_modules=["q_proj"]))
