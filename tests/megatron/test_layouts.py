"""Every parallel layout computes what one process computes: losses, gradients, training, state.

The ranks run one layout after the other and leave what they saw in files; the comparisons are made here, against a run
of one process on the same examples. float32, tiny models, gloo.
"""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, Qwen3Config

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import ConfigError, DataError, NonFiniteResultError
from hf_megapack.guard import check_finite
from hf_megapack.loading import layout_alignment
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.host import compute_device
from hf_megapack.megatron.shards import gather_full
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import mape, random_adapter, save_model
from tests.helpers.spawn import LayoutRuns

LOSS_BOUND = 1e-6
GRADIENT_BOUND_PERCENT = 0.001
NUM_STEPS, HANDED_OVER = 20, 16
TENSOR, SEQUENCE = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "sequence_parallel": True}
PIPELINE, CONTEXT = {"pipeline_parallel_size": 2}, {"context_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_parallel_size": 2}
LAYOUTS = {
    2: {
        "DP2": {},
        "TP2": TENSOR,
        "TP2+SP": SEQUENCE,
        "PP2": PIPELINE,
        "PP2xVPP2": INTERLEAVED,
        "CP2": CONTEXT,
    },
    4: {
        "TP2xPP2": TENSOR | PIPELINE,
        "TP2+SPxPP2xVPP2": SEQUENCE | INTERLEAVED,
        "DP2xTP2": TENSOR,
        "CP2xTP2": CONTEXT | TENSOR,
        "CP2xTP2+SP": CONTEXT | SEQUENCE,
        "CP2xPP2": CONTEXT | PIPELINE,
        "DP2xCP2": CONTEXT,
        "PP4": {"pipeline_parallel_size": 4},
    },
}
ALL = [name for layouts in LAYOUTS.values() for name in layouts]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
WHOLE = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", rank_pattern={"q_proj": 2, "up_proj": 3})
ONE_LAYER = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[1])


@functools.cache
def examples() -> list[dict]:
    """Twelve conversations in three families, with lengths and targets that no layout divides."""
    generator = np.random.default_rng(0)
    prefixes = [generator.integers(0, 320, length) for length in (171, 90, 233)]
    made = []
    for index in range(12):
        tail = generator.integers(0, 320, int(generator.integers(3, 160)))
        mask = np.zeros(prefixes[index % 3].size + tail.size, dtype=np.int64)
        mask[prefixes[index % 3].size + tail.size // 3 :] = 1
        made.append({"input_ids": np.concatenate([prefixes[index % 3], tail]), "loss_mask": mask})
    return made


def update(step: int) -> list[dict]:
    """Return the examples of one update of a run."""
    return [examples()[(5 * step + offset) % 12] for offset in range(2)]


def pack(backend: MegatronBackend, args, chosen: list[dict], capacity: int = 450):
    """Pack examples for a layout, so that an update has several rows of different lengths."""
    collator = PrefixTreeCollator(
        packed_sequence_length=capacity,
        alignment=layout_alignment(args),
        data_parallel_size=backend.data_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        virtual_pipeline_parallel_size=args.virtual_pipeline_parallel_size,
    )
    return collator(chosen)


def llama(std: float = 0.1) -> LlamaConfig:
    """Return a Llama with a tied head."""
    return LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, initializer_range=std)


def full_gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every factor."""
    return gather_full({k: (p.grad, backend._splits[k]) for k, p in backend.parameters.items()}, backend.layout)


def one_step(backend: MegatronBackend, args, chosen: list[dict]) -> dict:
    """Return all that one update gives."""
    batch = pack(backend, args, chosen)
    result = backend.run_step(batch)
    evaluated = backend.eval_step(batch)
    return {
        "result": result,
        "eval_loss": evaluated.loss,
        "norm": backend.grad_norm(),
        "gradients": full_gradients(backend),
        "num_rows": len(batch.rows),
    }


def train(backend: MegatronBackend, args, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Run updates and return their losses."""
    losses = []
    for step in steps:
        losses.append(backend.run_step(pack(backend, args, update(step))).loss)
        optimizer.step()
    return losses


def make_optimizer(backend: MegatronBackend) -> torch.optim.Optimizer:
    """Return AdamW over what this rank holds, maybe nothing."""
    return torch.optim.AdamW([{"params": list(backend.parameters.values())}], lr=1e-3)


def poisoned_loss(backend: MegatronBackend, args, rank: int) -> float:
    """Return the loss when one factor of the last rank is not a number."""
    if rank == backend.world_size - 1:
        with torch.no_grad():
            next(iter(backend.parameters.values()))[0, 0] = math.nan
    loss = backend.run_step(pack(backend, args, update(0))).loss
    with pytest.raises(NonFiniteResultError, match="Update 7"):
        check_finite(loss, backend.grad_norm(), step=7, device=compute_device())
    return loss


def visit(rank: int, sizes: dict, folder: Path, handed: dict | None) -> dict:
    """Do everything once in one layout, and return what was seen.

    Args:
        rank: This rank.
        sizes: The layout.
        folder: Folder of the base model.
        handed: State that another layout saved in the middle of its run.
    """
    args = backend_args(**sizes)
    seen = {}
    backend = MegatronBackend(str(folder), args, WHOLE)
    seen["initial"] = backend.adapter_state()
    state = random_adapter(seen["initial"], std=0.1)
    backend.load_adapter(state)
    seen["returned"] = all(torch.equal(v, state[k]) for k, v in backend.adapter_state().items())
    seen["step"] = one_step(backend, args, examples())
    seen["single"] = one_step(backend, args, examples()[:1])

    optimizer = make_optimizer(backend)
    seen["losses"] = train(backend, args, optimizer, range(HANDED_OVER))
    seen["middle"] = {"adapter": backend.adapter_state(), "optimizer": backend.optimizer_state(optimizer)}
    seen["losses"] += train(backend, args, optimizer, range(HANDED_OVER, NUM_STEPS))
    seen["adapter"] = backend.adapter_state()
    seen["local"] = {
        key: (
            None if backend._splits[key].dim is None else backend._splits[key].rank(backend.layout),
            value.detach().cpu().clone(),
        )
        for key, value in backend.parameters.items()
    }
    resumed = make_optimizer(backend)
    handed = handed or seen["middle"]
    backend.load_adapter(handed["adapter"])
    backend.load_optimizer_state(resumed, handed["optimizer"])
    train(backend, args, resumed, range(HANDED_OVER, NUM_STEPS))
    seen["resumed"] = backend.adapter_state()
    if args.sequence_parallel:
        odd = next(example for example in examples() if example["input_ids"].size % 2)
        with pytest.raises(DataError, match=r"(A row of \d+ slots|1 microbatches) cannot be"):
            backend.run_step(PrefixTreeCollator(packed_sequence_length=450)([odd]))
    outside = {**examples()[0], "input_ids": np.append(examples()[0]["input_ids"][1:], SIZES["vocab_size"])}
    with pytest.raises(DataError, match="token 320, but the model's vocab_size is 320"):
        backend.run_step(pack(backend, args, [outside]))
    seen["poisoned"] = poisoned_loss(backend, args, rank)
    backend.close()

    backend = MegatronBackend(llama(), args, ONE_LAYER)
    backend.load_adapter(random_adapter(backend.adapter_state()))
    seen["tied"] = one_step(backend, args, examples()[:5])
    layers = [layer for chunk in backend.model for layer in chunk.decoder.layers]
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    seen["linears"] = {type(layer.get_submodule(part)).__name__ for layer in layers for part in parts}
    backend.close()
    backend = MegatronBackend(llama(0.01), backend_args(**sizes, recompute="full"), WHOLE)
    seen["random"] = one_step(backend, args, examples()[:5])
    backend.close()
    return seen


def run_layouts(rank: int, world_size: int, folder: Path) -> None:
    """Visit every layout of a world size, each resuming from the one before."""
    with pytest.raises(ConfigError, match=r"needs a multiple of 3 processes; there are"):
        MegatronBackend(llama(), backend_args(context_parallel_size=3), WHOLE)
    handed = None
    for name, sizes in LAYOUTS[world_size].items():
        seen = visit(rank, sizes, folder, handed)
        handed = seen["middle"]
        torch.save(seen, folder / f"{name}-{rank}.pt")


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_layouts.py has the bounds for GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A saved model with an untied head and norms on queries and keys."""
    path = tmp_path_factory.mktemp("layouts")
    save_model(Qwen3Config(**SIZES, initializer_range=0.1), path)
    return path


@pytest.fixture(scope="module")
def alone(folder) -> dict:
    """What one process sees."""
    return visit(0, {}, folder, None)


@pytest.fixture(scope="module")
def seen(folder) -> LayoutRuns:
    """What every rank of every layout saw."""
    return LayoutRuns(folder, LAYOUTS, run_layouts)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("what", ["step", "single", "tied", "random"])
def test_loss_metrics_and_gradients_equal_those_of_one_process(seen, alone, name, what):
    """Also for an update of one example, a tied head, one adapted layer (idle stages), recompute."""
    expected = alone[what]
    for rank in seen[name]:
        ours = rank[what]
        assert ours["result"].loss == pytest.approx(expected["result"].loss, rel=LOSS_BOUND)
        assert ours["eval_loss"] == pytest.approx(expected["result"].loss, rel=LOSS_BOUND)
        assert ours["result"].num_correct == expected["result"].num_correct
        assert ours["result"].num_loss_tokens == expected["result"].num_loss_tokens
        assert ours["result"].entropy == pytest.approx(expected["result"].entropy, rel=LOSS_BOUND)
        assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert set(ours["gradients"]) == set(expected["gradients"])
        learned = [key for key, gradient in expected["gradients"].items() if gradient.any()]
        assert len(learned) >= len(expected["gradients"]) / 2
        assert max(mape(ours["gradients"][key], expected["gradients"][key]) for key in learned) < GRADIENT_BOUND_PERCENT
    assert len({(rank[what]["result"], rank[what]["norm"]) for rank in seen[name]}) == 1, "ranks disagree"
    if what == "step":
        assert alone[what]["num_rows"] > 2


@pytest.mark.parametrize("name", [name for name in ALL if "TP2" in name])
def test_what_tensor_parallel_ranks_sum_is_never_left_to_linears_that_round_each_summand(seen, name):
    """One layer has adapters on some of its linears, so both ways of summing are there."""
    assert set().union(*(rank["linears"] for rank in seen[name])) == {"LoraLinear", "SplitLinear"}


@pytest.mark.parametrize("name", ALL)
def test_twenty_updates_and_a_resumed_run_end_with_the_adapter_of_one_process(seen, alone, name):
    for rank in seen[name]:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for run in ("adapter", "resumed"):
            for key, value in alone["adapter"].items():
                moved = (value - alone["initial"][key]).abs().mean()
                assert moved > 0
                assert (rank[run][key] - value).abs().mean() < 1e-5 * moved
                torch.testing.assert_close(rank[run][key], value, rtol=0, atol=1e-5)
    assert max(alone["losses"]) - min(alone["losses"]) > 1e-2


@pytest.mark.parametrize("name", ALL)
def test_ranks_that_hold_the_same_factor_hold_the_same_bits(seen, name):
    copies = {}
    for rank in seen[name]:
        for key, (part, value) in rank["local"].items():
            copies.setdefault((key, part), []).append(value)
    assert any(len(values) > 1 for values in copies.values()) or name.startswith("PP")
    assert all(torch.equal(value, values[0]) for values in copies.values() for value in values)


@pytest.mark.parametrize("name", ALL)
def test_a_fresh_adapter_and_a_loaded_one_are_the_same_bits_in_every_layout(seen, alone, name):
    for rank in seen[name]:
        assert rank["returned"]
        assert list(rank["initial"]) == list(alone["initial"])
        assert all(torch.equal(value, alone["initial"][key]) for key, value in rank["initial"].items())


@pytest.mark.parametrize("name", ALL)
def test_a_loss_that_one_rank_ruins_is_ruined_on_all(seen, name):
    assert all(math.isnan(rank["poisoned"]) for rank in seen[name])


def test_a_random_model_knows_nothing(alone):
    assert alone["random"]["result"].loss == pytest.approx(math.log(SIZES["vocab_size"]), abs=0.02)
