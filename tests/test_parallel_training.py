"""The trainer in parallel layouts: it trains, saves, resumes in another layout and fails as one process would."""

import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_megapack.errors import ConfigError, NonFiniteResultError
from tests.helpers.assets import load_tokenizer
from tests.helpers.reference_model import save_random_model
from tests.helpers.spawn import run_ranks
from tests.test_end_to_end import adapter_of, build, logged

TENSOR = {"tensor_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2, "gradient_checkpointing": True}
RUN = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5, "packed_sequence_length": 2500}


class _Poison(TrainerCallback):
    """Makes one factor of the last rank not a number before the third update."""

    def __init__(self, trainer):
        self._trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                next(iter(self._trainer.backend.parameters.values()))[0, 0] = math.nan


def train_in_layouts(rank: int, base: Path, folder: Path) -> None:
    """Train in three layouts, each resuming what the one before had saved in the middle; then fail."""
    seen, previous = {}, None
    for name, layout in (("tensor", TENSOR), ("pipeline", PIPELINE), ("context", CONTEXT)):
        trainer = build(folder / name, base, **RUN, **layout)
        trainer.train()
        trainer.save_model()
        metrics = trainer.evaluate(trainer.train_dataset if rank == 0 else range(len(trainer.train_dataset)))
        if previous is not None:
            trainer = build(folder / f"{name}-resumed", base, **RUN, **layout)
            trainer.train(resume_from_checkpoint=str(folder / previous / "checkpoint-2"))
        seen[name] = {
            "loss": logged(trainer, "loss"),
            "norm": logged(trainer, "grad_norm"),
            "eval_loss": metrics["eval_loss"],
            "adapter": adapter_of(trainer),
        }
        previous = name
    trainer = build(folder / "failing", base, **RUN, **PIPELINE)
    trainer.add_callback(_Poison(trainer))
    with pytest.raises(NonFiniteResultError, match="Update 3"):
        trainer.train()
    with pytest.raises(ConfigError, match="is not a multiple of 4, the product of"):
        build(folder / "failing", base, **PIPELINE, virtual_pipeline_parallel_size=2)
    torch.save(seen, folder / f"seen-{rank}.pt")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny random Qwen3 of two layers."""
    folder = tmp_path_factory.mktemp("base")
    save_random_model("qwen3", folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def test_layouts_train_save_and_resume_as_one_process(base, tmp_path):
    single = build(tmp_path / "single", base, **RUN)
    single.train()
    single.save_model()
    eval_loss = single.evaluate(single.train_dataset)["eval_loss"]
    run_ranks(train_in_layouts, 2, base, tmp_path)
    saved = json.loads((tmp_path / "single" / "adapter_config.json").read_text())
    for rank in range(2):
        seen = torch.load(tmp_path / f"seen-{rank}.pt", weights_only=False)
        for name, result in seen.items():
            assert result["loss"] == pytest.approx(logged(single, "loss"), rel=1e-6), name
            assert result["norm"] == pytest.approx(logged(single, "grad_norm"), rel=1e-5), name
            assert result["eval_loss"] == pytest.approx(eval_loss, rel=1e-6), name
            for key, value in adapter_of(single).items():
                torch.testing.assert_close(result["adapter"][key], value, rtol=0, atol=1e-5)
            assert json.loads((tmp_path / name / "adapter_config.json").read_text()) == saved
    assert max(logged(single, "grad_norm")) > 0.5, "clipping must have been at work"


def die(rank: int, base: Path, folder: Path) -> None:
    """Rank 1 ends in the middle of training, without a word."""
    trainer = build(folder, base, max_steps=20, **TENSOR)
    if rank == 1:
        trainer.add_callback(_Exit())
    try:
        trainer.train()
    except RuntimeError:
        (folder / "told").touch()
        raise


class _Exit(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os._exit(3)


def test_a_rank_that_dies_stops_the_others(base, tmp_path):
    started = time.monotonic()
    with pytest.raises(AssertionError):
        run_ranks(die, 2, base, tmp_path)
    assert (tmp_path / "told").exists()
    assert time.monotonic() - started < 120
