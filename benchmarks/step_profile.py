"""Where the time of a training step goes on one GPU, and how far it is from what the chip can do.

    python benchmarks/step_profile.py --examples_file examples.npz
    python benchmarks/step_profile.py --examples_file examples.npz --layers 8 --settings recompute=full

The examples are the first of end_to_end.py --prepare, the same in every update unless --different is given. Updates
are timed as they are, then some are profiled. The share of a group is of the GPU's busy time. Model FLOP
utilisation counts, for each slot that is no padding, 4 operations per frozen weight of the linear layers (forward and
the gradient of the input), the head's for slots with a loss, and attention's 14 per visible pair, head and head
element; nothing that is computed again, and LoRA's 6 per weight only where said.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import stored_examples
import torch
import workload
from gpu_trace import GROUPS, Trace, busy_microseconds, gaps, group_of, read_trace
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import Qwen3Config, TrainerCallback

from hf_megapack import MegaPackConfig, MegaPackTrainer
from hf_megapack.batch import IGNORE_LABEL, PackedBatch

WARM_UP = 3
RANK = 16


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one update computes: slots, those of them that are padding, those with a loss, and visible pairs."""

    slots: int
    padding: int
    loss_slots: int
    pairs: int
    rows: int
    logical: int

    @classmethod
    def of(cls, batch: PackedBatch) -> "Counts":
        """Count an update."""
        ends = [row.input_ids.size - row.num_padding_slots for row in batch.rows]
        return cls(
            slots=sum(row.input_ids.size for row in batch.rows),
            padding=sum(row.num_padding_slots for row in batch.rows),
            loss_slots=sum(int(((row.labels != IGNORE_LABEL) & (row.loss_weights > 0)).sum()) for row in batch.rows),
            pairs=sum(
                int((row.position_ids[:end].astype(np.int64) + 1).sum())
                for row, end in zip(batch.rows, ends, strict=True)
            ),
            rows=len(batch.rows),
            logical=batch.num_logical_tokens,
        )


class ProfiledTrainer(MegaPackTrainer):
    """Counts what each update computes, and names the gradient norm in the profile."""

    def __init__(self, *args, **kwargs):
        self.counts: list[Counts] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, *args, **kwargs):
        """Count the update and run it."""
        self.counts.append(Counts.of(inputs))
        return super().training_step(model, inputs, *args, **kwargs)

    def _clip_grad_norm(self, model):
        with record_function("gradient norm"):
            return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model, grad_norm=None):
        with record_function("gradient norm"):
            return super()._get_grad_norm(model, grad_norm)


class TimeThenProfile(TrainerCallback):
    """Warm-up, timed updates, one update to start the profiler, profiled updates.

    Args:
        num_timed: Updates that are timed.
        num_profiled: Updates that are profiled.
        path: Where the profile goes.

    Attributes:
        laps: Seconds of each timed update.
        seconds: Of all of them, between synchronisations with the GPU.
        peak_gib: GPU memory of tensors at most.
    """

    def __init__(self, num_timed: int, num_profiled: int, path: Path):
        self._num_timed, self.laps, self.seconds = num_timed, [], 0.0
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=num_profiled, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
            record_shapes=True,
        )

    def on_step_end(self, _args, state, *_rest, **_kwargs) -> None:
        """Take a lap or tell the profiler."""
        timed = state.global_step - WARM_UP
        if timed in (0, self._num_timed):
            workload.synchronize()
        now = time.perf_counter()
        if timed == 0:
            self._first = now
            workload.reset_peak()
        elif 0 < timed <= self._num_timed:
            self.laps.append(now - self._last)
        self._last = now
        if timed == self._num_timed:
            self.seconds, self.peak_gib = now - self._first, workload.peak_gib()
            self._profiler.start()
        elif timed > self._num_timed:
            self._profiler.step()

    def on_train_end(self, *_args, **_kwargs) -> None:
        """Stop the profiler."""
        self._profiler.stop()


def operations(counts: Counts, config: Qwen3Config) -> dict[str, float]:
    """Return the operations of an update: frozen layers, head, attention, and LoRA's, which come on top.

    Args:
        counts: Of the update.
        config: The model's sizes.
    """
    width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, inner = config.num_key_value_heads * config.head_dim, config.intermediate_size
    shapes = [(width, queries), (queries, width), *[(width, keys)] * 2, *[(width, inner)] * 2, (inner, width)]
    weights = config.num_hidden_layers * sum(a * b for a, b in shapes)
    factors = config.num_hidden_layers * sum(RANK * (a + b) for a, b in shapes)
    used = counts.slots - counts.padding
    return {
        "layers": 4.0 * weights * used,
        "head": 4.0 * config.vocab_size * width * counts.loss_slots,
        "attention": 14.0 * queries * config.num_hidden_layers * counts.pairs,
        "lora": 6.0 * factors * used,
    }


def matrix_rate() -> float:
    """Return the operations per second of one large product of random bfloat16 matrices."""
    is_gpu = torch.cuda.is_available()
    size = 8192 if is_gpu else 512
    device, dtype = ("cuda", torch.bfloat16) if is_gpu else ("cpu", torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(25):
        workload.synchronize()
        began = time.perf_counter()
        a @ b
        workload.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(times[5:])


def print_groups(trace: Trace, config: Qwen3Config) -> float:
    """Print the time by group and the longest operators; return the GPU's busy seconds per step."""
    total, phases, tops = defaultdict(float), defaultdict(lambda: [0.0, 0.0]), defaultdict(lambda: [0, 0.0])
    for kernel in trace.kernels:
        group = group_of(kernel, vocab_size=config.vocab_size, widest_lora=3 * RANK)
        total[group] += kernel.duration
        phases[group][kernel.is_backward] += kernel.duration
        product = next((op for op in reversed(kernel.operators) if op.shapes), None)
        label = (group, f"{product.name} {product.shapes[:3]}" if product else "", kernel.name[:60])
        tops[label][0] += 1
        tops[label][1] += kernel.duration
    steps, busy = trace.num_steps, busy_microseconds(trace.kernels)
    print("\n| group | ms per step | of busy time | forward ms | backward ms |\n|---|---|---|---|---|")
    for group in GROUPS:
        forward, backward = (us / 1e3 / steps for us in phases[group])
        share = total[group] / max(busy, 1e-9)
        print(f"| {group} | {total[group] / 1e3 / steps:.2f} | {share:.1%} | {forward:.2f} | {backward:.2f} |")
    print(f"| GPU busy | {busy / 1e3 / steps:.2f} | | | |")
    idle = 1e3 * trace.seconds / steps - busy / 1e3 / steps
    print(f"| GPU waiting, while profiled | {idle:.2f} | | | |")
    print("\n| longest: group | operator and shapes | kernel | calls per step | ms per step |\n|---|---|---|---|---|")
    for (group, operator, name), (calls, us) in sorted(tops.items(), key=lambda item: -item[1][1])[:30]:
        print(f"| {group} | {operator} | {name} | {calls / steps:.0f} | {us / 1e3 / steps:.2f} |")
    return busy / 1e6 / steps


def print_host(trace: Trace) -> None:
    """Print where the host blocks, what is copied, and before which operators the GPU waits."""
    steps = trace.num_steps
    calls = sum(count for count, _ in trace.blocked.values())
    print(f"\nblocking calls: {calls / steps:.1f} per step")
    for name, (count, us) in sorted(trace.blocked.items(), key=lambda item: -item[1][1])[:12]:
        print(f"  {count / steps:6.1f} per step, {us / 1e3 / steps:8.2f} ms: {name}")
    for name, (count, us) in sorted(trace.copies.items()):
        print(f"  {count / steps:6.1f} per step, {us / 1e3 / steps:8.2f} ms: {name}")
    print("the GPU waits, while profiled, for")
    for name, us in gaps(trace).most_common(10):
        print(f"  {us / 1e3 / steps:8.2f} ms per step: {name}")


def print_utilisation(
    counts: list[Counts], callback: TimeThenProfile, config: Qwen3Config, *, busy: float, has_gpu: bool
) -> None:
    """Print the floor and how far the timed updates are from it.

    Args:
        counts: Of the timed updates.
        callback: Their times.
        config: The model's sizes.
        busy: Seconds per step in which the GPU worked, from the profile.
        has_gpu: Whether the datasheet's rate applies.
    """
    work = [operations(c, config) for c in counts]
    sums = {name: sum(w[name] for w in work) for name in work[0]}
    model, step = sum(sums.values()) - sums["lora"], callback.seconds / len(counts)
    rate = matrix_rate()
    mean = {f.name: sum(getattr(c, f.name) for c in counts) / len(counts) for f in dataclasses.fields(Counts)}
    print("\nper update: " + ", ".join(f"{value:,.0f} {name}" for name, value in mean.items()))
    print("operations: " + ", ".join(f"{name} {value / model:.1%}" for name, value in sums.items()) + " of the model's")
    laps = ", ".join(f"{lap:.3f}" for lap in callback.laps)
    print(f"seconds per update: {step:.4f} (each: {laps}); peak {callback.peak_gib:.1f} GiB")
    print(f"logical tokens/s {mean['logical'] / step:,.0f}, executed slots/s {mean['slots'] / step:,.0f}")
    print(f"measured matrix rate: {rate / 1e12:.1f} TFLOP/s")
    for name, total in (("model", model), ("model and LoRA", model + sums["lora"])):
        achieved = total / callback.seconds
        nominal = f"{achieved / (workload.NOMINAL_TFLOPS * 1e12):.1%} of nominal" if has_gpu else "no nominal rate"
        floor = total / len(counts) / rate
        print(
            f"{name}: {achieved / 1e12:.1f} TFLOP/s, {nominal}, {achieved / rate:.1%} of measured; "
            f"floor {floor:.4f} s, the step takes {step / floor:.2f} times that"
        )
    if has_gpu:
        print(
            f"outside the GPU: {1 - busy / step:.1%} of a timed step, if profiled steps do the same work (--different)"
        )


def main() -> None:
    """Train, profile and print.

    Raises:
        SystemExit: If there are too few examples.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples_file", type=Path, required=True, help="what end_to_end.py --prepare wrote")
    parser.add_argument("--data", default="tau")
    parser.add_argument("--examples", type=int, default=64, help="examples per update")
    parser.add_argument("--updates", type=int, default=5, help=f"timed updates, after {WARM_UP}")
    parser.add_argument("--profiled", type=int, default=2, help="profiled updates")
    parser.add_argument("--different", action="store_true", help="updates go through the file")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="for MegaPackConfig")
    parser.add_argument("--trace", type=Path, help="keep the profile in this file")
    workload.add_shape_arguments(parser)
    options = parser.parse_args()
    steps = WARM_UP + options.updates + 1 + options.profiled
    examples, needed = stored_examples.load_examples(options.examples_file, options.data), steps * options.examples
    if not options.different:
        examples = examples[: options.examples] * steps
    if len(examples) < needed:
        raise SystemExit(f"{needed} examples are needed, {options.data} has {len(examples)}: lower --updates.")
    print(workload.describe_machine(), flush=True)
    config, has_gpu = workload.model_config(options.shape, options.layers), torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or Path(folder) / "trace.json"
        callback = TimeThenProfile(options.updates, options.profiled, path)
        arguments = {
            **workload.common_arguments(folder),
            "per_device_train_batch_size": options.examples,
            "train_sampling_strategy": "sequential",
            "num_train_epochs": 1,
            "logging_steps": 1,
            "packed_sequence_length": 32768,
            **workload.parse_settings(options.settings),
        }
        trainer = ProfiledTrainer(
            model=config,
            args=MegaPackConfig(**arguments),
            train_dataset=stored_examples.as_dataset(examples[:needed]),
            processing_class=workload.no_tokenizer(),
            peft_config=workload.lora_config(),
            callbacks=[callback],
        )
        trainer.train()
        counts = trainer.counts[WARM_UP : WARM_UP + options.updates]
        trace = read_trace(path)
    busy = print_groups(trace, config)
    print_host(trace)
    print_utilisation(counts, callback, config, busy=busy, has_gpu=has_gpu)


if __name__ == "__main__":
    main()
