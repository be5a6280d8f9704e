"""The process groups that Megatron-Core runs in, from the launcher's processes and the sizes in MegaPackConfig.

One process without a launcher gets a world of its own that opens no port. Whatever is left of the world after tensor,
context and pipeline parallelism is data parallelism.
"""

import atexit
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.host import has_gpu, host_device

if TYPE_CHECKING:
    from hf_megapack.config import MegaPackConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Where this process stands in the world.

    Attributes:
        rank: Global rank.
        world_size: Number of processes.
        tensor_rank: Rank among the processes that share each layer's weights.
        tensor_size: Number of processes that share each layer's weights.
        tensor_group: The group of those processes.
        sequence_parallel: Whether they also share the activations between the layers' matrix products.
        pipeline_rank: Rank among the processes that share the layers.
        pipeline_size: Number of processes that share the layers.
        pipeline_group: The group of those processes.
        num_chunks: Pieces of the model that each of them holds, more than 1 for an interleaved pipeline.
        context_rank: Rank among the processes that share each row.
        context_size: Number of processes that share each row.
        context_group: The group of those processes.
        data_rank: Rank among the processes that hold the same weights and run different rows.
        data_size: Number of processes that hold the same weights and run different rows.
        replica_group: All processes that hold the same weights: over them gradients and losses are summed.
        model_group: The processes that together hold one whole model: tensor times pipeline.
        expert_rank: Rank among the processes that share the experts of each layer. These are taken from the tensor-,
            context- and data-parallel processes of one pipeline stage, in this order.
        expert_size: Number of processes that share the experts of each layer.
        expert_replica_rank: Rank among the processes that hold the same experts.
        expert_replica_group: The group of those processes: over them the gradients of experts are summed.
        expert_model_group: The processes that together hold all experts of all layers once.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    tensor_group: dist.ProcessGroup
    sequence_parallel: bool
    pipeline_rank: int
    pipeline_size: int
    pipeline_group: dist.ProcessGroup
    num_chunks: int
    context_rank: int
    context_size: int
    context_group: dist.ProcessGroup
    data_rank: int
    data_size: int
    replica_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    expert_rank: int
    expert_size: int
    expert_replica_rank: int
    expert_replica_group: dist.ProcessGroup
    expert_model_group: dist.ProcessGroup

    @property
    def expert_data_ranks(self) -> range:
        """Data-parallel ranks of the processes that share the experts with this one, itself included."""
        first = self.expert_replica_rank * self.expert_size
        row_size = self.tensor_size * self.context_size
        return range(first // row_size, (first + self.expert_size - 1) // row_size + 1)

    def num_local_slots(self, num_slots: int) -> int:
        """Return how many slots each of the ranks that share a row has between its matrix products.

        Args:
            num_slots: Slots of the row.
        """
        return num_slots // self.context_size // (self.tensor_size if self.sequence_parallel else 1)


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


def initialize_parallel(args: "MegaPackConfig") -> ParallelLayout:
    """Create Megatron-Core's process groups for this process's world, or reuse those of the same sizes.

    Args:
        args: The parallel sizes.

    Returns:
        The layout. Calling again with the same sizes returns the same groups, so several trainers can follow each other
        in one process; with other sizes the groups are made anew.

    Raises:
        ConfigError: If the number of processes is not a multiple of the product of the sizes; see also `join_world`.
    """
    join_world()
    tensor, pipeline, context = args.tensor_parallel_size, args.pipeline_parallel_size, args.context_parallel_size
    num_chunks, world_size = args.virtual_pipeline_parallel_size, dist.get_world_size()
    expert = args.expert_parallel_size
    if world_size % (tensor * pipeline * context):
        raise ConfigError(
            f"tensor_parallel_size={tensor} x pipeline_parallel_size={pipeline} x context_parallel_size={context} "
            f"needs a multiple of {tensor * pipeline * context} processes; there are {world_size}. Launch as many, or "
            "lower a size."
        )
    if world_size // pipeline % expert:
        raise ConfigError(
            f"expert_parallel_size={expert} does not divide the {world_size // pipeline} processes of a pipeline "
            f"stage ({world_size} processes, pipeline_parallel_size={pipeline}). Launch as many, or lower it."
        )
    wanted = (tensor, pipeline, num_chunks if num_chunks > 1 else None, context, expert)
    with host_device():
        if parallel_state.model_parallel_is_initialized() and _current_sizes() != wanted:
            parallel_state.destroy_model_parallel()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                virtual_pipeline_model_parallel_size=wanted[2],
                context_parallel_size=context,
                expert_model_parallel_size=expert,
                # Experts are small enough to stay whole.
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
        if has_gpu():
            model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31)
        else:
            # Megatron-Core forks this state wherever dropout could be; there is none, so any state will do.
            get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
    return ParallelLayout(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        sequence_parallel=args.sequence_parallel,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=pipeline,
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        num_chunks=num_chunks,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=context,
        context_group=parallel_state.get_context_parallel_group(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        replica_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model_group=parallel_state.get_model_parallel_group(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=expert,
        expert_replica_rank=parallel_state.get_expert_data_parallel_rank(),
        expert_replica_group=parallel_state.get_expert_data_parallel_group(),
        expert_model_group=parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
    )


def _current_sizes() -> tuple[int, int, int | None, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
