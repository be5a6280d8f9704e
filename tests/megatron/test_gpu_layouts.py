"""Layouts of two GPUs with NCCL against one GPU: FlexAttention over shared rows, pipelines, split vocabularies."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from tests.helpers.reference_model import mape, save_model
from tests.helpers.spawn import run_ranks
from tests.megatron.test_layouts import LAYOUTS, SIZES, run_layouts, visit

pytestmark = pytest.mark.multi_gpu(2)


@pytest.mark.parametrize("what", ["step", "single", "tied", "random"])
def test_two_gpus_compute_what_one_computes(folder_of_runs, what):
    """IEEE float32; wider bounds than on the CPU because kernels sum in another order."""
    folder, alone = folder_of_runs
    expected = alone[what]
    for name in LAYOUTS[2]:
        for rank in range(2):
            ours = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)[what]
            assert ours["result"].loss == pytest.approx(expected["result"].loss, rel=1e-4), name
            assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-3), name
            learned = [key for key, gradient in expected["gradients"].items() if gradient.any()]
            assert max(mape(ours["gradients"][key], expected["gradients"][key]) for key in learned) < 0.05, name


def test_replicated_factors_are_the_same_bits_after_twenty_updates(folder_of_runs):
    folder, _ = folder_of_runs
    for name in LAYOUTS[2]:
        first, second = (torch.load(folder / f"{name}-{r}.pt", weights_only=False)["local"] for r in range(2))
        for key in first.keys() & second.keys():
            if first[key][0] == second[key][0]:
                assert torch.equal(first[key][1], second[key][1]), (name, key)


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory) -> tuple[Path, dict]:
    """What two ranks saw in every layout, and what one process sees."""
    folder = tmp_path_factory.mktemp("gpu_layouts")
    save_model(Qwen3Config(**SIZES, initializer_range=0.1), folder)
    run_ranks(run_layouts, 2, 2, folder, timeout_seconds=500)
    return folder, visit(0, {}, folder, None)
