"""How far packing moves loss and gradients on one GPU, beside how far an unpacked model is from itself.

    python benchmarks/packed_unpacked.py --examples_file examples.npz

The examples are per-turn ones of end_to_end.py --prepare, here and there one, so that several conversations share a
prefix. Every run computes the loss and the adapter's gradient of the same update, at the same random weights and
factors (B is not zero), in other rows:

- unpacked: each example is a row;
- reverse: the same rows, the last one first;
- flat, other flat: rows of several whole examples in random order, nothing shared, and in another order;
- packed: rows of prefix trees.

MAPE is mean |a - b| over mean |b| for each factor's gradient, against "unpacked" unless said otherwise. What shares
nothing differs by rounding alone, so it says how exact the arithmetic is, and packing should be little worse: "orders"
is how far the two flat updates are from each other, the unpacked model in two orders of its rows. Two models, a
Llama of four layers and Qwen3-8B's shape, each in bfloat16 and in IEEE float32 (no TF32) with weights that are the same
numbers, so that bfloat16 is compared with float32 too. The deep float32 model takes long: it is only run if asked for,
after the deep bfloat16 one, with packed rows.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import gradients
import numpy as np
import stored_examples
import workload
from gradients import Difference
from transformers import PretrainedConfig

from hf_megapack.batch import PackedBatch, RowSchedule

NAMES = {
    "llama": "Llama, bfloat16",
    "llama_float32": "Llama, float32",
    "deep": "Qwen3-8B shape, bfloat16",
    "deep_float32": "Qwen3-8B shape, float32",
}
# Kinds of rows that each model runs.
ROWS = {
    "llama": ("unpacked", "reverse", "flat", "other flat", "packed"),
    "llama_float32": ("unpacked", "packed"),
    "deep": ("unpacked", "flat", "other flat", "packed"),
    "deep_float32": ("packed",),
}
TARGETS = {
    "llama": "loss 0.1 %, worst MAPE 1 %",
    "llama_float32": "worst MAPE 0.01 %",
    "deep": "1.2 times orders",
}


def one_row_each(groups: Sequence[list[dict]], options: argparse.Namespace) -> PackedBatch:
    """Return an update whose rows are the given groups of examples in the given order, nothing shared.

    Args:
        groups: Examples of each row.
        options: The command line.

    Raises:
        SystemExit: If a group does not fit into a row.
    """
    parts = [gradients.pack(group, options.capacity, options.multiple, packing_strategy="ffd") for group in groups]
    rows = tuple(row for part in parts for row in part.rows)
    if len(rows) != len(groups):
        raise SystemExit(f"{len(groups)} groups gave {len(rows)} rows; raise --capacity.")
    return PackedBatch(
        rows=rows,
        schedule=RowSchedule(
            row_index=np.arange(len(rows), dtype=np.int32)[None], is_dummy=np.zeros((1, len(rows)), bool)
        ),
        num_examples=sum(part.num_examples for part in parts),
        num_logical_tokens=sum(part.num_logical_tokens for part in parts),
        num_loss_tokens=sum(part.num_loss_tokens for part in parts),
        packing_seconds=0.0,
    )


def random_groups(examples: list[dict], capacity: int, multiple: int, seed: int) -> list[list[dict]]:
    """Return the examples in random order, cut wherever the next one does not fit into a row."""
    shuffled, limit = list(examples), capacity // multiple * multiple
    random.Random(seed).shuffle(shuffled)
    groups, filled = [[]], 0
    for example in shuffled:
        size = example["input_ids"].size
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(example)
        filled += size
    return groups


def all_batches(examples: list[dict], options: argparse.Namespace) -> dict[str, PackedBatch]:
    """Return the update in every kind of rows.

    Args:
        examples: Of the update.
        options: The command line.

    Raises:
        SystemExit: If packing shares nothing or the updates learn other numbers of tokens: nothing would be compared.
    """
    batches = {
        "unpacked": one_row_each([[example] for example in examples], options),
        "reverse": one_row_each([[example] for example in reversed(examples)], options),
        "flat": one_row_each(random_groups(examples, options.capacity, options.multiple, 0), options),
        "other flat": one_row_each(random_groups(examples, options.capacity, options.multiple, 1), options),
        "packed": gradients.pack(examples, options.capacity, options.multiple),
    }
    slots = {name: sum(row.input_ids.size for row in batch.rows) for name, batch in batches.items()}
    if slots["packed"] >= slots["flat"] or len({batch.num_loss_tokens for batch in batches.values()}) != 1:
        raise SystemExit(f"The updates are no fair comparison: {slots} slots.")
    return batches


def model_of(name: str, options: argparse.Namespace) -> tuple[PretrainedConfig, dict]:
    """Return a model's configuration and what its backend is told.

    Args:
        name: One of NAMES.
        options: The command line.
    """
    settings = {"bf16": not name.endswith("float32"), "recompute": "auto"}
    if name.startswith("deep"):
        return workload.model_config("tiny" if options.tiny else "qwen3_8b", options.layers), settings
    return gradients.reduced_llama(is_tiny=options.tiny), settings


def measure(name: str, examples: Sequence[stored_examples.Example], options: argparse.Namespace) -> dict[str, tuple]:
    """Return loss and gradients of a model in every kind of rows.

    Args:
        name: One of NAMES.
        examples: Of the update.
        options: The command line.
    """
    config, settings = model_of(name, options)
    batches = all_batches(gradients.columns(examples, config.vocab_size), options)
    workload.reset_peak()
    probe = gradients.Probe(config, gradients.backend_arguments(**settings))
    results = {}
    for rows in ROWS[name]:
        began, batch = time.perf_counter(), batches[rows]
        results[rows] = probe.run(batch)
        sizes = [row.input_ids.size for row in batch.rows]
        seconds = time.perf_counter() - began
        print(f"{name}, {rows}: loss {results[rows][0]:.6f}, {seconds:.1f} s, rows of {sizes}", flush=True)
    print(f"{name}: {config.num_hidden_layers} layers, peak {workload.peak_gib():.1f} GiB", flush=True)
    probe.close()
    return results


def print_table(found: dict[str, dict[str, Difference]]) -> None:
    """Print every difference, packing's beside that of rows without sharing."""
    print(f"\n| model | rows | {gradients.HEADER} | worst, mean over flat | over orders | target |\n|" + "---|" * 10)
    for model, differences in found.items():
        wide = model.removesuffix("_rounding")
        name = NAMES[model] if model == wide else f"{NAMES[wide.removesuffix('_float32')]}, against float32 packed"
        for rows, difference in differences.items():
            over, target = ["", ""], ""
            if rows == "packed":
                target = TARGETS.get(model, "")
                over = [
                    f"{difference.worst / least.worst:.2f}, {difference.mean / least.mean:.2f}" if least else ""
                    for least in (differences.get("flat"), differences.get("orders"))
                ]
            print(f"| {name} | {rows} | {difference.cells()} | {' | '.join(over)} | {target} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples_file", type=Path, required=True, help="what end_to_end.py --prepare wrote")
    parser.add_argument("--data", choices=list(stored_examples.FILES), default="tau")
    parser.add_argument("--examples", type=int, default=8, help="examples of the update")
    parser.add_argument("--every", type=int, default=3, help="of the file every third example, for example")
    parser.add_argument("--capacity", type=int, default=16384, help="slots of a row")
    parser.add_argument("--multiple", type=int, default=4096, help="of a row's slots: kernels are compiled for a size")
    parser.add_argument("--layers", type=int, help="fewer layers than Qwen3-8B has")
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=["llama", "llama_float32", "deep"])
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--json", type=Path, help="write the table into this file too")
    return parser.parse_args()


def main() -> None:
    """Measure the models one after the other and print the table after each."""
    options = parse_arguments()
    gradients.use_ieee_float32()
    print(workload.describe_machine(), flush=True)
    stored = stored_examples.load_examples(options.examples_file, options.data)
    examples = stored[:: options.every][: options.examples]
    found, results = {}, {}
    for model in options.models:
        results[model] = measure(model, examples, options)
        found[model] = {
            rows: Difference.between(result, results[model]["unpacked"])
            for rows, result in results[model].items()
            if "unpacked" in results[model] and rows != "unpacked"
        }
        if "other flat" in results[model]:
            found[model]["orders"] = Difference.between(results[model]["other flat"], results[model]["flat"])
        narrow = results.get(model.removesuffix("_float32"))
        if model.endswith("float32") and narrow is not None:
            found[f"{model}_rounding"] = {
                rows: Difference.between(narrow[rows], results[model]["packed"]) for rows in narrow
            }
        print_table({key: value for key, value in found.items() if key.startswith(model)})
        if options.json is not None:
            lines = {m: {rows: dataclasses.asdict(d) for rows, d in rest.items()} for m, rest in found.items()}
            options.json.write_text(json.dumps(lines))
    print_table(found)


if __name__ == "__main__":
    main()
