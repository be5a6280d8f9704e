"""Two GPUs against one: the same gradients in every layout, and the time of an update beside the plan's bound.

    torchrun --nproc_per_node 2 benchmarks/layouts.py --examples_file examples.npz
    torchrun --nproc_per_node 2 benchmarks/layouts.py --examples_file examples.npz --skip exactness
    torchrun --nproc_per_node 2 benchmarks/layouts.py --examples_file examples.npz --skip scaling --layouts TP2+SP

Each process first has a world of its own for what one GPU does; then both join one world. Examples are per-turn ones of
end_to_end.py --prepare in file order.

Exactness: a Llama of four layers with random weights and factors (B is not zero), bfloat16, torch_compile. Every layout
computes the same rows; MAPE is mean |a - b| over mean |b| for each factor's gradient, against one GPU. For scale: one
GPU with other rows, and the same one GPU against IEEE float32 (no TF32) with weights that are the same numbers.

Scaling: Qwen3-8B's shape with fewer layers. Seconds are the median of `run_step`, which ends with the summed gradient
on every rank, over repetitions of the same update. One GPU runs the examples of an update of two as several of its
own, `--examples` in each; DP2 takes twice as many at once, CP2 as many. Both GPUs do so at the same time, each by
itself: they share power and cooling and differ by some percent, and two together are as fast as the slower one, which
is what speed-ups refer to. The bound of a plan is the cost of one GPU's rows over the cost of the busier rank, by the
scheduler's model; balance is that rank's part in useful work alone.
"""

import argparse
import dataclasses
import json
import os
import time
import traceback
from pathlib import Path

import gradients
import stored_examples
import torch
import torch.distributed as dist
import workload
import worlds
from gradients import Difference, Probe
from update_times import Timing, print_scaling, time_updates

from hf_megapack.batch import PackedBatch
from hf_megapack.packing import RankLayout, schedule_rows

LAYOUTS = {
    "DP2": {},
    "CP2": {"context_parallel_size": 2},
    "PP2xVPP2": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
    "TP2+SP": {"tensor_parallel_size": 2, "sequence_parallel": True},
}
# Suits every layout, and leaves few lengths to compile kernels for.
MULTIPLE = 2048
CAPACITY, OTHER_CAPACITY = 8192, 16384


def reschedule(batch: PackedBatch, options: dict) -> PackedBatch:
    """Return the same rows, dealt to the ranks of a layout.

    Args:
        batch: The update.
        options: The layout.
    """
    pipeline, chunks = (options.get(f"{name}pipeline_parallel_size", 1) for name in ("", "virtual_"))
    ranks = RankLayout(
        data_parallel_size=1 if options else dist.get_world_size(),
        pipeline_parallel_size=pipeline,
        virtual_pipeline_parallel_size=chunks,
    )
    return dataclasses.replace(batch, schedule=schedule_rows(gradients.row_costs(batch), ranks))


def exact_batches(options: argparse.Namespace) -> dict[str, PackedBatch]:
    """Return the update of the exactness part, and the same update in other rows.

    Args:
        options: The command line.
    """
    config = gradients.reduced_llama(is_tiny=options.tiny)
    stored = stored_examples.load_examples(options.examples_file, options.data)[: options.exact_examples]
    examples = gradients.columns(stored, config.vocab_size)
    return {
        "rows": gradients.pack(examples, CAPACITY, MULTIPLE, data_parallel_size=worlds.SIZE),
        "other rows": gradients.pack(examples, OTHER_CAPACITY, MULTIPLE),
    }


def gradients_of(batches: dict[str, PackedBatch], options: argparse.Namespace, **arguments) -> dict[str, tuple]:
    """Return loss and gradients of updates in one layout. Every rank of the world calls it.

    Args:
        batches: The updates.
        options: The command line.
        **arguments: For the backend.
    """
    probe = Probe(gradients.reduced_llama(is_tiny=options.tiny), gradients.backend_arguments(**arguments))
    layout = {key: value for key, value in arguments.items() if key in gradients.ONE_PROCESS}
    results = {}
    for name, batch in batches.items():
        began = time.perf_counter()
        results[name] = probe.run(reschedule(batch, layout))
        rows = [row.input_ids.size for row in batch.rows]
        if os.environ["RANK"] == "0":
            seconds = time.perf_counter() - began
            print(f"{arguments}: loss {results[name][0]:.6f}, {seconds:.1f} s, rows of {rows}", flush=True)
    probe.close()
    return results


def exactness_alone(rank: int, options: argparse.Namespace) -> dict[str, tuple]:
    """Return what one GPU computes: the first process in bfloat16, the second at the same time in float32.

    Args:
        rank: Of this process among both.
        options: The command line.
    """
    batches = exact_batches(options)
    if rank == 0:
        return gradients_of(batches, options, torch_compile=not options.eager)
    found = gradients_of({"rows": batches["rows"]}, options, bf16=False)
    return {"float32": found["rows"]}


def exactness_together(alone: dict[str, tuple], options: argparse.Namespace) -> dict[str, Difference]:
    """Return how far each layout is from one GPU.

    Args:
        alone: What `exactness_alone` returned on this rank.
        options: The command line.
    """
    everyone: list[dict] = [{} for _ in range(worlds.SIZE)]
    dist.all_gather_object(everyone, alone)
    alone = everyone[0] | everyone[1]
    found = {
        "one GPU, other rows": Difference.between(alone["other rows"], alone["rows"]),
        "one GPU, against float32": Difference.between(alone["rows"], alone["float32"]),
    }
    batch = {"rows": exact_batches(options)["rows"]}
    for name in options.layouts:
        layout = LAYOUTS[name]
        if not has_time(name, options):
            break
        try:
            ours = gradients_of(batch, options, torch_compile=not options.eager, **layout)["rows"]
        except Exception:
            # What was found before is worth a table, and the other rank fails too or is ended.
            traceback.print_exc()
            options.has_failed = True
            break
        found[name] = Difference.between(ours, alone["rows"])
        if dist.get_rank() == 0:
            print(f"{name}: {found[name].cells()}", flush=True)
    return found


def has_time(name: str, options: argparse.Namespace) -> bool:
    """Return whether another layout may begin, the same answer on every rank.

    Args:
        name: Of the layout.
        options: The command line.
    """
    gone = worlds.largest(time.monotonic() - options.began)
    if gone > options.limit_s and dist.get_rank() == 0:
        print(f"{name} and what follows it is left out: {gone:.0f} s are gone, --limit_s is {options.limit_s}.")
    return gone <= options.limit_s


def print_exactness(found: dict[str, Difference]) -> None:
    """Print how far each layout is from one GPU."""
    print(f"\nExactness, reduced Llama; the target is a worst MAPE below 1 %\n| run | {gradients.HEADER} |")
    print("|" + "---|" * 6)
    for name, difference in found.items():
        print(f"| {name} | {difference.cells()} |")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples_file", type=Path, required=True, help="what end_to_end.py --prepare wrote")
    parser.add_argument("--data", choices=list(stored_examples.FILES), default="tau")
    parser.add_argument("--skip", nargs="*", choices=["exactness", "scaling"], default=[])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="of exactness")
    parser.add_argument("--exact_examples", type=int, default=24)
    parser.add_argument("--eager", action="store_true", help="exactness without torch_compile")
    parser.add_argument("--examples", type=int, default=64, help="scaling: examples per update and device")
    parser.add_argument("--starts", type=int, nargs="+", default=[0], help="first examples of the updates")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--recompute", choices=["auto", "full", "selective", "off"], default="off")
    parser.add_argument("--compile_scaling", action="store_true", help="scaling with torch_compile")
    parser.add_argument("--warm_up", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit_s", type=float, default=110.0, help="seconds after which no other layout begins")
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--json", type=Path, help="write the results into this file too")
    return parser.parse_args()


def write_json(path: Path | None, found: dict, timings: dict[str, list[Timing]]) -> None:
    """Write what there is so far.

    Args:
        path: The file, None for none.
        found: Differences.
        timings: Times.
    """
    if path is not None:
        scaling = {name: [dataclasses.asdict(timing) for timing in list_] for name, list_ in timings.items()}
        lines = {"exactness": {name: dataclasses.asdict(d) for name, d in found.items()}, "scaling": scaling}
        path.write_text(json.dumps(lines))


def run(rank: int, options: argparse.Namespace) -> None:
    """Run the parts of each GPU alone, then both together; print the tables last.

    Args:
        rank: Of this process among both.
        options: The command line.
    """
    timings: dict[str, list[Timing]] = {}
    found: dict[str, Difference] = {}
    worlds.join(1)
    alone = {} if "exactness" in options.skip else exactness_alone(rank, options)
    of_each_gpu: list[list[Timing]] = [[] for _ in range(worlds.SIZE)]
    if "scaling" not in options.skip:
        # CP2 takes the first of each pair of updates, DP2 both.
        starts = {start + step * options.examples for start in options.starts for step in range(worlds.SIZE)}
        of_each_gpu[rank] = time_updates("one GPU", sorted(starts), options)
    worlds.leave()
    worlds.join(worlds.SIZE)
    if "scaling" not in options.skip:
        dist.all_gather_object(of_each_gpu, of_each_gpu[rank])
    for name in () if "scaling" in options.skip else ("DP2", "CP2"):
        if has_time(name, options):
            timings[name] = time_updates(name, options.starts, options)
    if "exactness" not in options.skip:
        found = exactness_together(alone, options)
    if rank == 0:
        write_json(options.json, found, timings | {f"GPU {i}": timed for i, timed in enumerate(of_each_gpu)})
        if timings:
            print_scaling(of_each_gpu, timings, options)
        if found:
            print_exactness(found)
        print(f"\n{time.monotonic() - options.began:.0f} s in all", flush=True)


def main() -> None:
    """Check the launch and run.

    Raises:
        SystemExit: If the launcher has started another number of processes than two, or a layout failed.
    """
    options = parse_arguments()
    options.began, options.has_failed = time.monotonic(), False
    rank = int(os.environ.get("RANK", "0"))
    if os.environ.get("WORLD_SIZE") != str(worlds.SIZE):
        raise SystemExit(f"Launch {worlds.SIZE} processes: torchrun --nproc_per_node {worlds.SIZE} {__file__} ...")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gradients.use_ieee_float32()
    if rank == 0:
        print(workload.describe_machine(), flush=True)
    run(rank, options)
    if options.has_failed:
        raise SystemExit("A layout failed; see above.")
    worlds.leave()


if __name__ == "__main__":
    main()
