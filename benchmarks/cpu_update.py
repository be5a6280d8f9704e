"""Seconds per update on the CPU: MegaPackTrainer beside transformers.Trainer + peft, on the same examples.

    python benchmarks/cpu_update.py --model ~/.cache/hf_megapack/smollm2-135m-instruct

Both sides learn the same examples (one per assistant turn of tool-agent conversations, only that turn supervised) with
the same LoRA, dtype, optimizer and number of examples per update. The baseline gets no example longer than it is, no
padding that sorting by length avoids, and the fastest of the batch sizes tried. Both losses of the first update are
printed and must agree: the same was computed.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.data.prepare import prepare_dataset

EXAMPLES = Path(__file__).parents[1] / "examples" / "data"
VERSIONS = ("torch", "transformers", "peft", "accelerate", "megatron-core")
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class Stopwatch(TrainerCallback):
    """Seconds and loss of every update; an update ends when the optimizer has stepped."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, *_args, **_kwargs) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def on_step_end(self, *_args, **_kwargs) -> None:
        """Take a lap."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def on_log(self, *_args, logs: dict[str, float], **_kwargs) -> None:
        """Keep the loss of the update."""
        if "loss" in logs:
            self.losses.append(logs["loss"])


def common_arguments(options: argparse.Namespace, folder: str) -> dict:
    """Return what both trainers are told."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": options.dtype == "bfloat16",
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def lora_config() -> LoraConfig:
    """Return the adapter that both sides train."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def run_baseline(
    examples: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    *,
    batch_size: int,
    num_updates: int,
) -> Stopwatch:
    """Train with transformers.Trainer + peft, all of `examples` in each update.

    Args:
        examples: input_ids and labels, sorted by length.
        tokenizer: Gives the padding.
        options: The command line.
        batch_size: Examples per forward pass; divides the number of examples.
        num_updates: Updates to run.
    """
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=get_peft_model(model, lora_config()),
            args=TrainingArguments(
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=len(examples) // batch_size,
                train_sampling_strategy="sequential",
                **common_arguments(options, folder),
            ),
            train_dataset=concatenate_datasets([examples] * num_updates),
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            callbacks=[watch],
        ).train()
    return watch


def run_megapack(
    examples: Dataset, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, *, num_updates: int
) -> tuple[Stopwatch, dict[str, float]]:
    """Train with MegaPackTrainer, all of `examples` in each update; return its metrics too."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = MegaPackTrainer(
            model=options.model,
            args=MegaPackConfig(
                per_device_train_batch_size=len(examples),
                train_sampling_strategy="sequential",
                **common_arguments(options, folder),
            ),
            train_dataset=concatenate_datasets([examples] * num_updates),
            processing_class=tokenizer,
            peft_config=lora_config(),
            callbacks=[watch],
        )
        metrics = trainer.train().metrics
    return watch, metrics


def load_examples(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Dataset:
    """Return the first examples of the data, one per assistant turn, as input_ids and labels, shortest first.

    Args:
        tokenizer: With the chat template to render with.
        options: The command line.

    Raises:
        SystemExit: If there are too few.
    """
    rows = load_dataset("json", data_files=options.dataset, split="train")
    examples = prepare_dataset(rows, tokenizer, assistant_mask="each", max_length=None, overlong="error", num_proc=None)
    if len(examples) < options.examples:
        raise SystemExit(f"{options.dataset} has {len(examples)} assistant turns, --examples asks for more.")
    chosen = sorted((examples[i] for i in range(options.examples)), key=lambda e: len(e["input_ids"]))
    return Dataset.from_list(
        [
            {
                "input_ids": list(map(int, e["input_ids"])),
                "labels": [int(t) if m else -100 for t, m in zip(e["input_ids"], e["loss_mask"], strict=True)],
            }
            for e in chosen
        ]
    )


def fastest_batch_size(examples: Dataset, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> int:
    """Time the baseline on a quarter of the examples with each batch size, after one warm-up; return the fastest."""
    part = examples.select(range(0, len(examples), 4))
    run_baseline(part.select(range(1)), tokenizer, options, batch_size=1, num_updates=1)
    seconds = {}
    for size in options.batch_sizes:
        seconds[size] = run_baseline(part, tokenizer, options, batch_size=size, num_updates=1).seconds[0]
        print(f"baseline, {len(part)} examples in batches of {size}: {seconds[size]:.1f} s", flush=True)
    return min(seconds, key=seconds.__getitem__)


def describe_machine() -> str:
    """Return processor, threads and versions in one line."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    return f"{cpu}, {threads}, Python {platform.python_version()}, {versions}"


def main() -> None:
    """Run both sides and print the table.

    Raises:
        SystemExit: If the two losses differ, or the speed-up is below --require.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--dataset", default=str(EXAMPLES / "train.jsonl"), help=".jsonl file of conversations")
    parser.add_argument("--chat_template", default=str(EXAMPLES / "qwen2_5_training.jinja"))
    parser.add_argument("--examples", type=int, default=16, help="examples per update")
    parser.add_argument("--updates", type=int, default=3, help="updates that are timed, after one that is not")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 2, 4], help="tried for the baseline")
    parser.add_argument("--dtype", choices=list(LOSS_TOLERANCE), default="float32")
    parser.add_argument("--require", type=float, default=0.0, help="fail below this speed-up")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = Path(options.chat_template).read_text()
    examples = load_examples(tokenizer, options)
    print(describe_machine(), flush=True)
    size = fastest_batch_size(examples, tokenizer, options)
    baseline = run_baseline(examples, tokenizer, options, batch_size=size, num_updates=options.updates + 1)
    megapack, metrics = run_megapack(examples, tokenizer, options, num_updates=options.updates + 1)

    lengths = [len(ids) for ids in examples["input_ids"]]
    padded = sum(max(lengths[i : i + size]) * size for i in range(0, len(lengths), size))
    executed = metrics["executed_tokens"] / (options.updates + 1)
    rows = (
        (f"transformers.Trainer + peft, batches of {size}", padded, baseline),
        ("hf_megapack", executed, megapack),
    )
    medians = [statistics.median(watch.seconds[1:]) for _, _, watch in rows]
    print(f"{options.examples} examples, {sum(lengths)} tokens per update, {options.dtype}, LoRA r=16 all-linear")
    print("| trainer | executed tokens | seconds per update (median, all) | first loss |\n|---|---|---|---|")
    for (name, tokens, watch), median in zip(rows, medians, strict=True):
        laps = ", ".join(f"{s:.1f}" for s in watch.seconds[1:])
        print(f"| {name} | {tokens:.0f} | {median:.2f} ({laps}) | {watch.losses[0]:.5f} |")
    speedup = medians[0] / medians[1]
    print(f"{padded / executed:.2f} times fewer tokens executed, {speedup:.2f} times fewer seconds.")
    difference = abs(baseline.losses[0] / megapack.losses[0] - 1)
    if difference > LOSS_TOLERANCE[options.dtype]:
        raise SystemExit(f"The first losses differ by {difference:.1e} relative: not the same work.")
    if speedup < options.require:
        raise SystemExit(f"The speed-up is below {options.require}.")


if __name__ == "__main__":
    main()
