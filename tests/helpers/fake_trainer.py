"""The real trainer around the backend in plain torch, ready examples for it, and what its runs are compared by."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from hf_megapack.config import MegaPackConfig
from hf_megapack.trainer import MegaPackTrainer
from tests.helpers.assets import MODEL
from tests.helpers.fake_backend import FakeBackend

PROMPT = list(range(100, 170))
LORA = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def token_rows(count: int) -> list[dict]:
    """Return ready examples: one prompt of 70 tokens for all, then 3 to 6 learned tokens of their own."""
    rows = []
    for index in range(count):
        answer = [1000 + 7 * index + k for k in range(3 + index % 4)]
        rows.append({"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer})
    return rows


def rows_of_four_prompts(count: int) -> list[dict]:
    """Return ready examples whose prompts, 70 tokens each, take turns."""
    return [
        {**row, "input_ids": [200 + index % 4] * 70 + row["input_ids"][70:]}
        for index, row in enumerate(token_rows(count))
    ]


class FakeTrainer(MegaPackTrainer):
    """The real trainer with the fake backend."""

    given_backend = None

    def _build_backend(self, model, args):
        return self.given_backend or FakeBackend(model, args, self.peft_config)


class Recorder(TrainerCallback):
    """Keeps what callbacks see."""

    def __init__(self):
        self.accumulation, self.rates, self.optimizer_rates, self.adapters = [], [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        """Keep accumulation, and the rate that the schedule gives beside the one that the optimizer has."""
        self.accumulation.append(args.gradient_accumulation_steps)
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])
        self.optimizer_rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Keep the adapter."""
        self.adapters.append({name: p.detach().clone() for name, p in model[0].factors.items()})


def build_trainer(
    folder: Path,
    tokenizer: Any,
    *,
    model: Any = MODEL,
    rows: int | list[dict] = 10,
    trainer: type = FakeTrainer,
    eval_dataset: Any = None,
    callbacks: list[TrainerCallback] | None = None,
    backend: FakeBackend | None = None,
    is_stream: bool = False,
    **options,
) -> FakeTrainer:
    """Return a trainer over ready examples, with options of its configuration."""
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
    }
    dataset = Dataset.from_list(token_rows(rows) if isinstance(rows, int) else rows)
    class_ = type("WithBackend", (trainer,), {"given_backend": backend}) if backend else trainer
    return class_(
        model,
        MegaPackConfig(**(defaults | options)),
        train_dataset=dataset.to_iterable_dataset() if is_stream else dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
        peft_config=LoraConfig(**LORA),
    )


def examples_of(batch) -> list[tuple]:
    """Return the token tuple of each example of a batch, rebuilt from the segments of its rows."""
    found: dict[int, dict[int, tuple]] = {}
    for row in batch.rows:
        table = row.segments
        for segment in range(len(table.start)):
            owners = table.examples[table.example_offsets[segment] : table.example_offsets[segment + 1]]
            for owner in owners:
                tokens = row.input_ids[table.start[segment] : table.end[segment]]
                found.setdefault(int(owner), {})[int(table.start[segment])] = tuple(int(t) for t in tokens)
    return [sum((runs[start] for start in sorted(runs)), ()) for _, runs in sorted(found.items())]


def adapter(trainer) -> dict[str, torch.Tensor]:
    """Return copies of the factors."""
    return trainer.backend.adapter_state()


def assert_equal_adapters(one: dict, other: dict) -> None:
    """Check that all four factors are the same bits."""
    assert one.keys() == other.keys()
    assert len(one) == 4
    for key in one:
        assert torch.equal(one[key], other[key]), key


def oracle_loss(backend, rows) -> float:
    """Return the mean loss over all learned tokens, one example at a time."""
    total, count = 0.0, 0
    for row in rows:
        logits = backend.model(torch.tensor(row["input_ids"][:-1])).double()
        labels = torch.tensor(row["labels"][1:])
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).detach())
        count += int((labels != -100).sum())
    return total / count
