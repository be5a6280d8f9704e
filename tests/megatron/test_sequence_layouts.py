"""Ranks that cut every sequence of a row between them compute what one process computes with tree attention.

On the CPU each rank gathers keys and values and attends along the row, so this is about which rank holds which slots:
positions, labels, gradients, and the layouts around it. float32, tiny models, gloo.
"""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import DataError
from hf_megapack.loading import layout_alignment
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.packing import Alignment
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import mape, random_adapter
from tests.helpers.spawn import LayoutRuns
from tests.megatron.test_layouts import (
    CONTEXT,
    GRADIENT_BOUND_PERCENT,
    LOSS_BOUND,
    PIPELINE,
    SEQUENCE,
    SIZES,
    TENSOR,
    WHOLE,
    examples,
    full_gradients,
    llama,
)

LAYOUTS = {
    2: {"CP2": CONTEXT},
    4: {
        "CP4": {"context_parallel_size": 4},
        "CP2xTP2": CONTEXT | TENSOR,
        "CP2xTP2+SP": CONTEXT | SEQUENCE,
        "CP2xPP2": CONTEXT | PIPELINE,
        "DP2xCP2": CONTEXT,
    },
}
ALL = [name for layouts in LAYOUTS.values() for name in layouts]
MODELS = {"qwen3": lambda: Qwen3Config(**SIZES, initializer_range=0.1), "llama, recomputed": llama}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_sequences_gpu.py has the layouts of GPUs")


def pack(backend: MegatronBackend, args, strategy: str, attention: str):
    """Pack all examples into rows of several sequences."""
    collator = PrefixTreeCollator(
        packed_sequence_length=900,
        packing_strategy=strategy,
        alignment=layout_alignment(args, attention),
        data_parallel_size=backend.data_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
    )
    return collator(examples())


def visit(sizes: dict, *, strategy: str = "ffd", attention: str = "thd") -> dict:
    """Return what one update of each model gives."""
    seen = {}
    for name, model in MODELS.items():
        args = backend_args(**sizes, recompute="full" if "recomputed" in name else "off")
        backend = MegatronBackend(model(), args, WHOLE, attention)
        backend.load_adapter(random_adapter(backend.adapter_state(), std=0.1))
        batch = pack(backend, args, strategy, attention)
        seen[name] = {
            "result": backend.run_step(batch),
            "eval_loss": backend.eval_step(batch).loss,
            "norm": backend.grad_norm(),
            "gradients": full_gradients(backend),
            "rows": [len(set(row.subtree_end.tolist())) for row in batch.rows],
        }
        if sizes == CONTEXT and backend.data_parallel_size == 1:
            odd = next(example for example in examples() if example["input_ids"].size % 2)
            with pytest.raises(DataError, match=r"A row of \d+ slots .* sequence_multiple 4 and packed_multiple 4"):
                backend.run_step(PrefixTreeCollator(packed_sequence_length=900, packing_strategy="ffd")([odd]))
            padded = {"packing_strategy": "ffd", "alignment": Alignment(packed_multiple=4)}
            with pytest.raises(DataError, match=r"A sequence of \d+ slots cannot be cut"):
                backend.run_step(PrefixTreeCollator(packed_sequence_length=900, **padded)([odd]))
        backend.close()
    return seen


def run_layouts(rank: int, world_size: int, folder: Path) -> None:
    """Visit every layout of a world size."""
    for name, sizes in LAYOUTS[world_size].items():
        torch.save(visit(sizes), folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one process sees with shared prefixes."""
    return visit({}, strategy="prefix_tree", attention="tree")


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> LayoutRuns:
    """What every rank of every layout saw."""
    return LayoutRuns(tmp_path_factory.mktemp("sequences"), LAYOUTS, run_layouts)


def assert_same(ours: dict, expected: dict) -> None:
    """Compare one update with that of one process on trees."""
    assert ours["result"].loss == pytest.approx(expected["result"].loss, rel=LOSS_BOUND)
    assert ours["eval_loss"] == pytest.approx(expected["result"].loss, rel=LOSS_BOUND)
    assert ours["result"].num_correct == expected["result"].num_correct
    assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert set(ours["gradients"]) == set(expected["gradients"])
    assert all(gradient.any() for gradient in expected["gradients"].values())
    errors = [mape(ours["gradients"][key], gradient) for key, gradient in expected["gradients"].items()]
    assert max(errors) < GRADIENT_BOUND_PERCENT
    assert max(ours["rows"]) > 2, "rows have several sequences"


@pytest.mark.parametrize("model", MODELS)
def test_one_process_attends_within_sequences_as_along_the_tree(alone, model):
    assert_same(visit({})[model], alone[model])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ALL)
def test_ranks_that_cut_sequences_compute_what_one_process_computes(seen, alone, name, model):
    for rank in seen[name]:
        assert_same(rank[model], alone[model])
