"""Let Megatron-Core run on a machine without a GPU.

Megatron-Core 0.16 to 0.19 asks CUDA for a device, a random state or a factory call's memory even when every tensor
lives on the host. `host_device` replaces those few answers while Megatron-Core code runs and puts the originals back
afterwards; on a machine with a GPU it does nothing.
"""

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansHost(TorchFunctionMode):
    """Send factory calls that name the device "cuda" to the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


def _get_rng_state(*_args, **_kwargs) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args, **_kwargs) -> None:
    torch.set_rng_state(state)


@functools.cache
def has_gpu() -> bool:
    """Return True where the model runs on a CUDA device."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """Return the device that holds the model on this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def integers_on_device(array: np.ndarray, dtype: type[np.integer] = np.int64) -> torch.Tensor:
    """Copy integers to the device that holds the model, in line with the work that is queued there.

    A copy from memory that is not pinned would make the host wait until the device has done that work.

    Args:
        array: Integers of any width.
        dtype: Of the copy.

    Returns:
        The array's shape.
    """
    tensor = torch.from_numpy(array.astype(dtype))
    return tensor.pin_memory().to(compute_device(), non_blocking=True) if has_gpu() else tensor


@contextlib.contextmanager
def host_device() -> Iterator[None]:
    """Run a block of Megatron-Core code on the host where there is no GPU.

    Source:
        The calls replaced are `torch.cuda.current_device` (`megatron.core.tensor_parallel.layers`), `device="cuda"`
        (`megatron.core.pipeline_parallel.schedules`), `torch.cuda.synchronize`
        (`megatron.core.pipeline_parallel.p2p_communication`), `_get_cuda_rng_state` / `_set_cuda_rng_state`
        (`megatron.core.tensor_parallel.random`, used by recompute), and `torch.cuda.Stream`
        (`megatron.core.transformer.moe.token_dispatcher`, whose dispatcher makes one and is then replaced); 0.16.1 and
        0.19.2. They can go when Megatron-Core takes its device from the tensors it is given.
    """
    if has_gpu():
        yield
        return
    from megatron.core.tensor_parallel import random as mcore_random

    stand_ins = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "Stream", lambda: None),
        (mcore_random, "_get_cuda_rng_state", _get_rng_state),
        (mcore_random, "_set_cuda_rng_state", _set_rng_state),
    ]
    originals = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        with _CudaMeansHost():
            yield
    finally:
        for (owner, name, _), original in zip(stand_ins, originals, strict=True):
            setattr(owner, name, original)
