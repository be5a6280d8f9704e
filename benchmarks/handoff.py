"""What torch.compile makes of the shared expert's hand-offs between CUDA streams, with and without the fix.

    python benchmarks/handoff.py

Each case runs Megatron-Core's own methods with a producer that is late, for inputs filled with 1 to 5, and prints what
came out beside what should have:

    output   a side stream is late, `get_output` hands its result to the main stream      2 (x + 1)
    input    the main stream is late, `pre_forward_comm` hands its result to the side     2 (x + 1)
    steps    all five steps with a gate; math and the main stream's work are slow         x + 3
    layer    a whole MoELayer with routed and gated shared experts, forward and backward  as without torch.compile

The variants are SharedExpertMLP without torch.compile ("eager"), and with it: as it is ("unfixed"), with only its
hand-offs outside of the graph ("hand-offs"), and hf_megapack's ("fixed"). `math` says where the linears of `steps` ran:
compiled or eager, on which stream; `ms` is the median time of a forward, to compare with the line above the table.
"""

import argparse
import logging
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version

import torch
import torch._dynamo

import hf_megapack.megatron  # noqa: F401 (the quiet import comes first)

# isort: split
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from hf_megapack import MegaPackConfig
from hf_megapack.megatron.handoff import handoff_methods, keep_handoffs_eager, keep_transfers_eager
from hf_megapack.megatron.host import compute_device
from hf_megapack.megatron.parallel import ParallelLayout, initialize_parallel

SHAPE = (193, 2688)
CYCLES = 10_000_000
VALUES = (1, 2, 3, 4, 5)
STATES = getattr(shared_experts, "SharedExpertState", None)
# What ran in the last forward: (stream handle, compiled or eager).
RAN: list[tuple[int, str]] = []


@torch.compiler.disable
def delay(cycles: int = CYCLES) -> None:
    """Keep the current stream busy; a break in the graph, as a call into Transformer Engine is."""
    torch.cuda._sleep(cycles)


@torch.library.custom_op("handoff::slow_add", mutates_args=())
def slow_add(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return x + 1 after a delay; no break in the graph."""
    torch.cuda._sleep(CYCLES)
    RAN.append((torch.cuda.current_stream().cuda_stream, how))
    return x + 1


@slow_add.register_fake
def _slow_add_shape(x, how):
    return torch.empty_like(x)


slow_add.register_autograd(lambda _context, grad: (grad, None))


class SlowLinear(torch.nn.Module):
    """Stands for a linear of the shared expert."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return x + 1 and no bias."""
        return slow_add(x, "compiled" if torch.compiler.is_compiling() else "eager"), None


def mcore_config(**fields: object) -> TransformerConfig:
    """Return a configuration of MoE layers with overlap, without what it says about defaults of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=1,
            add_bias_linear=False,
            bias_activation_fusion=False,
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_overlap=True,
            **fields,
        )


def layout() -> ParallelLayout:
    """Return the place of this process in a world of one."""
    return initialize_parallel(MegaPackConfig(output_dir="unused", report_to="none"))


class Case:
    """Megatron-Core's methods on a module without weights; mixed into the variant's class."""

    def __init__(self, *, gate: bool = False):
        torch.nn.Module.__init__(self)
        self.config = mcore_config(
            hidden_size=SHAPE[1],
            num_attention_heads=1,
            num_moe_experts=2,
            moe_shared_expert_intermediate_size=SHAPE[1],
            gated_linear_unit=False,
            activation_func=torch.nn.Identity(),
        )
        self.activation_func = self.config.activation_func
        self.linear_fc1, self.linear_fc2 = SlowLinear(), SlowLinear()
        self.use_shared_expert_gate = gate
        # A gate of sigmoid(0) = 1/2.
        self.gate_weight = torch.zeros(1, SHAPE[1], device=compute_device()) if gate else None
        self.tp_group = layout().tensor_group
        self.stream = torch.cuda.Stream()
        self.cached_fc1_input = self.cached_fc2_input = self.cached_fc2_output = self.cached_output = None
        self.gate_score = None
        self._overlap_state = STATES and STATES.IDLE


class OutputCase(Case):
    """The side stream is late; `get_output` hands its result to the main stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 2 (x + 1)."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            delay()
            self.cached_output = x + 1
        self._overlap_state = STATES and STATES.POST_FORWARD_COMM_DONE
        return self.get_output() * 2


class InputCase(Case):
    """The main stream is late; `pre_forward_comm` hands its result to the side stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 2 (x + 1)."""
        delay()
        self.pre_forward_comm(x + 1)
        return self.read()

    @torch.compiler.disable
    def read(self) -> torch.Tensor:
        """Return twice what the side stream was given, computed there."""
        with torch.cuda.stream(self.stream):
            result = self.cached_fc1_input * 2
        self.cached_fc1_input, self._overlap_state = None, STATES and STATES.IDLE
        torch.cuda.current_stream().wait_stream(self.stream)
        return result


class StepsCase(Case):
    """All five steps in order, with a gate; everything is late."""

    def __init__(self):
        super().__init__(gate=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + 3."""
        delay()
        self.pre_forward_comm(x + 1)
        self.linear_fc1_forward_and_act()
        delay(2 * CYCLES)
        self.linear_fc2_forward()
        self.post_forward_comm()
        return self.get_output() * 2


def hand_offs_alone(shared_expert: type[SharedExpertMLP]) -> type[SharedExpertMLP]:
    """Return a class that keeps only the hand-offs out of the graph and leaves the steps to Dynamo."""
    eager = {name: torch.compiler.disable(getattr(shared_expert, name)) for name in handoff_methods(shared_expert)}
    return type("HandOffsAlone", (shared_expert,), eager)


VARIANTS: dict[str, Callable[[type[SharedExpertMLP]], type[SharedExpertMLP]]] = {
    "unfixed": lambda shared_expert: shared_expert,
    "hand-offs": hand_offs_alone,
    "fixed": keep_handoffs_eager,
}
CASES: dict[str, tuple[type[Case], Callable[[int], int]]] = {
    "output": (OutputCase, lambda x: 2 * (x + 1)),
    "input": (InputCase, lambda x: 2 * (x + 1)),
    "steps": (StepsCase, lambda x: x + 3),
}


def build_case(case: str, variant: str) -> torch.nn.Module:
    """Return a module of one case with the methods of one variant."""
    kind = CASES[case][0]
    return type(kind.__name__, (kind, VARIANTS[variant](SharedExpertMLP)), {})()


def outputs(case: str, variant: str, backend: str = "inductor") -> Iterator[tuple[set[float], float]]:
    """Yield, for each value of x, the values found in the output and the milliseconds that the forward took.

    Args:
        case: A key of `CASES`.
        variant: A key of `VARIANTS`, or "eager" for the unfixed class without torch.compile.
        backend: Of torch.compile.
    """
    torch._dynamo.reset()
    module = build_case(case, "unfixed" if variant == "eager" else variant)
    run = module if variant == "eager" else torch.compile(module, backend=backend)
    with torch.no_grad():
        # The first call compiles, and what it executes while it traces is not what it will execute; it leaves x + 1
        # with x = 0 in the memory that the next call is given.
        for value in (0, 0, *VALUES):
            x = torch.full(SHAPE, float(value), device=compute_device())
            RAN.clear()
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = run(x)
            torch.cuda.synchronize()
            milliseconds = (time.perf_counter() - start) * 1e3
            found = set(result.unique().tolist())
            del result
            if value:
                yield found, milliseconds


def where_math_ran() -> str:
    """Say what the linears of the last forward ran as, and on which stream."""
    main = torch.cuda.current_stream().cuda_stream
    return ", ".join(f"{how} on {'main' if stream == main else 'side'}" for stream, how in RAN) or "-"


def build_layer(variant: str) -> MoELayer:
    """Return a MoELayer of four experts and a gated shared one, with weights that only the seed decides."""
    layout()
    torch.manual_seed(0)
    config = mcore_config(
        hidden_size=512,
        ffn_hidden_size=1024,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_shared_expert_intermediate_size=1024,
        moe_shared_expert_gate=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    # megatron-core 0.19 has functools.partial where 0.16 has ModuleSpec.
    submodules = spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules
    kind = VARIANTS["unfixed" if variant == "eager" else variant](SharedExpertMLP)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules.shared_experts = ModuleSpec(module=kind, submodules=linears)
    layer = MoELayer(config, submodules, layer_number=1).to(compute_device())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) / math.sqrt(parameter.shape[-1]))
    if variant == "fixed":
        keep_transfers_eager(layer.token_dispatcher)
    return layer


class LateLayer(torch.nn.Module):
    """A MoELayer whose input is late."""

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        delay()
        return self.layer(x * 1.5)[0]


def layer_results(variant: str, backend: str = "inductor") -> list[torch.Tensor]:
    """Return the output and the gradient of the input of a whole layer, three times for three inputs.

    Args:
        variant: A key of `VARIANTS`, or "eager".
        backend: Of torch.compile.
    """
    torch._dynamo.reset()
    module = LateLayer(build_layer(variant))
    run = module if variant == "eager" else torch.compile(module, backend=backend)
    results = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(256, 1, 512, generator=generator).to(compute_device()).requires_grad_()
        output = run(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        torch.cuda.synchronize()
        results += [output.detach().cpu(), gradient.cpu()]
    # The first call compiles.
    return results[2:]


def print_cases(backend: str) -> None:
    """Print the table of the small cases."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(10 * CYCLES)
    torch.cuda.synchronize()
    sleep = (time.perf_counter() - start) * 100
    print(f"one delay: {sleep:.1f} ms; steps take {3 * sleep:.0f} ms overlapped, {5 * sleep:.0f} one after the other\n")
    print(f"{'case':8}{'variant':11}{'x=1: got':>12}{'want':>6}{'exact of 5':>12}{'ms':>8}  math")
    for case, (_, want) in CASES.items():
        for variant in ("eager", *VARIANTS):
            try:
                found, milliseconds = zip(*outputs(case, variant, backend), strict=True)
            except Exception:
                print(f"{case:8}{variant:11}{'raised':>12}\n{_tail()}", flush=True)
                continue
            exact = sum(values == {want(x)} for x, values in zip(VALUES, found, strict=True))
            got = "/".join(f"{value:g}" for value in sorted(found[0])[:3])
            row = f"{case:8}{variant:11}{got:>12}{want(1):>6}{exact:>12}{sorted(milliseconds)[2]:>8.1f}"
            print(f"{row}  {where_math_ran()}", flush=True)


def print_layers(backend: str) -> None:
    """Print how far a compiled layer is from one that is not."""
    print("\nrelative difference from the layer without torch.compile")
    print(f"{'layer':8}{'variant':11}{'output':>10}{'gradient':>10}")
    eager = None
    # The unfixed one comes last: counts read too early can leave a CUDA error behind.
    for variant in ("eager", "fixed", "unfixed"):
        try:
            results = layer_results(variant, backend)
        except Exception:
            print(f"{'':8}{variant:11}{'raised':>10}\n{_tail()}", flush=True)
            continue
        eager = eager or results
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(results, eager, strict=True)]
        print(f"{'':8}{variant:11}{max(errors[::2]):>10.1e}{max(errors[1::2]):>10.1e}", flush=True)


def _tail() -> str:
    return "\n".join(f"    {line}" for line in traceback.format_exc().strip().splitlines()[-8:])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--parts", nargs="+", default=["cases", "layer"], choices=["cases", "layer"])
    arguments = parser.parse_args()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(
        f"{name}, torch {torch.__version__}, megatron-core {version('megatron-core')}, {arguments.backend}", flush=True
    )
    start = time.perf_counter()
    if "cases" in arguments.parts:
        print_cases(arguments.backend)
    if "layer" in arguments.parts:
        print_layers(arguments.backend)
    print(f"\n{time.perf_counter() - start:.0f} s in all, mostly compilation")


if __name__ == "__main__":
    main()
