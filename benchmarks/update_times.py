"""Seconds of an update on one GPU and on two, beside what the plan's balance allows; layouts.py runs it."""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence

import gradients
import stored_examples
import torch
import workload
import worlds

from hf_megapack.batch import PackedBatch
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.packing import slots_cost, split_row

CAPACITY = 32768
# Context parallelism hands out blocks of 128 slots.
CONTEXT_MULTIPLE = 128 * worlds.SIZE


@dataclasses.dataclass
class Timing:
    """One update in one layout.

    Attributes:
        start: Its first example.
        examples: Number of examples.
        rows: Slots of each row.
        dummies: Rows that a rank runs to keep in step.
        seconds: Of each repetition.
        useful_cost: Of all its rows, each once, by the scheduler's model.
        busiest_cost: Cost of the rank with most to do, dummies included.
        peak_gib: GPU memory of tensors at most.
    """

    start: int
    examples: int
    rows: list[int]
    dummies: int
    seconds: list[float]
    useful_cost: float
    busiest_cost: float
    peak_gib: float

    @property
    def median(self) -> float:
        """Seconds per update."""
        return statistics.median(self.seconds)


def busiest_cost(batch: PackedBatch, name: str) -> float:
    """Return the cost of the rank with most to do.

    Args:
        batch: The update.
        name: Of the layout, "CP2" if ranks share each row.
    """
    if name != "CP2":
        costs = torch.tensor(gradients.row_costs(batch), dtype=torch.float64)
        return float(costs[torch.from_numpy(batch.schedule.row_index).long()].sum(1).max())
    # Both ranks wait for each other in every layer of every row.
    splits = [split_row(row.subtree_end, worlds.SIZE) for row in batch.rows]
    return sum(slots_cost(split.slots.shape[1], int(split.num_pairs.max())) for split in splits)


def time_updates(name: str, starts: Sequence[int], options: argparse.Namespace) -> list[Timing]:
    """Return the times of updates in one layout. Every rank of the world calls it.

    Args:
        name: "one GPU", "DP2" or "CP2".
        starts: First example of each update.
        options: The command line.

    Raises:
        SystemExit: If there are too few examples.
    """
    stored = stored_examples.load_examples(options.examples_file, options.data)
    config = workload.model_config("tiny" if options.tiny else "qwen3_8b", options.layers)
    per_update = options.examples * (worlds.SIZE if name == "DP2" else 1)
    workload.reset_peak()
    backend = MegatronBackend(
        config,
        gradients.backend_arguments(
            recompute=options.recompute,
            torch_compile=options.compile_scaling,
            bf16=True,
            context_parallel_size=worlds.SIZE if name == "CP2" else 1,
        ),
        workload.lora_config(),
    )
    timings = []
    for start in starts:
        examples = gradients.columns(stored[start : start + per_update], config.vocab_size)
        if len(examples) < per_update:
            raise SystemExit(f"There are {len(stored)} examples; an update of {per_update} cannot begin at {start}.")
        sizes = {"data_parallel_size": worlds.SIZE} if name == "DP2" else {}
        batch = gradients.pack(examples, CAPACITY, CONTEXT_MULTIPLE if name == "CP2" else 1, **sizes)
        seconds = []
        for _ in range(options.warm_up + options.repeats):
            worlds.largest(0.0)
            began = time.perf_counter()
            backend.run_step(batch)
            workload.synchronize()
            seconds.append(worlds.largest(time.perf_counter() - began))
        timing = Timing(
            start=start,
            examples=per_update,
            rows=[row.input_ids.size for row in batch.rows],
            dummies=int(batch.schedule.is_dummy.sum()),
            seconds=seconds[options.warm_up :],
            useful_cost=sum(gradients.row_costs(batch)),
            busiest_cost=busiest_cost(batch, name),
            peak_gib=workload.peak_gib(),
        )
        timings.append(timing)
        if os.environ["RANK"] == "0":
            print(f"{name}, warm-up {seconds[: options.warm_up]}: {timing}", flush=True)
    backend.close()
    del backend
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return timings


def print_scaling(
    of_each_gpu: Sequence[Sequence[Timing]], timings: dict[str, list[Timing]], options: argparse.Namespace
) -> None:
    """Print each update's speed-up beside its bound, then all updates of a layout together.

    Args:
        of_each_gpu: Every update that those of the layouts consist of, timed on each GPU by itself.
        timings: Of each layout.
        options: The command line.
    """
    alone = {parts[0].start: max(parts, key=lambda part: part.median) for parts in zip(*of_each_gpu, strict=True)}
    print(
        f"\nScaling, Qwen3-8B shape, {options.layers} layers, recompute {options.recompute}\n"
        "| layout | examples | rows | dummies | s (slowest) | slower GPU s | speed-up | balance | bound | of the bound "
        "| peak GiB |\n|" + "---|" * 11
    )
    for index, timed in enumerate(of_each_gpu):
        for timing in timed:
            where = f"{timing.start} to {timing.start + timing.examples}"
            seconds = f"{timing.median:.4f} ({max(timing.seconds):.4f})"
            print(f"| GPU {index} | {where} | {timing.rows} | 0 | {seconds} | | | | | | {timing.peak_gib:.1f} |")
    for name in ("DP2", "CP2"):
        shares = []
        for timing in timings.get(name, []):
            parts = [alone[s] for s in range(timing.start, timing.start + timing.examples, options.examples)]
            one, cost = sum(part.median for part in parts), sum(part.useful_cost for part in parts)
            speed_up, bound = one / timing.median, cost / timing.busiest_cost
            shares.append(speed_up / bound)
            cells = (
                name,
                f"{timing.start} to {timing.start + timing.examples}",
                timing.rows,
                timing.dummies,
                f"{timing.median:.4f} ({max(timing.seconds):.4f})",
                f"{one:.4f}",
                f"{speed_up:.3f}",
                f"{timing.useful_cost / timing.busiest_cost / worlds.SIZE:.1%}",
                f"{bound:.3f}",
                f"{shares[-1]:.1%}",
                f"{timing.peak_gib:.1f}",
            )
            print("| " + " | ".join(map(str, cells)) + " |")
        if shares:
            print(f"{name}: {statistics.fmean(shares):.1%} of the bound on average; the target is 95 %.")
