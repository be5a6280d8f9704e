"""A process group of one process and then one of all, within the same processes."""

import datetime

import torch
import torch.distributed as dist
import workload
from megatron.core import parallel_state

SIZE = 2


def join(size: int) -> None:
    """Enter a world of this process alone or of all.

    Args:
        size: Processes in it.
    """
    name = "nccl" if torch.cuda.is_available() else "gloo"
    if size == 1:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(name, timeout=datetime.timedelta(seconds=300))


def leave() -> None:
    """Leave the world, and forget Megatron-Core's groups in it."""
    workload.synchronize()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def largest(value: float) -> float:
    """Return the largest of the ranks' values; no rank is past this before every rank has reached it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)
