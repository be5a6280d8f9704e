"""Keep what crosses CUDA streams in a mixture-of-experts layer out of torch.compile.

With `moe_shared_expert_overlap` Megatron-Core computes the shared expert on a side stream, in five steps that the token
dispatcher calls between its own. The first and the last hand memory from one stream to the other; what orders them is a
`wait_stream`, and nothing else. torch 2.11 runs a compiled `wait_stream` once, while it makes the graph, and never
again; and it compiles `with torch.cuda.stream` to a note that its code generator does not read, so that the steps in
between run on whichever stream is current. A consumer then reads memory that nobody has written yet.

So every method that waits runs outside of Dynamo. The three steps between enter the side stream outside of the graph;
what they compute is still compiled, and launched there. Making only the hand-offs eager would leave compiled math on
the main stream: not overlapped, and read by a gate on the side stream before it is there.

This is a subclass for the layer spec rather than a patch of Megatron-Core's class. Other users of that class see no
change, there is no order of installing and compiling to keep, asking again gives the same class, and there is no
process-wide setting that a second model could contradict. The dispatcher is not in the spec, so one method of each
instance is replaced.

It can go when torch 2.13 is the oldest supported, which keeps waits in its graphs, if tests/megatron/test_handoff.py
passes on a GPU with SharedExpertMLP in its place.
"""

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from hf_megapack.errors import BackendError, ConfigError
from hf_megapack.megatron.host import has_gpu

HANDOFFS = frozenset({"pre_forward_comm", "get_output"})
# A method of its own since megatron-core 0.18, where dispatchers call it too.
STANDALONE_WAIT = "wait_current_stream"
STEPS = frozenset({"linear_fc1_forward_and_act", "linear_fc2_forward", "post_forward_comm"})
DISPATCHER_TRANSFER = "_maybe_dtoh_and_synchronize"
REASON = "it orders CUDA streams, which a compiled graph may not"


def overlap_fields(*, dispatcher: str, tensor_size: int, has_shared_expert: bool) -> dict[str, object]:
    """Return the fields of TransformerConfig that overlap the shared expert with the dispatcher's communication.

    Args:
        dispatcher: `moe_token_dispatcher_type`.
        tensor_size: Number of processes that share each layer's weights.
        has_shared_expert: Whether the model has one.

    Returns:
        Keyword arguments of TransformerConfig.

    Raises:
        ConfigError: If there is nothing to overlap, or the overlapped steps would not compute what the others do.
    """
    if not has_shared_expert:
        raise ConfigError("moe_shared_expert_overlap=True but the model has no shared expert; set it to False.")
    if not has_gpu():
        raise ConfigError("moe_shared_expert_overlap=True needs a CUDA device, whose streams it uses; set it to False.")
    if dispatcher != "alltoall":
        raise ConfigError(
            f"moe_shared_expert_overlap=True with the dispatcher {dispatcher!r}: only 'alltoall' calls the shared "
            "expert's steps. Use 'alltoall', or set moe_shared_expert_overlap=False."
        )
    if tensor_size > 1:
        # The overlapped linears leave communication to the steps around them; LoraLinear does its own.
        raise ConfigError(
            f"moe_shared_expert_overlap=True with tensor_parallel_size={tensor_size}: the adapters of the shared "
            "expert would be summed over the ranks twice. Use tensor_parallel_size=1, or set "
            "moe_shared_expert_overlap=False."
        )
    return {"moe_shared_expert_overlap": True}


def shared_expert_spec(submodules: MLPSubmodules) -> ModuleSpec:
    """Return what `MoESubmodules.shared_experts` takes in 0.16 and in 0.19, overlapped or not.

    Args:
        submodules: The linears of the shared expert.

    Raises:
        BackendError: If Megatron-Core's shared expert is not the one this module knows.
    """
    return ModuleSpec(module=keep_handoffs_eager(SharedExpertMLP), submodules=submodules)


@functools.cache
def keep_handoffs_eager(shared_expert: type[SharedExpertMLP], /) -> type[SharedExpertMLP]:
    """Return a shared expert whose hand-offs between streams Dynamo leaves alone and whose math it compiles.

    Args:
        shared_expert: Megatron-Core's class, which stays as it is, or a class that this function has returned.

    Returns:
        A subclass that says in `eager_handoffs` which methods run outside of Dynamo; the same one for the same class.
        A class that has the mark already is returned as it is.

    Raises:
        BackendError: If a known method is missing, or another one waits for a stream.

    Source:
        `megatron.core.transformer.moe.shared_experts.SharedExpertMLP`, 0.16.1 and 0.19.2. In 0.19.2 the backward of the
        first linear asks the side stream to wait for the current one, to begin after that of the routed experts. Here
        the current one is the side stream; autograd itself orders what must be ordered.
    """
    if "eager_handoffs" in vars(shared_expert):
        return shared_expert
    handoffs = handoff_methods(shared_expert)
    overrides: dict[str, object] = {
        name: torch.compiler.disable(getattr(shared_expert, name), reason=REASON) for name in handoffs
    }
    overrides.update({name: _on_side_stream(getattr(shared_expert, name)) for name in sorted(STEPS)})
    doc = f"{shared_expert.__name__} whose hand-offs between CUDA streams stay out of torch.compile."
    return type(
        f"EagerHandoff{shared_expert.__name__}",
        (shared_expert,),
        {"__doc__": doc, "__module__": __name__, "eager_handoffs": handoffs, **overrides},
    )


def handoff_methods(shared_expert: type[SharedExpertMLP]) -> tuple[str, ...]:
    """Return the methods that hand memory from one stream to another, sorted.

    Args:
        shared_expert: Megatron-Core's class or a subclass.

    Raises:
        BackendError: If a known method is missing, or another one waits for a stream.
    """
    waiting = _methods_that_name(shared_expert, ("wait_stream", "wait_event", STANDALONE_WAIT))
    _require(shared_expert, HANDOFFS | STEPS)
    _refuse_unknown(shared_expert, waiting - HANDOFFS - {STANDALONE_WAIT})
    return tuple(sorted(HANDOFFS | (waiting & {STANDALONE_WAIT})))


def keep_transfers_eager(dispatcher: MoETokenDispatcher) -> None:
    """Keep a dispatcher's copies of counts to the host, which it makes on a stream of its own, out of torch.compile.

    The all-gather dispatcher copies on the current stream, so nothing of it changes. Calling again changes nothing.

    Args:
        dispatcher: `MoELayer.token_dispatcher` of a layer that may be compiled.

    Raises:
        BackendError: If the method is missing, or another one crosses streams.

    Source:
        `megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher`, 0.16.1 and 0.19.2.
    """
    kind = type(dispatcher)
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        _require(kind, {DISPATCHER_TRANSFER})
        if DISPATCHER_TRANSFER not in vars(dispatcher):
            transfer = torch.compiler.disable(getattr(dispatcher, DISPATCHER_TRANSFER), reason=REASON)
            setattr(dispatcher, DISPATCHER_TRANSFER, transfer)
    crossing = _methods_that_name(kind, ("wait_stream", "wait_event", "record_event", "synchronize"))
    _refuse_unknown(kind, crossing - {DISPATCHER_TRANSFER})


def _on_side_stream(step: Callable[..., None]) -> Callable[..., None]:
    """Enter the side stream outside of the graph, so that what Dynamo makes of the step is launched there."""

    @functools.wraps(step)
    def enter(self, *args, **kwargs):
        with torch.cuda.stream(self.stream):
            return step(self, *args, **kwargs)

    return torch.compiler.disable(enter, recursive=False, reason=REASON)


def _methods_that_name(owner: type, names: Iterable[str]) -> set[str]:
    """Return the methods whose own code names one of these attributes, seen through decorators."""
    wanted = set(names)
    methods = inspect.getmembers(owner, inspect.isfunction)
    return {name for name, method in methods if wanted.intersection(inspect.unwrap(method).__code__.co_names)}


def _require(owner: type, names: Iterable[str]) -> None:
    missing = sorted(name for name in names if not callable(getattr(owner, name, None)))
    if missing:
        raise BackendError(
            f"{owner.__module__}.{owner.__name__} has no {', '.join(missing)}, which must stay out of torch.compile or "
            "on its side stream. Install megatron-core 0.16 to 0.19."
        )


def _refuse_unknown(owner: type, names: set[str]) -> None:
    if names:
        raise BackendError(
            f"{owner.__module__}.{owner.__name__} also orders CUDA streams in {', '.join(sorted(names))}, which must "
            "stay out of torch.compile. Install megatron-core 0.16 to 0.19."
        )
