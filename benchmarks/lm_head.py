"""Loss and hidden gradient of a frozen head on one NVIDIA GPU: ours beside Liger, cut-cross-entropy and plain torch.

    python benchmarks/lm_head.py            # 4,096 and 16,384 slots of a 152K vocabulary
    python benchmarks/lm_head.py --sweep    # and our chunk sizes and launch shapes

Everybody gets the same bfloat16 hidden states and head (only the hidden states want a gradient), and computes the mean
loss and that gradient. Rounds go through all of them in turn, so that a change of the GPU's clock meets all alike; in a
round each runs four times and the last is timed; the table has medians. Memory is what one call allocates at its peak
beyond its inputs. Errors are relative to float32 products of the same inputs without TF32: of the loss, and of the
gradient as the norm of the difference over all slots, and the largest of single slots. "floor" is the two products
alone over all slots at once in bfloat16.

Labels are likely tokens: a label's logit is 0 to 19 above those of the other tokens, which have a standard deviation
of 2.5.
"""

import argparse
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from hf_megapack.kernels.cross_entropy import HeadPart, plain_linear_cross_entropy
from hf_megapack.megatron.loss import frozen_head_loss

VOCABULARY, HIDDEN = 151_936, 4_096
UNTIMED = 3
PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
SWEPT_CHUNKS = ((1024, 25_344), (1024, 38_016), (2048, 12_672), (2048, 16_896), (4096, 8_448), (8192, 4_224))
SWEPT_LAUNCHES = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 32))

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[[Data], tuple[torch.Tensor, torch.Tensor | None]]


class Reference(NamedTuple):
    """The mean loss and its gradient from float32 products."""

    loss: float
    grad: torch.Tensor


class Figures(NamedTuple):
    """One line of the table: milliseconds, bytes and relative errors."""

    name: str
    milliseconds: float
    peak_bytes: int
    loss_error: float
    grad_error: float
    worst_slot_error: float


def make_data(num_slots: int, seed: int = 0) -> Data:
    """Return hidden states that want a gradient, a frozen head and labels."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    head = draw(VOCABULARY, HIDDEN) * (2.5 / HIDDEN**0.5)
    labels = torch.randint(0, VOCABULARY, (num_slots,), generator=generator, device="cuda")
    likely = 3 * torch.rand((num_slots, 1), generator=generator, device="cuda", dtype=torch.bfloat16)
    return (draw(num_slots, HIDDEN) + likely * head[labels]).requires_grad_(), head, labels


@torch.no_grad()
def reference(data: Data, chunk: int = 1024) -> Reference:
    """Return the mean loss and its gradient from float32 products without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, head, labels = data
    head, grad, loss = head.float(), torch.empty_like(hidden, dtype=torch.float32), 0.0
    for start in range(0, len(labels), chunk):
        part = slice(start, start + chunk)
        log_probability = (hidden[part].float() @ head.T).log_softmax(dim=1)
        label = labels[part, None]
        loss -= log_probability.gather(1, label).sum(dtype=torch.float64).item()
        probability = log_probability.exp_()
        probability.scatter_(1, label, 0)
        probability.scatter_(1, label, -probability.sum(dim=1, keepdim=True))
        grad[part] = probability @ head / len(labels)
    return Reference(loss / len(labels), grad)


def through_backward(function: Callable[[Data], torch.Tensor]) -> Step:
    """Return a step that gives the loss and, by autograd, the gradient of the hidden states."""

    def step(data: Data) -> tuple[torch.Tensor, torch.Tensor | None]:
        data[0].grad = None
        loss = function(data)
        loss.backward()
        return loss.detach(), data[0].grad

    return step


def ours(data: Data) -> torch.Tensor:
    """Return the trainer's own loss."""
    hidden, head, labels = data
    return frozen_head_loss(hidden, head, labels, torch.ones_like(labels), 1 / len(labels)).loss


def liger(data: Data) -> torch.Tensor:
    """Return Liger's fused linear cross-entropy."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    result = LigerFusedLinearCrossEntropyFunction.apply(*data)
    return result[0] if isinstance(result, tuple) else result


def cut(filter_eps: str | None) -> Callable[[Data], torch.Tensor]:
    """Return cut-cross-entropy, which by default leaves small gradients out."""

    def loss(data: Data) -> torch.Tensor:
        from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

        return cut_cross_entropy(*data, impl="cce", filter_eps=filter_eps)

    return loss


def plain_torch(data: Data) -> torch.Tensor:
    """Return torch's cross-entropy on whole logits in float32, as transformers computes it."""
    hidden, head, labels = data
    return cross_entropy((hidden @ head.T).float(), labels)


def our_terms(function: Callable, **options) -> Step:
    """Return a step of ours below autograd."""

    def step(data: Data) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, head, labels = data
        weights = torch.full((len(labels),), 1 / len(labels), device="cuda")
        part = HeadPart(head, 0, VOCABULARY, None)
        terms = function(hidden.detach(), part, labels, weights, wants_grad=True, **options)
        return weights @ terms.nll_N, terms.grad_ND

    return step


def floor(data: Data) -> tuple[torch.Tensor, None]:
    """Do the two products alone."""
    with torch.no_grad():
        logits = data[0] @ data[1].T
        torch.mm(logits, data[1])
    return torch.zeros(()), None


def competitors() -> dict[str, Step]:
    """Return all sides by name."""
    return {
        "hf_megapack": through_backward(ours),
        "Liger fused linear cross-entropy": through_backward(liger),
        "cut-cross-entropy": through_backward(cut("high")),
        "cut-cross-entropy, unfiltered": through_backward(cut(None)),
        "torch, whole float32 logits": through_backward(plain_torch),
        "our plain PyTorch version": our_terms(plain_linear_cross_entropy),
        "floor: the products alone": floor,
    }


def check(name: str, step: Step, data: Data, expected: Reference) -> Figures | None:
    """Warm a side up and return its memory and errors, without a time; None, said on the screen, if it cannot run."""
    try:
        step(data)
        data[0].grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss, grad = step(data)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    except Exception as error:  # a side that is not installed or does not support this GPU
        print(
            f"{name}: not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True
        )
        torch.cuda.empty_cache()
        return None
    if grad is None:
        return Figures(name, 0.0, peak, 0.0, 0.0, 0.0)
    difference = grad.float() - expected.grad
    slots = difference.norm(dim=1) / expected.grad.norm(dim=1)
    loss_error = abs(loss.item() - expected.loss) / expected.loss
    grad_error = (difference.norm() / expected.grad.norm()).item()
    return Figures(name, 0.0, peak, loss_error, grad_error, slots.max().item())


def measure(sides: dict[str, Step], num_slots: int, rounds: int) -> list[Figures]:
    """Return the figures of the sides that run."""
    data = make_data(num_slots)
    expected = reference(data)
    figures = {name: check(name, step, data, expected) for name, step in sides.items()}
    running = {name: sides[name] for name, figure in figures.items() if figure is not None}
    times: dict[str, list[float]] = {name: [] for name in running}
    order = list(running.items())
    for number in range(rounds):
        turned = order[number % len(order) :] + order[: number % len(order)]
        for name, step in turned if number % 2 else reversed(turned):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The GPU's clock remembers what ran before: that is to be the same step.
            for _ in range(UNTIMED):
                step(data)
            begin.record()
            step(data)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return [figures[name]._replace(milliseconds=statistics.median(times[name])) for name in running]


def print_table(figures: list[Figures], num_slots: int) -> None:
    """Print one table."""
    print(f"\n{num_slots:,} slots x {HIDDEN:,} hidden x {VOCABULARY:,} tokens, bfloat16")
    print("| side | ms | peak MiB beyond inputs | loss error | gradient error | worst slot's |")
    print("|---|---|---|---|---|---|")
    for name, milliseconds, peak, *errors in figures:
        print(f"| {name} | {milliseconds:.2f} | {peak / 2**20:,.0f} | {' | '.join(f'{e:.1e}' for e in errors)} |")


def num_processors() -> int:
    """Return how many multiprocessors the GPU has."""
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def sweep_chunks(num_slots: int, rounds: int) -> list[Figures]:
    """Return our figures for chunks of other shapes and for logits that are rounded."""
    from hf_megapack.kernels.fused_cross_entropy import fused_linear_cross_entropy, plan_chunks

    plan = plan_chunks(num_slots, VOCABULARY, num_processors())
    swept = {f"{rows} slots, {columns} columns": {"rows": rows, "columns": columns} for rows, columns in SWEPT_CHUNKS}
    swept["bfloat16 logits"] = {"logits_dtype": torch.bfloat16}
    sides = {
        name: our_terms(fused_linear_cross_entropy, plan=plan._replace(**changes)) for name, changes in swept.items()
    }
    return measure(sides, num_slots, rounds)


def sweep_launches(num_slots: int, rounds: int) -> list[str]:
    """Return lines of a table: how long the kernel takes for one chunk, by its block and warps."""
    from hf_megapack.kernels.cross_entropy_triton import NUM_STATISTICS, Rows, exponentiate_rows
    from hf_megapack.kernels.fused_cross_entropy import plan_chunks

    plan = plan_chunks(num_slots, VOCABULARY, num_processors())
    labels = torch.randint(0, VOCABULARY, (plan.rows,), device="cuda")
    lines = [f"\nkernel, {plan.rows} x {plan.columns} logits", "| block | warps | us | TB/s |", "|---|---|---|---|"]
    logits = torch.empty((plan.rows, plan.columns), device="cuda")
    exps = logits.view(torch.bfloat16)[:, : plan.columns]
    for block, num_warps in SWEPT_LAUNCHES:
        times = []
        for _ in range(rounds + 3):
            logits.normal_(std=3)
            rows = Rows(labels, torch.zeros((NUM_STATISTICS, plan.rows), device="cuda"), None)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            exponentiate_rows(logits, exps, rows, first_token=0, block=block, num_warps=num_warps)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        microseconds = 1e3 * statistics.median(times[3:])
        moved = logits.numel() * (4 + 2) / microseconds / 1e6
        lines.append(f"| {block} | {num_warps} | {microseconds:.0f} | {moved:.2f} |")
    return lines


def installed(package: str) -> str:
    """Return a package's version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[4_096, 16_384])
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds through all sides")
    parser.add_argument("--sweep", action="store_true", help="also try our chunk sizes and launch shapes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    tables, lines = [], []
    if args.sweep:
        tables += [(sweep_chunks(slots, args.rounds), slots) for slots in args.slots]
        lines = [line for slots in args.slots for line in sweep_launches(slots, args.rounds)]
    tables += [(measure(competitors(), slots, args.rounds), slots) for slots in args.slots]
    print("\n".join(lines))
    print(f"\n{torch.cuda.get_device_name()}, {', '.join(map(installed, PACKAGES))}")
    for table in tables:
        print_table(*table)


if __name__ == "__main__":
    main()
