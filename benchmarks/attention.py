"""TFLOP/s of tree attention on one GPU, beside dense causal attention over the same number of visible pairs.

    python benchmarks/attention.py
    python benchmarks/attention.py --examples_file examples.npz --backends package triton dense
    python benchmarks/attention.py --examples_file examples.npz --rows flat --backends package triton thd

Operations are 4 per visible pair, head and head element forward, 2.5 times that backward; a tree's pairs are counted,
and the dense side is causal over the length that has as many. "package" is what tree attention chooses, "triton" forces
FlexAttention's kernels; "thd" is Transformer Engine's attention within each sequence of rows that share nothing;
"dense" is torch's scaled_dot_product_attention with cuDNN, and flash-attn-4 where it can be imported. Each is a process
of its own. The rows are conversations of 16 turns with one leaf for each turn's answer, 64 leaves under one system
prompt; with --examples_file (from end_to_end.py --prepare) also the fullest row of real ones; and whole examples side
by side, real ones if there is a file. Then rows of 50 lengths, to count what is compiled for them.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import workload
from attention_rows import FLAT_ROWS, ROWS, Case, cases, count_pairs, make_row

from hf_megapack.batch import PackedRow

BACKENDS = ("package", "triton", "thd", "dense")
NUM_LENGTHS = 50
QUEUED = 6
# Relative norm of the error against float32 that bfloat16 inputs explain.
TOLERANCE = 2e-2


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some work in milliseconds, after a warm-up.

    Several calls are queued at once, as layers queue theirs, so what the host takes for a call is hidden as far as the
    GPU takes longer.
    """
    for _ in range(2):
        work()
        workload.synchronize()
    began, times = time.perf_counter(), []
    work()
    workload.synchronize()
    # Of long calls fewer repeats say enough.
    repeats = 3 if time.perf_counter() - began > 0.1 else 7
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(QUEUED):
                work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / QUEUED)
        else:
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def teraflops(pairs: int, heads: tuple[int, int, int], factor: float, ms: float) -> float:
    """Return 10^12 operations per second: `factor` 1 is a forward pass."""
    return factor * 4 * pairs * heads[0] * heads[2] / ms / 1e9


def forward_and_backward(attend: Callable[[], torch.Tensor]) -> None:
    """Run both passes, with a gradient laid out as a model hands it over."""
    output = attend()
    output.backward(torch.ones_like(output, memory_format=torch.contiguous_format))


def time_both(attend: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return milliseconds of a forward pass without gradients, and of a forward and a backward pass."""
    gradient = torch.randn_like(attend(), memory_format=torch.contiguous_format)

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        for tensor in inputs:
            tensor.grad = None
        attend().backward(gradient)

    return milliseconds(forward, inputs[0].device), milliseconds(both, inputs[0].device)


def result(case: Case, backend: str, pairs: int, times: tuple[float, float], **more: object) -> dict:
    """Return one line of the table, as a dict."""
    forward, both = times
    rates = {
        "forward": teraflops(pairs, case.heads, 1.0, forward),
        "backward": teraflops(pairs, case.heads, 2.5, both - forward) if both > forward else float("nan"),
        "both": teraflops(pairs, case.heads, 3.5, both),
    }
    return {"case": case.name, "backend": backend, "pairs": pairs, "ms": times, **rates, **more}


def report(line: dict) -> None:
    """Hand a line of the table over, and print it at once: the tables come when all is done."""
    workload.emit(line)
    rates = ", ".join(f"{key} {line[key]:.0f}" for key in ("forward", "backward", "both"))
    print(f"{line['case']}, {line['backend']}: {rates} TFLOP/s, both {line['ms'][1]:.3f} ms", flush=True)


def force_kernels(kernels: str) -> None:
    """Make tree attention use one kind of kernels, whatever it would choose."""
    from hf_megapack.megatron import attention

    attention.gpu_kernels = lambda query: kernels


def make_inputs(
    row: PackedRow, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype, *, is_flat: bool
) -> tuple:
    """Return query, key and value, and the row's parameters, on the device; for "thd" with the row's sequences."""
    from hf_megapack.megatron.attention import TreeParams
    from hf_megapack.megatron.sequences import Sequences
    from hf_megapack.packing import sequence_boundaries

    queries, keys, size = heads
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(row.input_ids.size, n, size, device=device, generator=generator).to(dtype).requires_grad_()
        for n in (queries, keys, keys)
    ]
    arrays = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (row.position_ids, row.subtree_end))
    position_ids, subtree_end = arrays
    longest = int(row.position_ids.max()) + 1
    params = TreeParams(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=position_ids,
        subtree_end=subtree_end,
    )
    if is_flat:
        params.sequences = Sequences.of(sequence_boundaries(row.subtree_end), None)
    return tensors, params


def attention_of(backend: str, device: torch.device) -> Callable:
    """Return the attention of a backend on a device."""
    from hf_megapack.megatron import attention
    from hf_megapack.megatron.sequences import fused_sequence_attention

    if backend == "thd":
        return lambda *qkv, **options: fused_sequence_attention(*qkv[:3], qkv[3].sequences, **options)
    return attention.gpu_tree_attention if device.type == "cuda" else attention.host_tree_attention


def time_mask(inputs: Sequence[torch.Tensor], params: object, row: PackedRow, window: int | None) -> float:
    """Return the median milliseconds, on the host and until the GPU is done, of what a row's first layer prepares.

    Where the row's sequences are attended one by one these are prepared before the first layer; that is timed then.
    """
    from hf_megapack.megatron import attention
    from hf_megapack.megatron.sequences import Sequences
    from hf_megapack.packing import sequence_boundaries

    times = []
    for _ in range(12):
        workload.synchronize()
        began = time.perf_counter()
        if params.sequences is None:
            attention.prepare_row(inputs[0], params, window)
        else:
            Sequences.of(sequence_boundaries(row.subtree_end), None)
        workload.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def check(backend: str, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Compare values and gradients with the dense twin in float32 on a short row.

    Args:
        backend: Whose attention.
        options: The command line.
        device: Where to attend.
        dtype: Of query, key and value.

    Raises:
        SystemExit: If they differ by more than TOLERANCE.
    """
    from hf_megapack.megatron.attention import dense_tree_attention

    is_flat = backend == "thd"
    heads = (4, 2, 16) if options.shape == "tiny" else (32, 8, 128)
    case = Case("flat" if is_flat else "agent", 2048, heads)
    inputs, params = make_inputs(make_row(case, options), heads, device, dtype, is_flat=is_flat)
    twins = [tensor.detach().float().requires_grad_() for tensor in inputs]
    scale = case.heads[2] ** -0.5
    output = attention_of(backend, device)(*inputs, params, scale=scale)
    expected = dense_tree_attention(*twins, params, scale=scale)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient.float())
    pairs = [(output, expected), *((ours.grad, theirs.grad) for ours, theirs in zip(inputs, twins, strict=True))]
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]
    print(f"relative error of output and three gradients: {', '.join(f'{e:.1e}' for e in errors)}", flush=True)
    if not max(errors) < TOLERANCE:
        raise SystemExit(f"The attention differs from its twin by {max(errors):.1e}, more than {TOLERANCE}.")


def kernel_names(work: Callable[[], object]) -> list[str]:
    """Return the GPU kernels of some work, those that take longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [event.key[:70] for event in kernels[:3]]


def num_compiled(device: torch.device) -> int:
    """Return how many graphs torch.compile and kernels FlashAttention-4 have compiled in this process."""
    from torch._dynamo.utils import counters

    number = counters["stats"]["unique_graphs"]
    if device.type == "cuda" and "flash_attn.cute.interface" in sys.modules:
        interface = sys.modules["flash_attn.cute.interface"]
        functions = (interface._flash_attn_fwd, interface._bwd_preprocess, interface._flash_attn_bwd)
        functions += (interface._bwd_postprocess_convert,)
        number += sum(len(function.compile_cache.cache) for function in functions)
    return number


def count_compilations(backend: str, device: torch.device, dtype: torch.dtype, options: argparse.Namespace) -> str:
    """Run rows of many lengths forward and backward; say what was compiled and how long calls took."""
    tiny, is_flat, attend = options.shape == "tiny", backend == "thd", attention_of(backend, device)
    lengths = np.random.default_rng(1).integers(1000, 2000 if tiny else 16000, NUM_LENGTHS)
    heads = (4, 2, 16) if tiny else (32, 8, 128)
    before, seconds = num_compiled(device), []
    for length in map(int, lengths):
        row = make_row(Case("flat" if is_flat else "agent", length, heads), options)
        inputs, params = make_inputs(row, heads, device, dtype, is_flat=is_flat)
        workload.synchronize()
        began = time.perf_counter()
        forward_and_backward(functools.partial(attend, *inputs, params, scale=heads[2] ** -0.5))
        workload.synchronize()
        seconds.append(time.perf_counter() - began)
    return (
        f"{NUM_LENGTHS} rows of {lengths.min()} to {lengths.max()} slots: {num_compiled(device) - before} compilations "
        f"besides the {before} before; median {1e3 * statistics.median(seconds):.1f} ms, the slowest "
        f"{1e3 * max(seconds):.1f} ms"
    )


def run_ours(backend: str, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Measure tree attention with one kind of kernels, or attention within sequences."""
    is_flat = backend == "thd"
    if is_flat and device.type != "cuda":
        print("thd needs a GPU: Transformer Engine's attention runs nowhere else.", flush=True)
        return
    if backend == "triton" and device.type == "cuda":
        force_kernels(backend)
    attend = attention_of(backend, device)
    check(backend, options, device, dtype)
    chosen = [case for case in cases(options) if case.row in FLAT_ROWS or not is_flat]
    for number, case in enumerate(chosen):
        row = make_row(case, options)
        try:
            inputs, params = make_inputs(row, case.heads, device, dtype, is_flat=is_flat)
            began = time.perf_counter()

            def once(inputs=inputs, params=params, case=case) -> torch.Tensor:
                return attend(*inputs, params, scale=case.heads[2] ** -0.5, window=case.window)

            forward_and_backward(once)
            workload.synchronize()
            first = time.perf_counter() - began
            times = time_both(once, inputs)
            mask = time_mask(inputs, params, row, case.window) if device.type == "cuda" else 0.0
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {str(error).strip()[:300]}", flush=True)
            continue
        pairs, slots = count_pairs(row, case.window), row.input_ids.size
        report(result(case, backend, pairs, times, slots=slots, mask_ms=mask, first_s=first))
        if number == 0 and device.type == "cuda":
            print(f"kernels: {kernel_names(functools.partial(forward_and_backward, once))}", flush=True)
    workload.emit({"backend": backend, "compilations": count_compilations(backend, device, dtype, options)})


def dense_sides(device: torch.device) -> Iterator[tuple[str, Callable]]:
    """Yield dense causal attentions over tensors of shape (1, heads, length, size)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kind = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH

    def attend(query, key, value):
        grouped = query.shape[1] != key.shape[1]
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    yield "cuDNN" if device.type == "cuda" else "math SDPA", attend
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        print(f"no flash-attn-4: {error}", flush=True)
        return

    def attend_flash(query, key, value):
        output = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=True)
        return output[0] if isinstance(output, tuple) else output

    yield "flash-attn-4", attend_flash


def run_dense(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Measure dense causal attention over as many pairs as each case has."""
    for case in cases(options):
        pairs = count_pairs(make_row(case, options), case.window)
        length = round((2 * pairs) ** 0.5 / 128) * 128
        for name, attend in dense_sides(device):
            if name == "flash-attn-4" and case.heads[2] != 128:
                # Each size costs half a minute of compilation.
                continue
            # Grouped heads where the kernel takes them, else keys and values repeated beforehand.
            for groups in dict.fromkeys((case.heads[1], case.heads[0])):
                generator = torch.Generator(device).manual_seed(0)
                inputs = [
                    torch.randn(1, n, length, case.heads[2], device=device, generator=generator)
                    .to(dtype)
                    .requires_grad_()
                    for n in (case.heads[0], groups, groups)
                ]
                try:
                    times = time_both(lambda attend=attend, inputs=inputs: attend(*inputs), inputs)
                except Exception as error:
                    print(f"{name}, {case.name}: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
                    continue
                label = name if groups == case.heads[1] else f"{name}, heads repeated"
                report(result(case, label, length * (length + 1) // 2, times, slots=length))
                break


def run_backend(backend: str, options: argparse.Namespace) -> list[dict]:
    """Run one backend in a process of its own and return its results."""
    command = [__file__, "--backend", backend, "--shape", options.shape]
    command += ["--examples_file", options.examples_file] if options.examples_file else []
    command += ["--quick"] if options.quick else []
    command += ["--rows", *options.rows]
    print(f"\n== {backend}", flush=True)
    return workload.run_process(command, options.limit_s)


def print_tables(results: Sequence[dict]) -> None:
    """Print rates by case, what masks took, and what was compiled."""
    print("\n| row | attention | slots | visible pairs | TFLOP/s forward | backward | both | ms forward | ms both |")
    print("|" + "---|" * 9)
    timed = [line for line in results if "case" in line]
    for name in dict.fromkeys(line["case"] for line in timed):
        for line in (line for line in timed if line["case"] == name):
            rates = " | ".join(f"{line[key]:.0f}" for key in ("forward", "backward", "both"))
            times = " | ".join(f"{ms:.3f}" for ms in line["ms"])
            print(f"| {name} | {line['backend']} | {line['slots']:,} | {line['pairs']:,} | {rates} | {times} |")
    print("\n| row | attention | block mask or sequences ms | first call s |\n|---|---|---|---|")
    for line in timed:
        if "mask_ms" in line:
            print(f"| {line['case']} | {line['backend']} | {line['mask_ms']:.3f} | {line['first_s']:.1f} |")
    print()
    for line in results:
        if "compilations" in line:
            print(f"{line['backend']}: {line['compilations']}")


def main() -> None:
    """Run every backend and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples_file", type=Path, help="what end_to_end.py --prepare wrote")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--shape", choices=["full", "tiny"], default="full", help="tiny is for a CPU")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="kinds of rows")
    parser.add_argument("--quick", action="store_true", help="the first row alone")
    parser.add_argument("--limit_s", type=int, default=180, help="seconds for each backend")
    parser.add_argument("--json", type=Path, help="write the results into this file too")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend is None:
        print(workload.describe_machine(), flush=True)
        results = [line for backend in options.backends for line in run_backend(backend, options)]
        if options.json is not None:
            options.json.write_text(json.dumps(results))
        print_tables(results)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.backend == "dense":
        run_dense(options, device, dtype)
    else:
        run_ours(options.backend, options, device, dtype)


if __name__ == "__main__":
    main()
