"""A mixture of experts on one GPU or several: tokens per second, utilisation, and what share of the time routing takes.

    python benchmarks/moe.py
    python benchmarks/moe.py --layers 8 --rows 1 --settings recompute=full
    python benchmarks/moe.py --profiled 0
    torchrun --nproc-per-node 2 benchmarks/moe.py --settings expert_parallel_size=2
    python benchmarks/moe.py --device cpu

The model has the sizes of Qwen3-30B-A3B (with --device cpu tiny ones) and random bfloat16 weights, drawn where they
are trained; rank-16 adapters sit on all linear layers and on every expert. An update is some packed rows of 16,384
slots for each data-parallel rank: a prefix of 4,096 tokens, of which nothing is learned, and twelve continuations of
1,024, of which the second half is. The tokens are random; a random router spreads them fairly evenly.

Updates are timed as they are and the rates printed, then some are profiled; a profile of 48 layers takes minutes to
read. The share of a group is of the GPU's busy time; groups are told
apart by what launched a kernel, routing in the backward pass by the number of experts in its operands' shapes.

Model FLOP utilisation = (4 s W + 4 l V D + 14 L H d p) / (seconds x 989e12 x GPUs), for s slots that are no padding, l
slots with a loss, p visible pairs of slots, L layers, H query heads of size d, hidden size D, vocabulary V, and
W = L (2 D H d + 2 D G d + D E + 3 k D F): attention's weights with G key and value heads, the router of E experts, and
k experts of inner size F. Only experts that a slot goes to count; a frozen weight takes part in two products of two
operations, forward and for the gradient of its input. Nothing that is computed again counts, nor do LoRA's products.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import workload
from datasets import Dataset
from gpu_trace import Kernel, Trace, busy_microseconds, group_of, read_trace
from step_profile import RANK, WARM_UP, Counts, ProfiledTrainer, TimeThenProfile, matrix_rate, print_host
from torch.profiler import record_function
from transformers import Qwen3MoeConfig

from hf_megapack import MegaPackConfig
from hf_megapack.megatron.dispatch import SortingDispatcher
from hf_megapack.megatron.gather import GatheringDispatcher
from hf_megapack.megatron.moe import FrozenRouter

SHAPES = {
    "cuda": {
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "cpu": {
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
}
# Tokens of a prefix, continuations of it, and tokens of each; the CPU takes a sixteenth.
PREFIX, CONTINUATIONS, TAIL = 4096, 12, 1024
GROUPS = ("router", "dispatch", "experts", "attention", "other")
# "_TakeRows" and "_SumRows" also begin the names of those that gather.
_DISPATCH = ("megapack::dispatch", "_TakeRows", "_SumRows", "_AllToAll", "AllToAll")


class TimeThenReport(TimeThenProfile):
    """Calls `report` with itself as soon as the timed updates are done, whatever becomes of the profile."""

    def __init__(self, *args: object, report: Callable[["TimeThenReport"], None]):
        super().__init__(*args)
        self._report = report

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Take a lap, report, or tell the profiler."""
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == WARM_UP + self._num_timed:
            self._report(self)


def model_config(device: str, num_layers: int | None) -> Qwen3MoeConfig:
    """Return the configuration, with fewer layers if asked for."""
    sizes = SHAPES[device] | ({"num_hidden_layers": num_layers} if num_layers else {})
    return Qwen3MoeConfig(
        **sizes,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def make_examples(num_rows: int, vocab_size: int, scale: int) -> Dataset:
    """Return random conversations: so many prefixes, each with its continuations.

    Args:
        num_rows: Prefixes, each of which makes a row.
        vocab_size: Tokens are below.
        scale: What the lengths are divided by.
    """
    generator, ids, masks = np.random.default_rng(0), [], []
    prefix_size, tail_size = PREFIX // scale, TAIL // scale
    for _ in range(num_rows):
        prefix = generator.integers(0, vocab_size, prefix_size)
        for _ in range(CONTINUATIONS):
            ids.append(np.concatenate((prefix, generator.integers(0, vocab_size, tail_size))).astype(np.int32))
            mask = np.zeros(prefix_size + tail_size, np.uint8)
            mask[prefix_size + tail_size // 2 :] = 1
            masks.append(mask)
    return Dataset.from_dict(
        {"input_ids": ids, "labels": [np.where(m, i, -100) for i, m in zip(ids, masks, strict=True)]}
    )


def active_weights(config: Qwen3MoeConfig) -> int:
    """Return W of the module's docstring."""
    width, inner = config.hidden_size, config.moe_intermediate_size
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    routed = config.num_experts + 3 * config.num_experts_per_tok * inner
    return config.num_hidden_layers * width * (heads + routed)


def operations(counts: Counts, config: Qwen3MoeConfig) -> float:
    """Return the model's operations of an update."""
    queries = config.num_attention_heads * config.head_dim
    return (
        4.0 * active_weights(config) * (counts.slots - counts.padding)
        + 4.0 * config.vocab_size * config.hidden_size * counts.loss_slots
        + 14.0 * queries * config.num_hidden_layers * counts.pairs
    )


def name_in_profile(model: torch.nn.Module) -> None:
    """Let the profile show which kernels routers and dispatchers launch."""

    def named(function, name):
        def call(*args, **kwargs):
            with record_function(name):
                return function(*args, **kwargs)

        return call

    for module in model.modules():
        if isinstance(module, FrozenRouter):
            module.forward = named(module.forward, "megapack::router")
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, SortingDispatcher | GatheringDispatcher):
            for step in ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess", "combine_preprocess"):
                setattr(dispatcher, step, named(getattr(dispatcher, step), "megapack::dispatch"))
            for step in ("token_combine", "combine_postprocess"):
                setattr(dispatcher, step, named(getattr(dispatcher, step), "megapack::dispatch"))


def part_of(kernel: Kernel, config: Qwen3MoeConfig) -> str:
    """Return which of GROUPS a kernel belongs to."""
    names = [op.name for op in kernel.operators]
    if any("ExpertProducts" in name for name in names):
        return "experts"
    if "nccl" in kernel.name.lower() or any(part in name for part in _DISPATCH for name in names):
        return "dispatch"
    if group_of(kernel, vocab_size=config.vocab_size, widest_lora=3 * RANK) == "attention":
        return "attention"
    # A head may have as many elements as there are experts.
    is_of_heads = any("SplitHeads" in name for name in names)
    last = {shape[-1] for op in kernel.operators for shape in op.shapes}
    if "megapack::router" in names or (kernel.is_backward and config.num_experts in last and not is_of_heads):
        return "router"
    return "other"


def print_parts(trace: Trace, config: Qwen3MoeConfig) -> None:
    """Print the GPU's time by part, and the longest kernels of each."""
    parts, tops = defaultdict(lambda: [0.0, 0.0]), defaultdict(float)
    for kernel in trace.kernels:
        part = part_of(kernel, config)
        parts[part][kernel.is_backward] += kernel.duration
        product = next((op for op in reversed(kernel.operators) if op.shapes), None)
        tops[part, product.name if product else "", kernel.name[:60]] += kernel.duration
    steps, busy = trace.num_steps, busy_microseconds(trace.kernels)
    print("\n| part | ms per update | of busy time | forward ms | backward ms |\n|---|---|---|---|---|")
    for part in GROUPS:
        forward, backward = (us / 1e3 / steps for us in parts[part])
        share = sum(parts[part]) / max(busy, 1e-9)
        print(f"| {part} | {forward + backward:.2f} | {share:.1%} | {forward:.2f} | {backward:.2f} |")
    print(f"| GPU busy | {busy / 1e3 / steps:.2f} | | | |")
    print("\n| part | operator | kernel | ms per update |\n|---|---|---|---|")
    for (part, operator, name), us in sorted(tops.items(), key=lambda item: -item[1])[:30]:
        print(f"| {part} | {operator} | {name} | {us / 1e3 / steps:.2f} |")


def print_rates(counts: list[Counts], callback: TimeThenProfile, config: Qwen3MoeConfig) -> None:
    """Print tokens per second, utilisation and memory of the timed updates."""
    num_gpus = dist.get_world_size() if dist.is_initialized() else 1
    step = callback.seconds / len(counts)
    rate = sum(operations(c, config) for c in counts) / callback.seconds / num_gpus
    slots, logical = (sum(getattr(c, name) for c in counts) / len(counts) for name in ("slots", "logical"))
    laps = ", ".join(f"{lap:.3f}" for lap in callback.laps)
    print(
        f"\nper update: {slots:,.0f} slots in {counts[0].rows} rows, {logical:,.0f} tokens of the data, {num_gpus} GPUs"
    )
    print(f"seconds per update: {step:.4f} (each: {laps}); peak {callback.peak_gib:.1f} GiB")
    print(f"tokens/s {logical / step:,.0f}, executed slots/s {slots / step:,.0f}")
    measured = matrix_rate()
    nominal = f"{rate / (workload.NOMINAL_TFLOPS * 1e12):.1%} of nominal" if torch.cuda.is_available() else "no nominal"
    print(
        f"model: {rate / 1e12:.2f} TFLOP/s per GPU, {nominal}, {rate / measured:.1%} of the {measured / 1e12:.1f} "
        "TFLOP/s that one large product reaches",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=list(SHAPES), default="cuda")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--rows", type=int, default=4, help="rows per update and data-parallel rank")
    parser.add_argument("--updates", type=int, default=5, help=f"timed updates, after {WARM_UP}")
    parser.add_argument("--profiled", type=int, default=1, help="profiled updates, 0 for no profile")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="for MegaPackConfig")
    parser.add_argument("--trace", type=Path, help="keep rank 0's profile in this file")
    return parser.parse_args()


def main() -> None:
    """Build, train, profile and print.

    Raises:
        SystemExit: If the device asked for is not the one that would be used.
    """
    options = parse_arguments()
    if (options.device == "cuda") is not torch.cuda.is_available():
        raise SystemExit("There is no GPU: use --device cpu." if options.device == "cuda" else "Hide the GPUs first.")
    rank, scale = int(os.environ.get("RANK", "0")), 1 if options.device == "cuda" else 16
    config, settings = model_config(options.device, options.layers), workload.parse_settings(options.settings)
    sizes = [int(settings.get(f"{axis}_parallel_size", 1)) for axis in ("tensor", "pipeline", "context")]
    num_replicas = int(os.environ.get("WORLD_SIZE", "1")) // int(np.prod(sizes))
    steps = WARM_UP + options.updates + (1 + options.profiled if options.profiled else 0)
    began = time.perf_counter()

    def report(callback: TimeThenReport) -> None:
        if rank != 0:
            return
        factors = sum(parameter.numel() for parameter in trainer.backend.parameters.values())
        print(workload.describe_machine())
        print(
            f"{config.num_hidden_layers} layers, {active_weights(config) / 1e9:.2f} billion active weights, "
            f"{factors / 1e6:.0f} million adapter parameters on this rank, built in {built:.0f} s"
        )
        print_rates(trainer.counts[WARM_UP : WARM_UP + options.updates], callback, config)

    with tempfile.TemporaryDirectory() as folder:
        path = options.trace if options.trace and rank == 0 else Path(folder) / f"trace-{rank}.json"
        arguments = {
            **workload.common_arguments(folder),
            "per_device_train_batch_size": options.rows * CONTINUATIONS,
            "train_sampling_strategy": "sequential",
            "num_train_epochs": 1,
            "logging_steps": 1,
            "packed_sequence_length": (PREFIX + CONTINUATIONS * TAIL) // scale,
            **settings,
        }
        examples = make_examples(options.rows * num_replicas, config.vocab_size, scale)
        trainer = ProfiledTrainer(
            model=config,
            args=MegaPackConfig(**arguments),
            # One epoch: each would begin with a new worker process, which the GPU waits for.
            train_dataset=examples.select(list(range(len(examples))) * steps),
            processing_class=workload.no_tokenizer(),
            peft_config=workload.lora_config(),
            callbacks=[TimeThenReport(options.updates, max(options.profiled, 1), path, report=report)],
        )
        built = time.perf_counter() - began
        name_in_profile(trainer.backend.model)
        trainer.train()
        if rank == 0 and options.profiled:
            trace = read_trace(path)
            print_parts(trace, config)
            print_host(trace)


if __name__ == "__main__":
    main()
