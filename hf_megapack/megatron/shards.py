"""Gather the shards of a tensor from every rank into the full one, and cut the full one back into shards.

The full tensors carry PEFT key names, so what one layout saves any other can load.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_megapack.errors import ExportError
from hf_megapack.megatron.parallel import ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank holds of one tensor.

    Attributes:
        tensor: The local values, on the CPU.
        split_dim: Dimension that tensor parallelism splits, None for a replicated tensor.
        tensor_rank: Rank among the tensor-parallel ranks.
    """

    tensor: torch.Tensor
    split_dim: int | None
    tensor_rank: int


def merge_shards(contributions: Iterable[Mapping[str, Shard]], tensor_size: int) -> dict[str, torch.Tensor]:
    """Put the shards of all ranks together.

    Args:
        contributions: What each rank with data- and context-parallel rank 0 holds.
        tensor_size: Number of tensor-parallel ranks.

    Returns:
        Full tensors under their keys, sorted by key.

    Raises:
        ExportError: If a key's shards do not come from every tensor-parallel rank exactly once, or disagree.
    """
    pieces: dict[str, list[Shard]] = {}
    for contribution in contributions:
        for key, shard in contribution.items():
            pieces.setdefault(key, []).append(shard)
    merged = {}
    for key in sorted(pieces):
        shards = sorted(pieces[key], key=lambda shard: shard.tensor_rank)
        ranks = [shard.tensor_rank for shard in shards]
        if ranks != list(range(tensor_size)):
            raise ExportError(f"{key} came from tensor ranks {ranks}; each of the {tensor_size} sends it once.")
        first = shards[0]
        if any(s.split_dim != first.split_dim or s.tensor.shape != first.tensor.shape for s in shards):
            raise ExportError(f"The ranks' shards of {key} differ in shape: {[tuple(s.tensor.shape) for s in shards]}.")
        if first.split_dim is None:
            merged[key] = first.tensor
        else:
            merged[key] = torch.cat([shard.tensor for shard in shards], dim=first.split_dim)
    return merged


def gather_full(
    local: Mapping[str, tuple[torch.Tensor, int | None]], layout: ParallelLayout
) -> dict[str, torch.Tensor]:
    """Return the full tensors on every rank. A collective: every rank calls it.

    Args:
        local: This rank's tensors under their keys, each with the dimension that tensor parallelism splits.
        layout: Where this rank stands.

    Returns:
        Full CPU copies, sorted by key, the same on every rank.

    Raises:
        ExportError: See `merge_shards`.
    """
    mine = {
        key: Shard(tensor=tensor.detach().to("cpu", copy=True), split_dim=split_dim, tensor_rank=layout.tensor_rank)
        for key, (tensor, split_dim) in local.items()
        if layout.data_rank == 0 and layout.context_rank == 0
    }
    everyone = [mine]
    if layout.world_size > 1:
        everyone = [None] * layout.world_size
        dist.all_gather_object(everyone, mine)
    return merge_shards(everyone, layout.tensor_size)


def take_shard(full: torch.Tensor, split_dim: int | None, layout: ParallelLayout) -> torch.Tensor:
    """Return this rank's part of a full tensor.

    Args:
        full: The tensor.
        split_dim: Dimension that tensor parallelism splits, None for a replicated tensor.
        layout: Where this rank stands.
    """
    return full if split_dim is None else full.chunk(layout.tensor_size, dim=split_dim)[layout.tensor_rank]
