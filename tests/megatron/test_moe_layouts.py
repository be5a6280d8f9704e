"""Models with experts in every layout compute what one process computes: losses, gradients, training, state.

As in test_layouts.py: the ranks of a world size visit one layout after the other and leave what they saw in files.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

import hf_megapack.megatron  # noqa: F401 (the quiet import comes first)

# isort: split
from megatron.core.parallel_state import get_expert_model_parallel_group
from megatron.core.transformer.moe.moe_layer import MoELayer

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import ConfigError
from hf_megapack.megatron import shards, step
from hf_megapack.megatron.backend import MegatronBackend
from tests.helpers.backend_args import backend_args
from tests.helpers.moe_reference import MOE_CONFIGS, save_moe_model
from tests.helpers.reference_model import mape, random_adapter
from tests.helpers.spawn import LayoutRuns
from tests.megatron.test_layouts import examples, make_optimizer, one_step, pack, train

LOSS_BOUND = 1e-6
GRADIENT_BOUND_PERCENT = 0.001
NUM_STEPS, HANDED_OVER = 5, 3
SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": True}
PIPELINE, CONTEXT = {"pipeline_parallel_size": 2}, {"context_parallel_size": 2}
EXPERTS = {"expert_parallel_size": 2}
GATHER, GATHER_OF_4 = ({"expert_parallel_size": e, "moe_token_dispatcher_type": "allgather"} for e in (2, 4))
LAYOUTS = {
    2: {
        "DP2": {},
        "DP2, EP2": EXPERTS,
        "TP2+SP": SEQUENCE,
        "TP2+SP, EP2": SEQUENCE | EXPERTS,
        "CP2, EP2": CONTEXT | EXPERTS,
        "PP2": PIPELINE,
        "DP2, EP2 gathered": GATHER,
        "TP2+SP, EP2 gathered": SEQUENCE | GATHER,
        "CP2, EP2 gathered": CONTEXT | GATHER,
    },
    4: {
        "DP4, EP2": EXPERTS,
        "DP4, EP4": {"expert_parallel_size": 4},
        "DP2xTP2+SP, EP2": SEQUENCE | EXPERTS,
        "DP2xTP2+SP, EP4": SEQUENCE | {"expert_parallel_size": 4},
        "DP2xPP2, EP2": PIPELINE | EXPERTS,
        "TP2+SPxPP2xVPP2, EP2": SEQUENCE | PIPELINE | EXPERTS | {"virtual_pipeline_parallel_size": 2},
        "DP2xCP2, EP2": CONTEXT | EXPERTS,
        "CP2xTP2+SP, EP4": CONTEXT | SEQUENCE | {"expert_parallel_size": 4},
        "DP4, EP2 gathered": GATHER,
        "DP4, EP4 gathered": GATHER_OF_4,
        "DP2xTP2+SP, EP4 gathered": SEQUENCE | GATHER_OF_4,
        "DP2xPP2, EP2 gathered": PIPELINE | GATHER,
        "TP2+SPxPP2xVPP2, EP2 gathered": SEQUENCE | PIPELINE | GATHER | {"virtual_pipeline_parallel_size": 2},
    },
}
ALL = [name for layouts in LAYOUTS.values() for name in layouts]
WHOLE = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", rank_pattern={"q_proj": 2})
EXPERTS_ALONE = LoraConfig(r=2, target_modules=r".*layers\.2\.mlp\.experts\.(gate|up|down)_proj")


def visit(rank: int, sizes: dict, folder: Path, handed: dict | None) -> dict:
    """Do everything once in one layout, and return what was seen; arguments as in test_layouts.py."""
    args, seen = backend_args(**sizes), {}
    backend = MegatronBackend(str(folder), args, WHOLE)
    seen["initial"] = backend.adapter_state()
    backend.load_adapter(random_adapter(seen["initial"], std=0.1))
    dispatchers = {type(m.token_dispatcher).__name__ for m in backend.model.modules() if isinstance(m, MoELayer)}
    gathers = args.moe_token_dispatcher_type == "allgather"
    assert dispatchers == {"GatheringDispatcher" if gathers else "SortingDispatcher"}
    seen["data ranks"] = {backend.layout.rank: backend.layout.data_rank}, [*backend.layout.expert_data_ranks]
    seen["expert ranks"] = dist.get_process_group_ranks(get_expert_model_parallel_group())
    if args.pipeline_parallel_size * args.context_parallel_size == 1:
        rows = pack(backend, args, examples()).rows
        seen["logits"] = backend.logits(rows[backend.layout.data_rank % len(rows)])
    seen["step"] = one_step(backend, args, examples())
    # One example: every other data-parallel rank runs a dummy, and its tokens pass through this rank's experts.
    seen["single"] = one_step(backend, args, examples()[:1])
    optimizer = make_optimizer(backend)
    seen["losses"] = train(backend, args, optimizer, range(HANDED_OVER))
    seen["middle"] = {"adapter": backend.adapter_state(), "optimizer": backend.optimizer_state(optimizer)}
    seen["losses"] += train(backend, args, optimizer, range(HANDED_OVER, NUM_STEPS))
    seen["adapter"] = backend.adapter_state()
    seen["local"] = {
        key: (None if split.dim is None else split.rank(backend.layout), backend.parameters[key].detach().cpu())
        for key, split in backend._splits.items()
    }
    resumed, handed = make_optimizer(backend), handed or seen["middle"]
    backend.load_adapter(handed["adapter"])
    backend.load_optimizer_state(resumed, handed["optimizer"])
    train(backend, args, resumed, range(HANDED_OVER, NUM_STEPS))
    seen["resumed"] = backend.adapter_state()
    backend.close()

    # Random weights, no adapter but that of one layer's experts, layers recomputed.
    config = MOE_CONFIGS["glm4_moe"]()
    config.num_hidden_layers = 4
    backend = MegatronBackend(config, backend_args(**sizes, recompute="full"), EXPERTS_ALONE)
    backend.load_adapter(random_adapter(backend.adapter_state(), std=0.1))
    seen["recomputed"] = one_step(backend, args, examples()[:5])
    backend.close()
    return seen


def run_layouts(rank: int, world_size: int, folder: Path) -> None:
    """Visit every layout of a world size, each resuming from the one before, with small messages."""
    shards.MESSAGE_ELEMENTS = step.BUCKET_ELEMENTS = 5000
    with pytest.raises(ConfigError, match="expert_parallel_size=8 does not divide"):
        MegatronBackend(MOE_CONFIGS["qwen2_moe"](), backend_args(expert_parallel_size=8), WHOLE)
    handed = None
    for name, sizes in LAYOUTS[world_size].items():
        seen = visit(rank, sizes, folder, handed)
        handed = seen["middle"]
        torch.save(seen, folder / f"{name}-{rank}.pt")


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the bounds are those of the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A saved model with a dense layer, and a gated shared expert in the others."""
    path = tmp_path_factory.mktemp("moe_layouts")
    save_moe_model(MOE_CONFIGS["qwen2_moe"](), path)
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
@pytest.mark.parametrize("what", ["step", "single", "recomputed"])
def test_loss_metrics_and_gradients_equal_those_of_one_process(seen, alone, name, what):
    expected = alone[what]
    assert any(key.endswith("experts.down_proj.lora_A.weight") for key in expected["gradients"])
    for rank in seen[name]:
        ours = rank[what]
        assert ours["result"].loss == pytest.approx(expected["result"].loss, rel=LOSS_BOUND)
        assert ours["eval_loss"] == pytest.approx(expected["result"].loss, rel=LOSS_BOUND)
        assert ours["result"].num_correct == expected["result"].num_correct
        assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert set(ours["gradients"]) == set(expected["gradients"])
        worst = max(mape(ours["gradients"][key], value) for key, value in expected["gradients"].items())
        assert worst < GRADIENT_BOUND_PERCENT
    assert len({(rank[what]["result"], rank[what]["norm"]) for rank in seen[name]}) == 1, "ranks disagree"


@pytest.mark.parametrize("name", ALL)
def test_updates_and_a_resumed_run_end_with_the_adapter_of_one_process(seen, alone, name):
    for rank in seen[name]:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for run in ("adapter", "resumed"):
            for key, value in alone["adapter"].items():
                moved = (value - alone["initial"][key]).abs().mean()
                assert moved > 0
                assert (rank[run][key] - value).abs().mean() < 1e-4 * moved
    assert max(alone["losses"]) - min(alone["losses"]) > 1e-2


@pytest.mark.parametrize("name", ALL)
def test_ranks_that_hold_the_same_factor_hold_the_same_bits(seen, name):
    copies = {}
    for rank in seen[name]:
        for key, (part, value) in rank["local"].items():
            copies.setdefault((key, part), []).append(value)
    assert any(len(values) > 1 for values in copies.values()) or name == "PP2"
    assert all(torch.equal(value, values[0]) for values in copies.values() for value in values)


@pytest.mark.parametrize("name", ALL)
def test_ranks_know_which_rows_the_ranks_run_that_share_their_experts(seen, name):
    data_rank = {rank: index for ranks in seen[name] for rank, index in ranks["data ranks"][0].items()}
    for rank in seen[name]:
        assert rank["data ranks"][1] == sorted({data_rank[other] for other in rank["expert ranks"]})


@pytest.mark.parametrize("name", ["DP2, EP2", "DP4, EP4", "DP2xTP2+SP, EP4"])
def test_logits_of_rows_of_different_lengths_do_not_depend_on_the_dispatcher(seen, name):
    sent, gathered = ([rank["logits"] for rank in seen[name + kind]] for kind in ("", " gathered"))
    torch.testing.assert_close(gathered, sent, rtol=1e-5, atol=1e-6)
    assert len({len(logits) for logits in gathered}) > 1


def test_ranks_that_gather_run_rows_of_different_lengths():
    """Else nothing would show that shorter ones are told apart from what fills them up."""
    collator = PrefixTreeCollator(packed_sequence_length=450, data_parallel_size=2)
    batch = collator(examples())
    lengths = np.array([row.input_ids.size for row in batch.rows])[batch.schedule.row_index]
    assert (lengths[0] != lengths[1]).any()


@pytest.mark.parametrize("name", ALL)
def test_a_fresh_adapter_is_the_same_bits_in_every_layout(seen, alone, name):
    for rank in seen[name]:
        assert list(rank["initial"]) == list(alone["initial"])
        assert all(torch.equal(value, alone["initial"][key]) for key, value in rank["initial"].items())


def test_every_expert_begins_with_an_adapter_of_its_own(alone):
    first = alone["initial"]["base_model.model.model.layers.1.mlp.experts.up_proj.lora_A.weight"]
    assert first.shape == (8, 4, 32)
    assert len({float(expert.sum()) for expert in first}) == 8
