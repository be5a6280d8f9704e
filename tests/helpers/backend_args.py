"""The training arguments that the backend reads, without the rest of MegaPackConfig."""

from types import SimpleNamespace


def backend_args(**options) -> SimpleNamespace:
    """Return arguments for one process in float32, changed by `options`."""
    defaults = {
        "bf16": False,
        "recompute": "off",
        "seed": 0,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "virtual_pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
        "sequence_parallel": False,
        "sequence_length_multiple": None,
        "packed_length_multiple": None,
        "fp8": None,
        "torch_compile": False,
        "moe_shared_expert_overlap": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    assert set(options) <= set(defaults)
    return SimpleNamespace(**(defaults | options))
