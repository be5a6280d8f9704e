"""Ranks that are threads of this process: collectives without processes, for arithmetic that is split over ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch


class ThreadGroup:
    """What a process group tells about one of several ranks that are threads."""

    def __init__(self, index: int, num_ranks: int):
        self.index = index
        self.num_ranks = num_ranks

    def rank(self) -> int:
        """Return the number of this rank."""
        return self.index

    def size(self) -> int:
        """Return the number of ranks."""
        return self.num_ranks


def run_on_threads(num_ranks: int, function: Callable[[ThreadGroup], object], monkeypatch) -> list:
    """Call the function on every rank and return the results in their order.

    A barrier and a list that all see stand for torch.distributed's sums, gathers and exchanges.
    """
    barrier, given = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks

    def everyone(tensor, group):
        given[group.rank()] = tensor.clone()
        barrier.wait()
        tensors = list(given)
        barrier.wait()
        return tensors

    def all_reduce(tensor, operation=torch.distributed.ReduceOp.SUM, *, group):
        stacked = torch.stack(everyone(tensor, group))
        is_max = operation == torch.distributed.ReduceOp.MAX
        tensor.copy_(stacked.amax(0) if is_max else stacked.sum(0))

    def all_gather_into_tensor(output, tensor, *, group):
        output.copy_(torch.cat(everyone(tensor, group)))

    def reduce_scatter_tensor(output, tensor, *, group):
        output.copy_(torch.stack(everyone(tensor, group)).sum(0).chunk(num_ranks)[group.rank()])

    def all_to_all_single(output, tensor, sizes_in, sizes_out, *, group, async_op=False):
        parts = zip(everyone(tensor, group), everyone(torch.tensor(sizes_out), group), strict=True)
        received = [sent.split(sizes.tolist())[group.rank()] for sent, sizes in parts]
        assert [len(part) for part in received] == sizes_in
        if async_op:
            # What is read before the wait is not there yet.
            return SimpleNamespace(wait=lambda: output.copy_(torch.cat(received)))
        output.copy_(torch.cat(received))
        return None

    def run(rank):
        try:
            return function(ThreadGroup(rank, num_ranks))
        except BaseException:
            barrier.abort()
            raise

    for collective in (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single):
        monkeypatch.setattr(torch.distributed, collective.__name__, collective)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
