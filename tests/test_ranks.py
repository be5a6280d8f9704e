"""Two processes: rank 0's values and errors reach both, and a trainer does the same on both."""

import contextlib
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import TrainerCallback

from hf_megapack.config import MegaPackConfig
from hf_megapack.errors import BackendError, ConfigError, DataError, ExportError, NonFiniteResultError
from hf_megapack.ranks import all_agree, from_rank_zero, is_alone
from hf_megapack.trainer import MegaPackTrainer
from tests.helpers.assets import MODEL, load_tokenizer
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.spawn import run_ranks

CPU = torch.device("cpu")


def share(make):
    """Share text."""
    return from_rank_zero(make, encode=str.encode, decode=bytes.decode, device=CPU)


def fail(error):
    """Raise from an expression."""
    raise error


def rows() -> list[dict]:
    """Return eight ready examples with one prompt."""
    prompt = list(range(100, 170))
    return [
        {"input_ids": [*prompt, 1000 + i, 2000 + i], "labels": [-100] * 70 + [1000 + i, 2000 + i]} for i in range(8)
    ]


class RankTrainer(MegaPackTrainer):
    """The real trainer with a fake backend on every rank."""

    def _build_backend(self, model, args):
        return FakeBackend(model, args, self.peft_config)


def check_sharing(rank: int) -> None:
    """Values, None and errors of rank 0; rank 1's own functions are never called."""
    assert not is_alone()
    assert share(lambda: "from zero" if rank == 0 else fail(AssertionError())) == "from zero"
    assert share(lambda: "") == ""
    assert share(lambda: None) is None
    with pytest.raises(DataError, match="row 3 is bad"):
        share(lambda: fail(DataError("row 3 is bad")))
    with pytest.raises(OSError if rank == 0 else BackendError, match="disk full"):
        share(lambda: fail(OSError("disk full")))
    assert [all_agree(good, CPU) for good in (True, rank == 0, rank == 1)] == [True, False, False]


def build(folder: str, datasets: dict | None = None, **options) -> RankTrainer:
    """Return a trainer of this rank."""
    datasets = {"train": rows(), "eval": rows()[:3]} if datasets is None else datasets
    defaults = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 0.05, "disable_tqdm": True}
    defaults |= {"dataloader_num_workers": 0, "save_strategy": "steps", "save_steps": 2}
    return RankTrainer(
        MODEL,
        MegaPackConfig(output_dir=folder, use_cpu=True, **(defaults | options)),
        train_dataset=datasets.get("train"),
        eval_dataset=datasets.get("eval"),
        processing_class=load_tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"]),
    )


def check_training(rank: int, folder: str) -> None:
    """Both ranks see the same batches and end with the same adapter; rank 0 alone reads and writes."""
    trainer = build(folder)
    assert isinstance(trainer.train_dataset, range) == (rank == 1)
    trainer.train()
    assert [batch.num_examples for batch in trainer.backend.calls] == [2, 2, 2, 2]
    mine = torch.cat([p.detach().flatten() for p in trainer.backend.parameters.values()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(both[0], both[1])
    assert mine.abs().sum() > 0
    losses = [torch.empty(1) for _ in range(2)]
    dist.all_gather(losses, torch.tensor([trainer.evaluate()["eval_loss"]]))
    assert torch.equal(losses[0], losses[1])
    resumed = build(folder)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    again = torch.cat([p.detach().flatten() for p in resumed.backend.parameters.values()])
    assert torch.equal(mine, again)
    grouped = build(f"{folder}-grouped", group_by_prefix=True)
    grouped.train()
    assert [batch.num_examples for batch in grouped.backend.calls] == [2, 2, 2, 2]


def check_failures(rank: int, folder: str) -> None:
    """What only one rank finds stops both."""
    trainer = build(folder, max_steps=3)
    if rank == 1:
        trainer.backend.poison = {2: "grad"}
    with pytest.raises(NonFiniteResultError, match="Update 2: " + ("another rank" if rank == 0 else "gradient norm")):
        trainer.train()
    trainer = build(f"{folder}-gone", max_steps=3)
    if rank == 0:
        Path(f"{folder}-gone").rmdir()
        Path(f"{folder}-gone").touch()
    with pytest.raises(ExportError, match="-gone' cannot be"):
        trainer.train()
    trainer = build(folder, max_steps=3)
    trainer.data_collator = lambda examples: fail(DataError("this update cannot be packed"))
    with pytest.raises(DataError, match="this update cannot be packed"):
        trainer.train()
    with torch.no_grad():
        next(iter(trainer.backend.parameters.values()))[0, 0] = math.nan
    with pytest.raises(NonFiniteResultError):
        trainer.save_model(folder + "/poisoned")


class Asking(TrainerCallback):
    """Asks for something after the second update, on one rank alone, as a signal or a clock does."""

    def __init__(self, asks: bool, event: str, *flags: str):
        self._flags = flags if asks else ()
        setattr(self, event, self._ask)

    def _ask(self, args, state, control, **kwargs):
        for flag in self._flags if state.global_step == 2 else ():
            setattr(control, flag, True)


def check_callbacks(rank: int, folder: str) -> None:
    """What a callback asks for on one rank happens on both, at the same update."""
    for asking in range(2):
        run = Path(f"{folder}-{asking}")
        stopped = build(str(run), save_strategy="no")
        stopped.add_callback(Asking(rank == asking, "on_step_end", "should_save", "should_evaluate"))
        stopped.add_callback(Asking(rank == asking, "on_save", "should_training_stop"))
        assert stopped.train().global_step == 2
        assert [path.name for path in run.iterdir()] == ["checkpoint-2"]
        assert sum("eval_loss" in line for line in stopped.state.log_history) == 1
        cut = build(str(run), save_strategy="no")
        cut.add_callback(Asking(rank == asking, "on_step_end", "should_epoch_stop"))
        cut.train()
        assert (cut.state.global_step, cut.state.epoch) == (2, 0.5)


def check_agreement(rank: int, folder: str) -> None:
    """Ranks that were given different arguments are refused; folders and data are rank 0's."""
    other = "rank 1 has 1.1" if rank == 1 else "another rank does not"
    with pytest.raises(ConfigError, match=rf"\n  learning_rate: rank 0 has 0.1, {other}\n  seed: rank 0 has 0, "):
        build(folder, learning_rate=0.1 + rank, seed=rank)
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = build(f"{folder}-{rank}", **best)
    assert trainer.args.output_dir == f"{folder}-0"
    trainer.train()
    assert trainer.state.best_model_checkpoint == f"{folder}-0/checkpoint-{trainer.state.best_global_step}"
    own = Path(f"{folder}-working-{rank}")
    own.mkdir()
    with contextlib.chdir(own):
        trainer = build("run", **best)
        with pytest.raises(ConfigError, match="not all of them see output_dir='run'"):
            trainer.train()
        assert trainer.backend.calls == []
        assert [path.name for path in own.glob("run/*")] == []
    trainer = build(folder)
    with pytest.raises(ConfigError, match="resume_from_checkpoint: rank 0 has checkpoint-2, "):
        trainer.train(resume_from_checkpoint=f"{folder}-0/checkpoint-2" if rank == 0 else None)
    assert trainer.backend.calls == []
    datasets = {"train": rows(), "eval": {"some": rows()[:3], "none": None}} if rank == 0 else {}
    trainer = build(f"{folder}-data", datasets=datasets, max_steps=2)
    assert list(trainer.eval_dataset) == ["some", "none"]
    assert [len(trainer.train_dataset), len(trainer.eval_dataset["some"])] == [8, 3]
    trainer.train()


def check_saving_alone(folder: str, trainer: RankTrainer) -> None:
    """Rank 0 alone saves while the other ends: the adapter is there, and the error says what was wrong."""
    with pytest.raises(BackendError, match="save_model, not rank 0 alone"):
        trainer.save_model()
    assert (Path(folder) / "adapter_model.safetensors").exists()


def run_rank(rank: int, folder: str) -> None:
    """Be one of two processes, as torchrun starts them."""
    MegaPackConfig(output_dir=folder, use_cpu=True, ddp_timeout=120)
    check_sharing(rank)
    check_training(rank, f"{folder}/run")
    check_callbacks(rank, f"{folder}/callbacks")
    check_failures(rank, f"{folder}/failures")
    check_agreement(rank, f"{folder}/agreement")
    if rank == 0:
        check_saving_alone(f"{folder}/alone", build(f"{folder}/alone"))
    else:
        build(f"{folder}/alone")
    Path(folder, f"done-{rank}").touch()


def test_two_ranks_share_train_resume_and_fail_together(tmp_path):
    run_ranks(run_rank, 2, str(tmp_path), starts_group=False)
    assert sorted(p.name for p in tmp_path.glob("done-*")) == ["done-0", "done-1"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def wait_for_a_slow_rank(rank: int, folder: str) -> None:
    """Be one of two processes that wait two seconds for each other, while rank 0 takes five."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2))
    for answer in (lambda: time.sleep(5) or "late", lambda: time.sleep(5) or fail(DataError("late"))):
        try:
            value = from_rank_zero(answer, encode=str.encode, decode=bytes.decode, device=CPU, is_slow=True)
            assert value == "late"
        except DataError as error:
            Path(folder, f"failed-{rank}").write_text(str(error))
    Path(folder, f"done-{rank}").touch()


def test_ranks_wait_for_slow_work_longer_than_for_each_other(tmp_path):
    run_ranks(wait_for_a_slow_rank, 2, str(tmp_path), starts_group=False)
    assert sorted(p.name for p in tmp_path.glob("*")) == ["done-0", "done-1", "failed-0", "failed-1"]
    assert all((tmp_path / f"failed-{rank}").read_text() == "late" for rank in range(2))


def test_alone_a_value_is_handed_over_as_it_is():
    value = object()
    assert from_rank_zero(lambda: value, encode=fail, decode=fail, device=CPU) is value
    with pytest.raises(OSError, match="disk full"):
        share(lambda: fail(OSError("disk full")))
    assert all_agree(True, CPU)
    assert not all_agree(False, CPU)
