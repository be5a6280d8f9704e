"""The shared expert's hand-offs between streams under torch.compile: eager, with compiled math on the side stream."""

import inspect

import pytest
import torch
from packaging.version import Version

import hf_megapack.megatron  # noqa: F401 (the quiet import comes first)

# isort: split
import megatron.core
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.handoff import CASES, RAN, VALUES, build_case, build_layer, layer_results, outputs, where_math_ran
from hf_megapack.errors import BackendError, ConfigError
from hf_megapack.megatron import handoff
from hf_megapack.megatron.handoff import (
    DISPATCHER_TRANSFER,
    handoff_methods,
    keep_handoffs_eager,
    keep_transfers_eager,
    overlap_fields,
    shared_expert_spec,
)
from hf_megapack.megatron.host import has_gpu
from tests.helpers.host_streams import HostStream, host_streams

EXPECTED = {
    **dict.fromkeys(("0.16", "0.17"), ("get_output", "pre_forward_comm")),
    **dict.fromkeys(("0.18", "0.19"), ("get_output", "pre_forward_comm", "wait_current_stream")),
}
# Dynamo and Inductor warn of what they trace and of the machine.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]
on_host = pytest.mark.skipif(has_gpu(), reason="real streams take the place of these")


@pytest.fixture
def log(monkeypatch):
    # megatron-core 0.16.1 leaves the name undefined where Transformer Engine is missing; 0.19.2 sets it to None.
    monkeypatch.setattr(moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None), raising=False)
    # Both classes keep the first stream that they make.
    monkeypatch.setattr(SharedExpertMLP, "stream", None)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)
    with host_streams(monkeypatch) as log:
        yield log


def run_compiled(module, backend, **factory):
    """Call a compiled module for x = 0 to 3; yield x, output and what was ordered and where math ran."""
    compiled = torch.compile(module, backend=backend)
    for value in range(4):
        x = torch.full((3, 2688), float(value), **factory)
        HostStream.log.clear()
        RAN.clear()
        output = compiled(x)
        yield x, output, [*HostStream.log], where_math_ran()


def test_the_methods_of_this_version_are_marked_and_its_class_is_left_alone():
    before = dict(inspect.getmembers(SharedExpertMLP, callable))
    eager = keep_handoffs_eager(SharedExpertMLP)
    version = ".".join(megatron.core.__version__.split(".")[:2])
    assert eager.eager_handoffs == handoff_methods(SharedExpertMLP) == EXPECTED[version]
    assert issubclass(eager, SharedExpertMLP)
    assert dict(inspect.getmembers(SharedExpertMLP, callable)) == before
    assert not hasattr(SharedExpertMLP, "eager_handoffs")


def test_asking_again_gives_the_same_class_and_an_override_is_not_taken_for_eager():
    eager = keep_handoffs_eager(SharedExpertMLP)
    assert keep_handoffs_eager(SharedExpertMLP) is eager
    assert keep_handoffs_eager(eager) is eager
    assert shared_expert_spec(None).module is eager

    class Override(eager):
        def get_output(self):
            return self.stream.wait_stream(None)

    assert keep_handoffs_eager(Override) is not Override
    assert "get_output" in vars(keep_handoffs_eager(Override))


@pytest.mark.parametrize("name", ["pre_forward_comm", "get_output", "linear_fc2_forward"])
def test_a_missing_method_is_named(name):
    changed = type("Changed", (SharedExpertMLP,), {name: None})
    with pytest.raises(BackendError, match=f"Changed has no {name}"):
        keep_handoffs_eager(changed)


def test_a_new_method_that_waits_is_named():
    class Changed(SharedExpertMLP):
        def hand_over(self):
            self.stream.wait_stream(None)

    with pytest.raises(BackendError, match="also orders CUDA streams in hand_over"):
        keep_handoffs_eager(Changed)


@on_host
@pytest.mark.parametrize("requires_grad", [False, True])
def test_hand_offs_run_at_every_call_and_math_compiled_on_the_side_stream(log, requires_grad):
    module = build_case("steps", "fixed")
    for x, output, ordered, math in run_compiled(module, "aot_eager", requires_grad=requires_grad):
        assert ordered == ["side waits", "main waits"]
        assert math == "compiled on side, compiled on side"
        assert torch.equal(output, x + 3)
        if requires_grad:
            (gradient,) = torch.autograd.grad(output.sum(), x)
            assert torch.equal(gradient, torch.ones_like(x))


@on_host
@pytest.mark.parametrize("variant", ["unfixed", "hand-offs"])
def test_without_the_fix_compiled_math_leaves_the_side_stream(log, variant):
    """Why the steps between the hand-offs enter their stream outside of the graph."""
    *_, (_, _, _, math) = run_compiled(build_case("steps", variant), "aot_eager")
    assert math == "compiled on main, compiled on main"


@on_host
@pytest.mark.parametrize("case", ["output", "input"])
@pytest.mark.parametrize("variant", ["unfixed", "fixed"])
def test_no_graph_holds_a_wait_of_the_fixed_class(log, case, variant):
    """Of the two waits of `output` the first is the case's own."""
    waits = []

    def keep(graph_module, _inputs):
        waits.extend(node for node in graph_module.graph.nodes if "wait_stream" in str(node.target))
        return graph_module.forward

    for x, output, ordered, _ in run_compiled(build_case(case, variant), keep):
        assert torch.equal(output, 2 * (x + 1))
        if variant == "fixed":
            assert ordered == ["side waits", "main waits"]
    own = 1 if case == "output" else 0
    assert len(waits) == own + (variant == "unfixed")


@on_host
@pytest.mark.slow
def test_a_compiled_layer_orders_its_streams_at_every_call(log):
    """Hand-offs of the shared expert and the dispatcher's copy of counts; output and gradient as without compile."""
    expected = layer_results("eager")
    assert {"side waits", "main waits", "side records", "host waits"} <= set(log)
    per_forward = len(log) // 4
    log.clear()
    for ours, theirs in zip(layer_results("fixed", "aot_eager"), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(log) == 4 * per_forward
    assert log[-per_forward:] == log[:per_forward]


@on_host
def test_transfers_are_kept_eager_once(log):
    layer = build_layer("unfixed")
    dispatcher = layer.token_dispatcher
    assert isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
    keep_transfers_eager(dispatcher)
    transfer = vars(dispatcher)[DISPATCHER_TRANSFER]
    keep_transfers_eager(dispatcher)
    assert vars(dispatcher)[DISPATCHER_TRANSFER] is transfer

    # What `preprocess` would have left there.
    dispatcher.num_out_tokens, dispatcher.num_global_tokens_per_local_expert = 4, torch.ones(1, 4)

    @torch.compile(backend="aot_eager")
    def route(counts):
        return dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", counts + 1)

    for _ in range(3):
        log.clear()
        assert route(torch.arange(4)).tolist() == [1, 2, 3, 4]
        assert log == ["side waits", "side records"]

    class Changed(MoEAlltoAllTokenDispatcher):
        def copy_counts(self):
            self.cuda_dtoh_stream.wait_stream(None)

    with pytest.raises(BackendError, match="also orders CUDA streams in copy_counts"):
        keep_transfers_eager(Changed.__new__(Changed))
    gather = MoEAllGatherTokenDispatcher.__new__(MoEAllGatherTokenDispatcher)
    keep_transfers_eager(gather)
    assert vars(gather) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_shared_expert": False}, "no shared expert"),
        ({"dispatcher": "allgather"}, "only 'alltoall'"),
        ({"tensor_size": 2}, "tensor_parallel_size=2: .* twice"),
    ],
)
def test_overlap_is_refused_where_it_would_do_nothing_or_something_else(monkeypatch, change, message):
    monkeypatch.setattr(handoff, "has_gpu", lambda: True)
    arguments = {"dispatcher": "alltoall", "tensor_size": 1, "has_shared_expert": True}
    fields = overlap_fields(**arguments)
    assert fields == {"moe_shared_expert_overlap": True}
    assert set(fields) <= set(inspect.signature(TransformerConfig).parameters)
    with pytest.raises(ConfigError, match=message):
        overlap_fields(**arguments | change)


@on_host
def test_overlap_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        overlap_fields(dispatcher="alltoall", tensor_size=1, has_shared_expert=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_late_producer_is_waited_for(case):
    """Exactly 4 for x = 1 where the unfixed class gives 2; see benchmarks/handoff.py."""
    want = CASES[case][1]
    found = [values for values, _ in outputs(case, "fixed")]
    assert found == [{float(want(x))} for x in VALUES]
    if case == "steps":
        assert where_math_ran() == "compiled on side, compiled on side"


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["output", "input"])
@pytest.mark.skipif(Version(torch.__version__) >= Version("2.13"), reason="torch keeps waits in its graphs")
def test_without_the_fix_a_late_producer_is_not_waited_for(case):
    values, _ = next(outputs(case, "unfixed"))
    assert values != {float(CASES[case][1](1))}


@pytest.mark.gpu
def test_a_compiled_layer_on_a_gpu_is_as_one_that_is_not(monkeypatch):
    monkeypatch.setattr(moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None), raising=False)
    for ours, theirs in zip(layer_results("fixed"), layer_results("eager"), strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()
