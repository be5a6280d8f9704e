"""Packed training on Megatron-Core against transformers + peft, one unpacked example at a time.

Real conversations, tiny random models of every family and switch, float32 on both sides, the same random adapter (B not
zero). The oracle itself is off its own float64 result by up to 0.0005 % in the gradients, so the bounds leave no slack.
"""

import functools

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.megatron import lora
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.lora_products import origin_of
from hf_megapack.megatron.recompute import Choice, RecomputePolicy
from hf_megapack.weights.export import export_peft_adapter
from tests.helpers.assets import load_conversations, load_tokenizer
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import (
    CONFIGS,
    load_reference,
    mape,
    peft_factors,
    random_adapter,
    reference_step,
    save_random_model,
)

LOSS_BOUND = 1e-6
GRADIENT_BOUND_PERCENT = 0.001
CAPACITIES = (100_000, 3_300, 2_500)
# What is learned concerns no layer: every model gets the examples that share most, and some the others too.
LEARNED = [(name, "each") for name in sorted(CONFIGS)]
LEARNED += [(name, mask) for name in ("llama", "mistral_window", "qwen3") for mask in ("all", "last")]
PEFT_CONFIG = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules="all-linear",
    rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
    alpha_pattern={"down_proj": 3},
    task_type="CAUSAL_LM",
)


@functools.cache
def conversation_examples(assistant_mask: str) -> tuple[dict, ...]:
    """Two tool-call conversations of one task and three plain chats; with "each" the first turns of each kind."""
    rows = [*load_conversations("bfcl")[:2], *load_conversations("mtbench")[:3]]
    rows = [{key: row[key] for key in ("messages", "tools") if key in row} for row in rows]
    dataset = prepare_dataset(
        rows, load_tokenizer(), assistant_mask=assistant_mask, max_length=None, overlong="error", num_proc=None
    )
    examples = [dataset[index] for index in range(len(dataset))]
    return tuple([*examples[:4], *examples[-6:]] if assistant_mask == "each" else examples)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request, tmp_path_factory):
    """A model on Megatron-Core and in transformers + peft, with the same adapter."""
    folder = tmp_path_factory.mktemp(request.param)
    save_random_model(request.param, folder, shard_size="200KB" if request.param == "qwen3" else "5GB")
    args = backend_args()
    backend = MegatronBackend(str(folder), args, PEFT_CONFIG)
    # With 0.2 float32's own rounding, ten times as large, would fill the bound.
    state = random_adapter(backend.adapter_state(), std=0.1)
    backend.load_adapter(state)
    yield backend, load_reference(folder, PEFT_CONFIG, state), folder
    backend.close()


def assert_same_step(backend, batch, reference_loss, reference_gradients):
    result = backend.run_step(batch)
    assert result.loss == pytest.approx(reference_loss, rel=LOSS_BOUND)
    assert set(backend.parameters) == set(reference_gradients)
    worst = max(mape(backend.parameters[key].grad, value) for key, value in reference_gradients.items())
    assert worst < GRADIENT_BOUND_PERCENT
    assert backend.eval_step(batch).loss == pytest.approx(reference_loss, rel=LOSS_BOUND)


@pytest.mark.parametrize(("pair", "assistant_mask"), LEARNED, indirect=["pair"])
def test_loss_and_every_adapter_gradient_equal_those_of_transformers(pair, assistant_mask):
    backend, reference, _ = pair
    examples = conversation_examples(assistant_mask)
    expected = reference_step(reference, examples)
    batches = [PrefixTreeCollator(packed_sequence_length=capacity)(examples) for capacity in CAPACITIES]
    for batch in batches:
        assert_same_step(backend, batch, *expected)
    assert batches[0].num_logical_tokens > sum(len(row.input_ids) for row in batches[0].rows)
    assert len({len(batch.rows) for batch in batches}) > 1


@pytest.mark.parametrize(("recompute", "num_full"), [("full", None), ("selective", None), ("auto", 0), ("auto", 1)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_recomputing_changes_nothing(name, recompute, num_full, tmp_path, monkeypatch):
    """With a frozen embedding a recomputed layer would pass no gradient unless its input asks for one."""
    save_random_model(name, tmp_path)
    backend = MegatronBackend(str(tmp_path), backend_args(recompute=recompute), PEFT_CONFIG)
    choices, origins = [], []
    monkeypatch.setattr(lora, "origin_of", lambda x: origins.append(origin_of(x) is not None) or origin_of(x))
    apply = RecomputePolicy.apply
    monkeypatch.setattr(RecomputePolicy, "apply", lambda *args: choices.append(apply(*args)) or choices[-1])
    if num_full is not None:
        monkeypatch.setattr(RecomputePolicy, "_choose", lambda *_: Choice(num_full, True))
    state = random_adapter(backend.adapter_state())
    backend.load_adapter(state)
    examples = conversation_examples("each")
    expected = reference_step(load_reference(tmp_path, PEFT_CONFIG, state), examples)
    assert_same_step(backend, PrefixTreeCollator(packed_sequence_length=100_000)(examples), *expected)
    num_layers = backend.hf_config.num_hidden_layers
    # Of the training pass and of the evaluation: q, k and v; gate and up; down.
    assert origins.count(True) == (6 * (num_layers - choices[0].num_full) if choices[0].is_selective else 0)
    wanted = {"full": Choice(num_layers, False), "selective": Choice(0, True), "auto": Choice(num_full, True)}
    assert choices == [wanted[recompute]]


@pytest.mark.parametrize("name", ["llama_tied_bias_yarn", "mistral_window", "qwen2", "qwen3"])
def test_twenty_steps_follow_the_same_losses_and_the_exported_adapter_gives_our_logits(name, tmp_path):
    save_random_model(name, tmp_path / "base")
    backend = MegatronBackend(str(tmp_path / "base"), backend_args(seed=3), PEFT_CONFIG)
    state = random_adapter(backend.adapter_state(), std=0.05)
    backend.load_adapter(state)
    reference = load_reference(tmp_path / "base", PEFT_CONFIG, state)
    optimizers = [
        torch.optim.AdamW(parameters, lr=1e-4)
        for parameters in (backend.parameters.values(), peft_factors(reference).values())
    ]
    collator = PrefixTreeCollator(packed_sequence_length=1_500)
    examples = conversation_examples("each")[4:]
    ours, theirs = [], []
    for step in range(20):
        update = [examples[(step + offset) % len(examples)] for offset in range(4)]
        ours.append(backend.run_step(collator(update)).loss)
        theirs.append(reference_step(reference, update)[0])
        for optimizer in optimizers:
            optimizer.step()
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert max(abs(a - b) for a, b in zip(ours[:-8], ours[8:], strict=True)) > 1e-3

    export_peft_adapter(
        backend.adapter_state(), PEFT_CONFIG, tmp_path / "adapter", base_model_name=str(tmp_path / "base")
    )
    reloaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32).eval()
    row = collator(examples[:1]).rows[0]
    logits = backend.logits(row)
    with torch.no_grad():
        expected = reloaded(input_ids=torch.from_numpy(row.input_ids).long()[None]).logits[0]
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_changing_one_branch_moves_no_other_branchs_logits(pair):
    backend, _, _ = pair
    examples = [dict(example) for example in conversation_examples("each")[:3]]
    batch = PrefixTreeCollator(packed_sequence_length=100_000)(examples)
    (row,) = batch.rows
    before = backend.logits(row)
    end = row.segments.end
    leaves = [s for s in range(len(end)) if s not in set(row.segments.parent.tolist())]
    assert len(leaves) == 3
    changed = row.segments.start[leaves[1]], row.segments.end[leaves[1]]
    row.input_ids[slice(*changed)] = (row.input_ids[slice(*changed)] + 1) % 4096
    after = backend.logits(row)
    moved = (before != after).any(dim=1)
    assert moved[slice(*changed)].all()
    moved[slice(*changed)] = False
    assert not moved.any()
