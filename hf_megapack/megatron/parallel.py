"""The process groups that Megatron-Core runs in, from the launcher's processes and the sizes in MegaPackConfig.

One process without a launcher gets a world of its own that opens no port. Sizes other than data parallelism are
refused until the layers that they need are there.
"""

import atexit
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.host import has_gpu, host_device


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Where this process stands in the world.

    Attributes:
        rank: Global rank.
        world_size: Number of processes.
        tensor_rank: Rank among the processes that share each layer's weights.
        tensor_size: Number of processes that share each layer's weights.
        data_rank: Rank among the processes that hold the same weights.
        data_size: Number of processes that hold the same weights.
        data_group: The group of those processes.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    data_group: dist.ProcessGroup


def join_world() -> None:
    """Join the launcher's process group, or make a world of one.

    Raises:
        ConfigError: If the environment announces several processes but no process group exists, so that every process
            would train alone on all the data.
    """
    if dist.is_initialized():
        return
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > 1:
        raise ConfigError(
            f"WORLD_SIZE={announced} is in the environment but no process group was initialised, so each process would "
            "train alone. Launch with torchrun, or with accelerate and a config whose distributed_type is MULTI_GPU "
            "(and use_cpu=True in MegaPackConfig on a machine without GPUs); or unset WORLD_SIZE."
        )
    # transformers takes a process group for a launcher's and advises one; this world is one process on purpose.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.getMessage())
    dist.init_process_group("nccl" if has_gpu() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave_world)


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def initialize_parallel() -> ParallelLayout:
    """Create (or reuse) Megatron-Core's process groups for this process's world.

    Returns:
        The layout. Calling again in the same world returns the same groups, so several trainers can follow each other
        in one process.

    Raises:
        ConfigError: See `join_world`.
    """
    join_world()
    with host_device():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        if has_gpu():
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31)
    return ParallelLayout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        data_group=parallel_state.get_data_parallel_group(),
    )
