"""Rendering, tokenizing and masking of many short conversations, beside TRL's SFTTrainer.

    python benchmarks/preparation.py --data FOLDER

FOLDER is the one that benchmarks/packing.py describes. The rows are conversations of mtbench101.jsonl over and over,
each with a number of its own in its first message, so that no two rows are alike. Both sides read the same
`datasets.Dataset`, with the same tokenizer and the same training template (TRL's), in as many processes; nothing is
cached, nothing is cut. Ours is `prepare_dataset`, what MegaPackTrainer calls: `Dataset.map` with `ChatTransform`, and
the account of lengths. TRL's is `SFTTrainer._prepare_dataset` with `assistant_only_loss=True`, called by the SFTTrainer
itself while it is built around a tiny model. The sides take turns; the fastest run of each counts. Processor seconds
are those of all processes: two of them in a second are a busy machine of two cores. That tokens and masks of all rows
agree is checked after each turn.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from datasets import Dataset, disable_caching, disable_progress_bars
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from hf_megapack.data.prepare import prepare_dataset

# Tokenizer -> its training template.
MODELS = {"qwen2.5": "qwen2_5_training.jinja", "qwen3": "qwen3_training.jinja"}


def make_rows(path: Path, count: int) -> Dataset:
    """Return `count` conversations, no two alike."""
    known = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]

    def rows() -> Iterator[dict[str, Any]]:
        for index in range(count):
            first, *rest = known[index % len(known)]
            yield {"messages": [{**first, "content": f"{index}: {first['content']}"}, *rest]}

    return Dataset.from_list(list(rows()))


class Stopwatch:
    """Wall-clock seconds of a block, and the processor seconds of this process and its children that ended."""

    def __enter__(self) -> Self:
        self._started = time.perf_counter(), sum(os.times()[:4])
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started[0]
        self.processor_seconds = sum(os.times()[:4]) - self._started[1]


class TimedSFTTrainer(SFTTrainer):
    """SFTTrainer that keeps how long it prepared its training set."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Dataset:
        with Stopwatch() as self.watch:
            return super()._prepare_dataset(*args, **kwargs)


def prepare_ours(rows: Dataset, tokenizer: PreTrainedTokenizerBase, num_proc: int) -> tuple[Stopwatch, Dataset]:
    """Return how long it took and the prepared rows."""
    with Stopwatch() as watch:
        prepared = prepare_dataset(rows, tokenizer, num_proc=num_proc)
    return watch, prepared


def prepare_trl(rows: Dataset, tokenizer: PreTrainedTokenizerBase, num_proc: int) -> tuple[Stopwatch, Dataset]:
    """Return how long it took and the prepared rows."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            assistant_only_loss=True,
            max_length=None,
            dataset_num_proc=num_proc,
            use_cpu=True,
            report_to="none",
            bf16=False,
        )
        trainer = TimedSFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    return trainer.watch, trainer.train_dataset


def tokens_and_masks(prepared: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all tokens of a part of the rows and which of them are learned; the first token of a row never is."""
    for part in prepared.with_format("arrow").iter(batch_size=10_000):
        ids = part["input_ids"].combine_chunks()
        bounds = ids.offsets.to_numpy()
        ids = ids.values.to_numpy()
        if "labels" in prepared.column_names:
            mask = part["labels"].combine_chunks().values.to_numpy() != -100
        else:
            mask = part["loss_mask"].combine_chunks().values.to_numpy() == 1
        mask[bounds[:-1]] = False
        yield np.concatenate((ids, np.diff(bounds))), mask


def check_agreement(first: Dataset, second: Dataset) -> tuple[int, int]:
    """Return how many tokens two prepared sets have, and how many are learned; raise if the sets differ."""
    num_tokens = num_learned = 0
    for ours, theirs in zip(tokens_and_masks(first), tokens_and_masks(second), strict=True):
        if not all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True)):
            raise SystemExit("the two sides gave other tokens or masks")
        num_tokens += ours[1].size
        num_learned += int(ours[1].sum())
    return num_tokens, num_learned


def describe_machine() -> str:
    """Return date, processor, load and versions in one line."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    names = ("datasets", "tokenizers", "transformers", "trl")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    machine = f"{date.today()}, {processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return f"{machine}; Python {platform.python_version()}, {versions}"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("~/.cache/hf_megapack-data"), help="folder with the data")
    parser.add_argument("--rows", type=int, default=100_000, help="conversations to prepare")
    parser.add_argument("--num_proc", type=int, default=2, help="processes of each side")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, of which the fastest counts")
    options = parser.parse_args()
    disable_caching()
    disable_progress_bars()
    folder = options.data.expanduser()
    rows = make_rows(folder / "mtbench101.jsonl", options.rows)
    print(describe_machine())
    print("| tokenizer | side | seconds | rows per second | processor seconds | tokens | learned |")
    print("|---|---|---|---|---|---|---|")
    sides: dict[str, Callable[..., tuple[Stopwatch, Dataset]]] = {"hf_megapack": prepare_ours, "TRL": prepare_trl}
    for name, template in MODELS.items():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizers" / name)
        tokenizer.chat_template = (folder / "templates" / template).read_text(encoding="utf-8")
        watches: dict[str, list[Stopwatch]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            prepared = []
            for side, prepare in sides.items():
                watch, result = prepare(rows, tokenizer, options.num_proc)
                watches[side].append(watch)
                prepared.append(result)
            counts = check_agreement(*prepared)
        for side in sides:
            seconds = min(watch.seconds for watch in watches[side])
            busy = min(watch.processor_seconds for watch in watches[side])
            cells = [f"{seconds:.1f}", f"{len(rows) / seconds:,.0f}", f"{busy:.1f}", *(f"{n:,}" for n in counts)]
            print("| " + " | ".join([name, side, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
