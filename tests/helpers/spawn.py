"""Several ranks on this machine, as a launcher starts them: one thread each; gloo, or NCCL with a GPU each."""

import contextlib
import fcntl
import multiprocessing
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

# Imported once by the server that the ranks are forked from, not once by each rank.
_PRELOADED = ["tests.helpers.reference_model", "hf_megapack.megatron.backend", "hf_megapack.trainer"]


def free_port() -> int:
    """Return a TCP port that nothing listens on and that systems give to nobody who asks for any port."""
    # Tests seed the module's own generator, in several processes alike.
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("100 ports are in use")


@contextlib.contextmanager
def only_ranks() -> Iterator[None]:
    """Wait until no other test process has ranks running: more than four at once would be slow, not a better test."""
    with (Path(tempfile.gettempdir()) / f"hf_megapack-ranks-{os.getuid()}.lock").open("w") as file:
        # Given up with the file, also by a process that is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _be_rank(function: Callable, rank: int, world_size: int, port: int, starts_group: bool, args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        if starts_group:
            _start_group()
        function(rank, *args)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _start_group() -> None:
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if has_gpu else "gloo")


def run_ranks(
    function: Callable, world_size: int, *args, timeout_seconds: float = 600.0, starts_group: bool = True
) -> None:
    """Call `function(rank, *args)` in processes of their own, which end with this call whatever happens.

    Args:
        function: Of a module that can be imported.
        world_size: Number of ranks.
        args: Picklable.
        timeout_seconds: Time for all of it.
        starts_group: Whether the ranks begin with a process group; else they have the variables that a launcher sets.

    Raises:
        AssertionError: If a rank failed or time ran out; the ranks have printed why.
    """
    # CUDA does not outlive a fork.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    port = free_port()
    ranks = [
        context.Process(target=_be_rank, args=(function, rank, world_size, port, starts_group, args), daemon=True)
        for rank in range(world_size)
    ]
    with only_ranks():
        _run(ranks, timeout_seconds)


def _run(ranks: list[multiprocessing.Process], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    try:
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            assert time.monotonic() < deadline, f"{len(ranks)} ranks were not done after {timeout_seconds} seconds"
            time.sleep(0.05)
        # A rank that fails leaves the others waiting; they get a moment to fail too.
        for rank in ranks:
            rank.join(5.0)
        assert [rank.exitcode for rank in ranks] == [0] * len(ranks)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()


class LayoutRuns(dict):
    """What every rank of every layout saw; the ranks of a world size start when one of its layouts is asked for.

    Args:
        folder: Where `run_layouts` leaves "<layout>-<rank>.pt".
        layouts: World size to the layouts that it runs.
        run_layouts: Called on each rank with rank, world size and folder; importable.
    """

    def __init__(self, folder: Path, layouts: dict[int, dict[str, dict]], run_layouts: Callable):
        super().__init__()
        self._folder, self._layouts, self._run_layouts = folder, layouts, run_layouts

    def __missing__(self, name: str) -> list[dict]:
        world_size = next(size for size, layouts in self._layouts.items() if name in layouts)
        run_ranks(self._run_layouts, world_size, world_size, self._folder)
        for layout in self._layouts[world_size]:
            files = [self._folder / f"{layout}-{rank}.pt" for rank in range(world_size)]
            self[layout] = [torch.load(file, weights_only=False) for file in files]
        return self[name]
