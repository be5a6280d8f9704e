"""Gather the shards of a tensor from every rank into the full one, and cut the full one back into shards.

The full tensors carry PEFT key names, so what one layout saves any other can load.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from hf_megapack.errors import ExportError
from hf_megapack.megatron.host import compute_device
from hf_megapack.megatron.parallel import ParallelLayout

# Elements that are sent at once, or a single tensor that is larger.
MESSAGE_ELEMENTS = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Over which ranks a factor is spread.

    Attributes:
        axis: "tensor" for the factors of ordinary linears, "expert" for those of experts.
        dim: Dimension that the ranks of this axis split, None if each of them holds the whole.
    """

    axis: Literal["tensor", "expert"]
    dim: int | None

    def rank(self, layout: ParallelLayout) -> int:
        """Return this rank's place among those of the axis."""
        return layout.expert_rank if self.axis == "expert" else layout.tensor_rank

    def size(self, layout: ParallelLayout) -> int:
        """Return the number of ranks of the axis."""
        return layout.expert_size if self.axis == "expert" else layout.tensor_size

    def counts_here(self, layout: ParallelLayout) -> bool:
        """Return whether this rank stands for all that hold the same part, in what is gathered from all ranks."""
        if self.axis == "expert":
            return layout.expert_replica_rank == 0
        return layout.data_rank == 0 and layout.context_rank == 0

    def without_dim(self) -> "Split":
        """Return where a tensor is that belongs to the factor and is not split, a step count for one."""
        return Split(axis=self.axis, dim=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank holds of one tensor.

    Attributes:
        tensor: The local values, on the CPU.
        split: Over which ranks the tensor is spread.
        rank: Which of them this is.
        size: How many they are.
    """

    tensor: torch.Tensor
    split: Split
    rank: int
    size: int


def merge_shards(contributions: Iterable[Mapping[str, Shard]]) -> dict[str, torch.Tensor]:
    """Put the shards of all ranks together.

    Args:
        contributions: What the ranks hold; of those that hold the same part, one.

    Returns:
        Full tensors under their keys, sorted by key.

    Raises:
        ExportError: If a key's shards do not come from every rank of its axis exactly once, or disagree.
    """
    pieces: dict[str, list[Shard]] = {}
    for contribution in contributions:
        for key, shard in contribution.items():
            pieces.setdefault(key, []).append(shard)
    merged = {}
    for key in sorted(pieces):
        shards = sorted(pieces[key], key=lambda shard: shard.rank)
        ranks, first = [shard.rank for shard in shards], shards[0]
        if ranks != list(range(first.size)):
            raise ExportError(
                f"{key} came from {first.split.axis} ranks {ranks}; each of the {first.size} sends it once."
            )
        if any(s.split != first.split or s.tensor.shape != first.tensor.shape for s in shards):
            raise ExportError(f"The ranks' shards of {key} differ in shape: {[tuple(s.tensor.shape) for s in shards]}.")
        if first.split.dim is None:
            merged[key] = first.tensor
        else:
            merged[key] = torch.cat([shard.tensor for shard in shards], dim=first.split.dim)
    return merged


def gather_full(local: Mapping[str, tuple[torch.Tensor, Split]], layout: ParallelLayout) -> dict[str, torch.Tensor]:
    """Return the full tensors on every rank. A collective where ranks share a model: every rank calls it.

    Adapters of experts are gigabytes, so tensors travel as they are, a limited number of bytes at a time.

    Args:
        local: This rank's tensors under their keys, each with the ranks that it is spread over.
        layout: Where this rank stands.

    Returns:
        Full CPU copies, sorted by key, the same on every rank.

    Raises:
        ExportError: See `merge_shards`.
    """
    # Where every rank holds a whole model nothing has to travel, and rank 0 can save what it has if others are gone.
    is_whole = layout.model_group.size() == layout.expert_model_group.size() == 1
    mine = {key: local[key] for key in sorted(local) if is_whole or local[key][1].counts_here(layout)}
    if is_whole:
        copies = {key: tensor.detach().to("cpu", copy=True) for key, (tensor, _) in mine.items()}
        return merge_shards([{key: _shard(copies[key], split, layout) for key, (_, split) in mine.items()}])
    described = {key: _shard(tensor.detach().to("meta"), split, layout) for key, (tensor, split) in mine.items()}
    everyone: list = [None] * layout.world_size
    dist.all_gather_object(everyone, described)
    contributions = []
    for rank, shards in enumerate(everyone):
        received = {}
        for keys in _messages(shards):
            flat = shards[keys[0]].tensor.new_empty(
                sum(shards[key].tensor.numel() for key in keys), device=compute_device()
            )
            if rank == layout.rank:
                torch.cat([local[key][0].detach().to(flat.device).flatten() for key in keys], out=flat)
            dist.broadcast(flat, rank)
            parts = flat.cpu().split([shards[key].tensor.numel() for key in keys])
            for key, part in zip(keys, parts, strict=True):
                tensor = part.view(shards[key].tensor.shape).clone()
                received[key] = dataclasses.replace(shards[key], tensor=tensor)
        contributions.append(received)
    return merge_shards(contributions)


def _shard(tensor: torch.Tensor, split: Split, layout: ParallelLayout) -> Shard:
    return Shard(tensor=tensor, split=split, rank=split.rank(layout), size=split.size(layout))


def _messages(shards: Mapping[str, Shard]) -> Iterator[list[str]]:
    """Yield the keys that one rank sends together: of one dtype, and not too large."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for key, shard in shards.items():
        by_dtype.setdefault(shard.tensor.dtype, []).append(key)
    for keys in by_dtype.values():
        message, size = [], 0
        for key in keys:
            if message and size + shards[key].tensor.numel() > MESSAGE_ELEMENTS:
                yield message
                message, size = [], 0
            message.append(key)
            size += shards[key].tensor.numel()
        yield message


def take_shard(full: torch.Tensor, split: Split, layout: ParallelLayout) -> torch.Tensor:
    """Return this rank's part of a full tensor.

    Args:
        full: The tensor.
        split: Over which ranks it is spread.
        layout: Where this rank stands.
    """
    return full if split.dim is None else full.chunk(split.size(layout), dim=split.dim)[split.rank(layout)]
