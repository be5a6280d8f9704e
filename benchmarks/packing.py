"""Packing on real conversations: sharing, milliseconds, growth and drift, beside ART's planner.

    python benchmarks/packing.py --data FOLDER

FOLDER holds tau_airline.jsonl (historical trajectories of sierra-research/tau-bench), bfcl_multi_turn.jsonl
(multi_turn_base of the PyPI package bfcl-eval, its ground-truth calls executed), mtbench101.jsonl
(mtbench101/mt-bench-101) and gsm8k_solutions.jsonl (example_model_solutions of openai/grade-school-math), each a row of
`messages` (and `tools`) per conversation; tokenizers/qwen2.5; and templates/qwen2_5_training.jinja, which is TRL's.
The reference's figures are those of OpenPipe ART 0.5.23's planner on a comparable two-core machine. Tokens are kept in
a temporary folder, so that only the first run renders. Rows hold 32,768 tokens; one call of the collator is timed,
planning and layout, on numpy examples.
"""

import argparse
import gc
import json
import os
import platform
import random
import resource
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np
from transformers import AutoTokenizer

from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.packing import PackingReport, gather_examples, order_by_prefix
from hf_megapack.packing.tree import fewest_tokens

CAPACITY = 32_768
SIZES = (16, 64)
FILES = {
    "tau": "tau_airline.jsonl",
    "bfcl": "bfcl_multi_turn.jsonl",
    "gsm8k": "gsm8k_solutions.jsonl",
    "mtbench": "mtbench101.jsonl",
}
# ART 0.5.23: (logical tokens per executed token in file order, shuffled), (milliseconds, the same) by update size.
REFERENCE = {
    ("tau", "each"): {16: ((8.94, 2.42), (25, 14)), 64: ((12.00, 3.40), (135, 68))},
    ("bfcl", "each"): {16: ((10.30, 4.03), (9, 10)), 64: ((17.27, 8.94), (58, 48))},
    ("tau", "all"): {16: ((1.90, 1.88), (16, 16)), 64: ((1.89, 1.87), (78, 89))},
    ("gsm8k", "each"): {16: ((1.34, 1.01), (1.3, 1.3)), 64: ((1.42, 1.05), (5, 5))},
    ("mtbench", "each"): {16: ((1.00, 1.00), (2.5, 2.5)), 64: ((1.00, 1.00), (9, 10))},
}
# What the reference was measured on: the first so many conversations (None: all), of these the first so many examples,
# of these the first six full updates.
NUM_CONVERSATIONS = {("tau", "all"): None, ("gsm8k", "each"): None}
NUM_EXAMPLES = {("gsm8k", "each"): 1200}
NUM_UPDATES = 6
REPEATS = 5
WHOLE_SETS = [("tau", "each"), ("bfcl", "each"), ("gsm8k", "each"), ("tau", "all"), ("bfcl", "all")]
GROWTH = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
DRIFT_EXAMPLES = 100_000

Example = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Data:
    """Tokenized examples of one file.

    Attributes:
        examples: Tokens and loss mask of each.
        conversations: Row that each came from. int64, shape (num_examples,).
    """

    examples: list[Example]
    conversations: np.ndarray

    @classmethod
    def load(cls, folder: Path, name: str, mask: str) -> Self:
        """Tokenize a file, one example per assistant turn (mask "each") or per row ("all"), or read it back."""
        cache = Path(tempfile.gettempdir()) / "hf_megapack-benchmark" / f"{name}-{mask}.npz"
        if not cache.exists():
            cache.parent.mkdir(exist_ok=True)
            # Written elsewhere first, so that an interrupted run leaves no half file.
            unfinished = cache.with_suffix(f".{os.getpid()}.npz")
            np.savez(unfinished, **cls._tokenize(folder, name, mask))
            unfinished.replace(cache)
        stored = np.load(cache)
        bounds = np.cumsum(stored["lengths"])[:-1]
        columns = zip(np.split(stored["tokens"], bounds), np.split(stored["mask"], bounds), strict=True)
        examples = [{"input_ids": ids, "loss_mask": mask} for ids, mask in columns]
        return cls(examples, stored["conversations"])

    @staticmethod
    def _tokenize(folder: Path, name: str, mask: str) -> dict[str, np.ndarray]:
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizers" / "qwen2.5")
        template = (folder / "templates" / "qwen2_5_training.jinja").read_text(encoding="utf-8")
        transform = ChatTransform(tokenizer, assistant_mask=mask, chat_template=template)
        rows = [json.loads(line) for line in (folder / FILES[name]).read_text(encoding="utf-8").splitlines()]
        found = list(transform.tokenize(rows, range(len(rows)), format_name="messages"))
        return {
            "tokens": np.concatenate([example.input_ids for example in found]).astype(np.int32),
            "mask": np.concatenate([example.loss_mask for example in found]),
            "lengths": np.array([len(example.input_ids) for example in found]),
            "conversations": np.array([example.conversation_id for example in found]),
        }


def full_updates(order: Sequence[int], size: int) -> list[list[int]]:
    """Cut an order into updates and leave out a smaller last one."""
    return [list(order[first : first + size]) for first in range(0, len(order) - size + 1, size)]


def shuffled(count: int) -> list[int]:
    """Return the reference's shuffled order."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


def sampled(data: Data, size: int, *, unit: str, grouped: bool) -> list[list[int]]:
    """Return the full updates of one epoch of our sampler."""
    count = len(data.examples)
    order = None
    if grouped:
        # Some examples at a time, as a dataset is read.
        order = order_by_prefix(gather_examples(data.examples[first : first + 64]) for first in range(0, count, 64))
    sampler = UpdateSampler(
        num_examples=count,
        examples_per_update=size,
        seed=0,
        conversation_ids=data.conversations,
        shuffle_unit=unit,
        drop_last=True,
        prefix_order=order,
    )
    return list(sampler)


def pack(
    data: Data, updates: Iterable[Sequence[int]], *, repeats: int = 1, share_supervised: bool = False
) -> tuple[PackingReport, float]:
    """Return the counts of some updates and the median milliseconds of one."""
    collator = PrefixTreeCollator(packed_sequence_length=CAPACITY, share_supervised=share_supervised)
    reports, seconds = [], []
    for update in updates:
        examples = [data.examples[index] for index in update]
        batches = [collator(examples) for _ in range(repeats)]
        seconds.append(statistics.median(batch.packing_seconds for batch in batches))
        reports.append(PackingReport.from_batch(batches[0]))
    return sum(reports, PackingReport()), 1e3 * statistics.median(seconds)


def above_lower_bound(data: Data, updates: Iterable[Sequence[int]], num_executed: int) -> list[str]:
    """Return how far executed tokens are above what no packing can go below: in endless rows, and in ours."""
    sets = [gather_examples([data.examples[index] for index in update]) for update in updates]
    bounds = [sum(fewest_tokens(examples, capacity) for examples in sets) for capacity in (None, CAPACITY)]
    return [f"{num_executed / bound - 1:.1%}" for bound in bounds]


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print one Markdown table."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def label(key: tuple[str, str]) -> str:
    """Name a set of examples."""
    return f"{key[0]}, {'per turn' if key[1] == 'each' else 'whole conversations'}"


def beside_reference(sets: dict[tuple[str, str], Data]) -> Iterator[list[str]]:
    """Yield the reference's cells and ours."""
    for key, cells in REFERENCE.items():
        data = sets[key]
        limit = NUM_CONVERSATIONS.get(key, 48)
        count = int((data.conversations < limit).sum()) if limit else len(data.examples)
        count = min(count, NUM_EXAMPLES.get(key, count))
        for size, (their_sharing, their_ms) in cells.items():
            for place, order in enumerate((list(range(count)), shuffled(count))):
                updates = full_updates(order, size)
                report, milliseconds = pack(data, updates[:NUM_UPDATES], repeats=REPEATS)
                every, _ = pack(data, updates)
                yield [
                    label(key),
                    str(size),
                    ("file", "shuffled")[place],
                    f"{their_sharing[place]:.2f}",
                    f"{report.sharing:.2f}",
                    f"{their_ms[place]:g}",
                    f"{milliseconds:.2f}",
                    f"{their_ms[place] / milliseconds:.0f}x",
                    f"{report.num_logical_tokens // report.num_updates:,}",
                    f"{every.sharing:.2f} ({every.num_updates})",
                    *above_lower_bound(data, updates, every.num_executed_tokens),
                ]


def by_order(sets: dict[tuple[str, str], Data]) -> Iterator[list[str]]:
    """Yield the sharing of the same examples in five orders, over all full updates of an epoch."""
    for key in WHOLE_SETS:
        data = sets[key]
        for size in SIZES:
            orders = [full_updates(order, size) for order in (range(len(data.examples)), shuffled(len(data.examples)))]
            orders += [
                sampled(data, size, unit=unit, grouped=grouped)
                for grouped in (False, True)
                for unit in ("conversation", "example")
                if grouped or unit == "conversation"
            ]
            sharing = [pack(data, updates)[0].sharing for updates in orders]
            yield [label(key), str(size), *(f"{x:.2f} ({x / sharing[0]:.0%})" for x in sharing)]


def supervised(sets: dict[tuple[str, str], Data]) -> Iterator[list[str]]:
    """Yield executed tokens with and without sharing learned slots."""
    for key in (("tau", "all"), ("bfcl", "all"), ("mtbench", "all"), *WHOLE_SETS[:3]):
        data = sets[key]
        count = len(data.examples)
        for size in SIZES:
            for name, order in (("file", range(count)), ("shuffled", shuffled(count))):
                updates = full_updates(order, size)
                (plain, plain_ms), (shared, shared_ms) = (
                    pack(data, updates, share_supervised=choice) for choice in (False, True)
                )
                yield [
                    label(key),
                    str(size),
                    name,
                    f"{plain.num_executed_tokens:,}",
                    f"{shared.num_executed_tokens:,}",
                    f"{1 - shared.num_executed_tokens / plain.num_executed_tokens:.1%}",
                    f"{plain_ms:.2f}",
                    f"{shared_ms:.2f}",
                ]


def growth(pool: Data) -> Iterator[list[str]]:
    """Yield the time of one update by its number of examples, drawn from all files."""
    order = shuffled(len(pool.examples))
    for size in GROWTH:
        updates = full_updates(order, size)[: min(32, GROWTH[-1] // size)]
        report, milliseconds = pack(pool, updates, repeats=3)
        tokens = report.num_logical_tokens / report.num_updates
        yield [
            f"{size:,}",
            f"{tokens:,.0f}",
            f"{report.sharing:.2f}",
            f"{report.num_rows / report.num_updates:.0f}",
            f"{milliseconds:.1f}",
            f"{1e3 * milliseconds / size:.0f}",
            f"{1e6 * milliseconds / tokens:.1f}",
        ]


def drift(data: Data, size: int) -> Iterator[list[str]]:
    """Yield time per update and memory while updates of new random examples are packed."""
    generator = np.random.Generator(np.random.PCG64(0))
    collator = PrefixTreeCollator(packed_sequence_length=CAPACITY)
    num_updates = DRIFT_EXAMPLES // size
    seconds = []
    for update in range(1, num_updates + 1):
        chosen = generator.choice(len(data.examples), size, replace=False)
        seconds.append(collator([data.examples[index] for index in chosen]).packing_seconds)
        if update % (num_updates // 5) == 0:
            gc.collect()
            part = seconds[-(num_updates // 5) :]
            milliseconds = 1e3 * statistics.median(part)
            yield [f"{update * size:,}", f"{milliseconds:.2f}", f"{_resident_mib():.0f}", f"{_peak_mib():.0f}"]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def describe_machine() -> str:
    """Return date, processor and versions in one line."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = model[0].partition(":")[2].strip() if model else platform.processor()
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "transformers", "tokenizers"))
    load = os.getloadavg()[0]
    return (
        f"{date.today()}, {processor}, {os.cpu_count()} cores, load {load:.1f}; Python {platform.python_version()}, "
        f"{versions}"
    )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("~/.cache/hf_megapack-data"), help="folder with the data described above"
    )
    options = parser.parse_args()
    folder = options.data.expanduser()
    keys = {*REFERENCE, *WHOLE_SETS, ("mtbench", "all")}
    sets = {key: Data.load(folder, *key) for key in sorted(keys)}
    print(describe_machine())
    print_table(
        "Beside the reference, which is ART 0.5.23 (logical tokens per executed token; milliseconds per update)",
        [
            "data",
            "examples",
            "order",
            "reference",
            "ours",
            "reference ms",
            "our ms",
            "faster",
            "logical tokens",
            "ours, all updates",
            "above lower bound",
            "above bound with rows",
        ],
        beside_reference(sets),
    )
    print_table(
        "Sharing of one epoch by its order (and what it keeps of file order's)",
        ["data", "examples", "file", "shuffled", "shuffle_unit=conversation", "grouped", "grouped, unit=example"],
        by_order(sets),
    )
    print_table(
        "share_supervised: executed tokens of all full updates",
        ["data", "examples", "order", "default", "share_supervised", "fewer", "ms", "ms shared"],
        supervised(sets),
    )
    pooled = [example for name in FILES for example in sets[name, "each"].examples]
    pool = Data(pooled, np.arange(len(pooled)))
    print_table(
        "Growth with the size of the update (per-turn examples of all four files, shuffled)",
        ["examples", "logical tokens", "sharing", "rows", "ms", "us per example", "ns per token"],
        growth(pool),
    )
    print_table(
        f"Drift over {DRIFT_EXAMPLES:,} examples (tau per turn, 64 random ones per update)",
        ["examples packed", "median ms", "resident MiB", "peak MiB"],
        drift(sets["tau", "each"], 64),
    )


if __name__ == "__main__":
    main()
