"""What the parts of a layer cost on one GPU: LoRA beside its frozen product, FP8, and the pointwise kernels.

    python benchmarks/layer_parts.py

Qwen3-8B's linears with 16,384 slots in bfloat16, LoRA of rank 16 for every projection that a linear fuses; forward and
backward, without the weight's gradient, as frozen weights need it. "joined" is what hf_megapack trains with; "apart" is
the frozen product plus the usual two of LoRA, added. Transformer Engine's Linear stands beside the largest of them, in
bfloat16 and in each FP8 recipe that the GPU has. The pointwise kernels stand beside plain PyTorch and the time that
their reads and writes take at the memory's nominal 4.8 TB/s. Medians of ten measurements of several calls each, which
are queued as layers queue theirs.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
import workload

from hf_megapack.kernels.pointwise import (
    HeadNorm,
    norm_and_residual,
    plain_norm_and_residual,
    plain_split_heads,
    plain_swiglu,
    split_heads,
    swiglu,
)
from hf_megapack.megatron.lora_products import FrozenLinearWithUpdate, StackedFactors

# Without a GPU the script only shows that it runs, on fewer slots and smaller linears.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, SHRINK = (16_384, 1) if DEVICE == "cuda" else (64, 16)
RANK = 16
# Inputs, outputs and fused projections.
LINEARS = {
    "q, k, v": (4096, 6144, 3),
    "o": (4096, 4096, 1),
    "gate, up": (4096, 24576, 2),
    "down": (12288, 4096, 1),
}
BYTES_PER_MS = 4.8e9
QUEUED = 6


class FrozenProduct(torch.autograd.Function):
    """x W^T with W frozen."""

    @staticmethod
    def forward(ctx, inputs, weight):  # noqa: D102
        ctx.save_for_backward(weight)
        return inputs @ weight.T

    @staticmethod
    def backward(ctx, grad):  # noqa: D102
        return grad @ ctx.saved_tensors[0], None


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median time of a call."""
    for _ in range(3):
        function()
    times = []
    for _ in range(10):
        if DEVICE == "cpu":
            began = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - began))
            continue
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(QUEUED):
            function()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / QUEUED)
    return statistics.median(times)


def random(*shape: int) -> torch.Tensor:
    """Return normal values in bfloat16 that want a gradient."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()


def time_lora() -> None:
    """Print each linear's time alone and with adapters."""
    print("\n| linear | frozen alone, ms | joined | apart | joined costs | apart costs |\n|" + "---|" * 6)
    totals = [0.0, 0.0, 0.0]
    for name, (num_inputs, num_outputs, num_projections) in LINEARS.items():
        num_inputs, num_outputs = num_inputs // SHRINK, num_outputs // SHRINK
        inputs, weight = random(SLOTS, num_inputs), random(num_outputs, num_inputs).detach()
        grad = random(SLOTS, num_outputs).detach()
        a = random(RANK * num_projections, num_inputs).detach().float().requires_grad_()
        b = random(num_outputs, RANK * num_projections).detach().float().requires_grad_()
        stacked = StackedFactors(a.detach().bfloat16(), b.detach().bfloat16())

        def frozen(inputs=inputs, weight=weight, grad=grad):
            torch.autograd.grad(FrozenProduct.apply(inputs, weight), inputs, grad)

        def joined(inputs=inputs, weight=weight, grad=grad, a=a, b=b, stacked=stacked):
            output = FrozenLinearWithUpdate.apply(inputs, weight, a, b, stacked, None)
            torch.autograd.grad(output, (inputs, a, b), grad)

        def apart(inputs=inputs, weight=weight, grad=grad, a=a, b=b):
            update = (inputs @ a.to(inputs.dtype).T) @ b.to(inputs.dtype).T
            torch.autograd.grad(FrozenProduct.apply(inputs, weight) + update, (inputs, a, b), grad)

        times = [milliseconds(side) for side in (frozen, joined, apart)]
        totals = [total + taken for total, taken in zip(totals, times, strict=True)]
        print_lora(name, times)
    print_lora("all", totals)


def print_lora(name: str, times: list[float]) -> None:
    """Print one row."""
    alone, joined, apart = times
    costs = (f"{100 * (taken / alone - 1):.1f} %" for taken in (joined, apart))
    print("|", " | ".join([name, *(f"{taken:.3f}" for taken in times), *costs]), "|")


def time_transformer_engine() -> None:
    """Print the time of the largest linear in Transformer Engine."""
    if importlib.util.find_spec("transformer_engine") is None:
        print("\nTransformer Engine is not installed.")
        return
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    num_inputs, num_outputs, _ = LINEARS["gate, up"]
    linear = te.Linear(num_inputs, num_outputs, bias=False, params_dtype=torch.bfloat16, device=DEVICE)
    linear.weight.requires_grad_(False)
    inputs, grad = random(SLOTS, num_inputs), random(SLOTS, num_outputs).detach()
    recipes = {
        "bfloat16": None,
        "tensorwise": recipe.Float8CurrentScaling(),
        "delayed": recipe.DelayedScaling(),
        "blockwise": recipe.Float8BlockScaling(),
    }
    print("\n| Transformer Engine's gate, up | ms |\n|---|---|")
    for name, chosen in recipes.items():

        def run(chosen=chosen):
            with te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
                output = linear(inputs)
            torch.autograd.grad(output, inputs, grad)

        print(f"| {name} | {milliseconds(run):.3f} |")


def time_pointwise() -> None:
    """Print the kernels' times beside plain PyTorch's."""
    gate_up, mixed, hidden, weight = (
        random(SLOTS, 24576),
        random(SLOTS, 6144),
        random(SLOTS, 4096),
        random(4096).detach(),
    )
    rotation = torch.randn(2, SLOTS, 1, 64, device=DEVICE)
    norm = HeadNorm(random(128).detach(), random(128).detach(), 1e-6)
    sizes = {"num_groups": 8, "head_dim": 128}
    print("\n| part | kernel, ms | plain | at the memory's speed |\n|---|---|---|---|")
    # Elements that forward and backward read and write.
    for name, sides, inputs, elements in (
        ("SwiGLU", (swiglu, plain_swiglu), gate_up, 4 * gate_up.numel()),
        (
            "heads with norm",
            tuple(lambda x, f=f: f(x, rotation, norm, **sizes) for f in (split_heads, plain_split_heads)),
            mixed,
            5 * mixed.numel(),
        ),
        (
            "norm of the residual stream",
            tuple(lambda x, f=f: f(x, weight, 1e-6) for f in (norm_and_residual, plain_norm_and_residual)),
            hidden,
            6 * hidden.numel(),
        ),
    ):
        times = []
        for side in sides:

            def run(side=side, inputs=inputs):
                outputs = side(inputs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                torch.autograd.grad(outputs, inputs, [output.detach() for output in outputs])

            times.append(milliseconds(run))
        print(f"| {name} | {times[0]:.3f} | {times[1]:.3f} | {2 * elements / BYTES_PER_MS:.3f} |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(workload.describe_machine())
    time_lora()
    time_transformer_engine()
    time_pointwise()
