"""Reads a torch.profiler trace: which GPU kernels ran, what launched them, where the GPU waited and the host blocked.

A kernel belongs to the operators that enclose its launch on the host's thread. On a trace without a GPU the innermost
operators stand in for kernels, so that everything but the launches can be tried on a CPU.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Every kernel gets the first group whose rule it meets; see `group_of`.
GROUPS = (
    "communication",
    "optimizer and gradient norm",
    "LM head and loss",
    "attention",
    "GEMM LoRA",
    "GEMM frozen",
    "copies, casts and concatenation",
    "norms, rope, activation, other elementwise",
)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_OPTIMIZER = re.compile(r"Optimizer\.step|gradient norm|multi_tensor|_foreach_|fused_adam", re.I)
_HEAD = re.compile(r"HeadLoss|lm_?head|cross_?entropy|vocab|_nll|log_?prob", re.I)
_ATTENTION = re.compile(r"flex_attention|flash|fmha|tree_attention|scaled_dot_product|FusedAttn|TreeAttention", re.I)
_PRODUCT_OP = re.compile(r"aten::(mm|addmm|bmm|baddbmm)(_|$)")
_PRODUCT_KERNEL = re.compile(r"gemm|nvjet|xmma|cublas|splitk|cutlass", re.I)
_LORA = re.compile(r"lora", re.I)
_COPY_OP = re.compile(
    r"aten::(copy_|cat|clone|contiguous|_to_copy|fill_|zero_|index_select)$|direct_copy|Memcpy|Memset"
)
_COPY_KERNEL = re.compile(r"CatArray|copy_kernel|Memcpy|Memset", re.I)
_BLOCKING = re.compile(r"Synchronize$|^cudaMemcpy$|^cuMemcpy(Dto|Hto)")


@dataclass(frozen=True)
class Operator:
    """An operator of the host: its name and the shapes of its inputs."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill of the GPU; times in microseconds; operators from the outermost."""

    name: str
    start: float
    duration: float
    operators: tuple[Operator, ...]

    @property
    def is_backward(self) -> bool:
        """Whether autograd's engine launched it; what is computed again counts as backward."""
        return any(op.name.startswith("autograd::engine") for op in self.operators)


@dataclass
class Trace:
    """What was read.

    Attributes:
        kernels: By start.
        window: Beginning and end of the steps, in microseconds.
        num_steps: Steps in it.
        blocked: Calls that block the host, by name and innermost operators: times and microseconds.
        copies: Copies by kind, as in "Memcpy DtoH": times and microseconds.
        has_gpu: Whether kernels are kernels.
    """

    kernels: list[Kernel] = field(default_factory=list)
    window: tuple[float, float] = (0.0, 0.0)
    num_steps: int = 0
    blocked: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))
    copies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))
    has_gpu: bool = True

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.window[1] - self.window[0]) / 1e6


def _operator(event: dict) -> Operator:
    dims = event.get("args", {}).get("Input Dims", [])
    shapes = tuple(tuple(d) for d in dims if isinstance(d, list) and d and all(isinstance(x, int) for x in d))
    return Operator(event["name"], shapes)


def _enclosing(events: Iterable[dict]) -> Iterable[tuple[dict, tuple[Operator, ...], bool]]:
    """Yield each host event with the operators around it and whether it has none inside."""
    by_thread = defaultdict(list)
    for event in events:
        by_thread[event["pid"], event["tid"]].append(event)
    for thread in by_thread.values():
        thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        stack: list[tuple[float, Operator]] = []
        for place, event in enumerate(thread):
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            end = event["ts"] + event["dur"]
            has_inner = place + 1 < len(thread) and thread[place + 1]["ts"] < end
            yield event, tuple(op for _, op in stack), not has_inner
            stack.append((end, _operator(event)))


def read_trace(path: Path) -> Trace:
    """Read a file that `torch.profiler.profile.export_chrome_trace` wrote.

    Args:
        path: The .json file; its steps are marked by the profiler's `step`.

    Raises:
        ValueError: If no step is marked.
    """
    events = [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    if not steps:
        raise ValueError(f"{path} has no ProfilerStep: call the profiler's step().")
    trace = Trace(num_steps=len(steps))
    trace.window = (min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps))
    trace.has_gpu = any(e.get("cat") == "kernel" for e in events)
    launches: dict[int, tuple[Operator, ...]] = {}
    host = [e for e in events if e.get("cat") in ON_HOST and not e["name"].startswith("ProfilerStep#")]
    for event, operators, is_innermost in _enclosing(host):
        if event["cat"] in ("cuda_runtime", "cuda_driver"):
            launches[event.get("args", {}).get("correlation", -1)] = operators
            if _BLOCKING.search(event["name"]) and _inside(event, trace.window):
                around = " in ".join(op.name for op in reversed(operators[-3:])) or "Python"
                _count(trace.blocked, f"{event['name']}: {around}", event["dur"])
        elif not trace.has_gpu and event["cat"] == "cpu_op" and _inside(event, trace.window):
            own = (*operators, _operator(event))
            products = [op for op in own if _PRODUCT_OP.match(op.name)]
            # A product has operators inside that do nothing.
            if own[-1] is products[0] if products else is_innermost:
                trace.kernels.append(Kernel(event["name"], event["ts"], event["dur"], own))
    for event in (e for e in events if e.get("cat") in ON_GPU):
        if not _inside(event, trace.window):
            continue
        operators = launches.get(event.get("args", {}).get("correlation"), ())
        trace.kernels.append(Kernel(event["name"], event["ts"], event["dur"], operators))
        if event["cat"] == "gpu_memcpy":
            _count(trace.copies, event["name"], event["dur"])
    trace.kernels.sort(key=lambda kernel: kernel.start)
    return trace


def _inside(event: dict, window: tuple[float, float]) -> bool:
    return window[0] <= event["ts"] < window[1]


def _count(table: dict[str, list[float]], key: str, duration: float) -> None:
    table[key][0] += 1
    table[key][1] += duration


def group_of(kernel: Kernel, *, vocab_size: int, widest_lora: int) -> str:
    """Return which of GROUPS a kernel belongs to.

    Args:
        kernel: The kernel.
        vocab_size: A product with this dimension is the LM head's.
        widest_lora: A product with a dimension no larger is LoRA's.
    """
    names = [kernel.name, *(op.name for op in kernel.operators)]
    products = [op for op in kernel.operators if _PRODUCT_OP.match(op.name)]
    sizes = [size for op in products for shape in op.shapes[:3] if len(shape) > 1 for size in shape]
    is_product = bool(products) or bool(_PRODUCT_KERNEL.search(kernel.name))
    rules = (
        "nccl" in kernel.name.lower(),
        any(_OPTIMIZER.search(name) for name in names),
        vocab_size in sizes or any(_HEAD.search(name) for name in names),
        any(_ATTENTION.search(name) for name in names),
        any(_LORA.search(name) for name in names) or (is_product and bool(sizes) and min(sizes) <= widest_lora),
        is_product,
        bool(_COPY_KERNEL.search(kernel.name)) or any(_COPY_OP.search(name) for name in names[-1:]),
        True,
    )
    return GROUPS[rules.index(True)]


def busy_microseconds(kernels: Sequence[Kernel]) -> float:
    """Return the time in which at least one kernel ran; they are sorted by start."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        end = kernel.start + kernel.duration
        total += max(0.0, end - max(until, kernel.start))
        until = max(until, end)
    return total


def gaps(trace: Trace, fewest: float = 20.0) -> Counter:
    """Return the microseconds in which the GPU waited, by the operator that launched the next kernel.

    Args:
        trace: The trace.
        fewest: Shorter gaps are summed under one name.
    """
    found, until = Counter(), trace.window[0]
    for kernel in trace.kernels:
        if (gap := kernel.start - until) > 0:
            names = [op.name for op in kernel.operators]
            label = " < ".join(reversed(names[-2:])) or kernel.name[:50]
            found[label if gap >= fewest else f"each below {fewest:.0f} us"] += gap
        until = max(until, kernel.start + kernel.duration)
    found["after the last kernel"] += max(0.0, trace.window[1] - until)
    return found
