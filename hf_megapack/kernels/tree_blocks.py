"""Which blocks of a row's attention are computed, and which of them need a mask; made on the device, without a wait.

A block is left out where none of its pairs of slots is visible and computed without a mask where all are. Both are
told from the extremes of a block's slots, positions and subtree ends, so nothing of the size of the square of a row is
made, and a block that is computed with the mask may have no visible pair.

On a GPU one Triton kernel finds the extremes and one makes the lists of a direction; elsewhere the plain PyTorch here.

Shapes: Q query blocks, K key blocks.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class TreeBlocks:
    """The blocks of one row, for the queries of one rank.

    Attributes:
        num_queries: Slots that query.
        num_slots: Slots of the row.
        size: Queries and keys of a block.
        window: Sliding window in positions, None for full attention.
        slots: Slot of each query, the last repeated to fill its block; None where queries are all slots of the row.
            int32, shape (Q * size[0],).
        end: First slot after the subtree that begins at each key slot; filled likewise. int32, shape (K * size[1],).
        position: Depth in its example of each key slot; filled likewise. int32, same shape.
        query_bounds: Least and greatest slot, least and greatest position of each query block. int32, shape (4, Q).
        key_bounds: The same of each key block, then its least and greatest subtree end. int32, shape (6, K).
    """

    num_queries: int
    num_slots: int
    size: tuple[int, int]
    window: int | None
    slots: torch.Tensor | None
    end: torch.Tensor
    position: torch.Tensor
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor

    def by_query(self) -> tuple[torch.Tensor, ...]:
        """Return counts and indices of each query block's partial key blocks, then of its whole ones.

        Returns:
            Four int32 tensors of shapes (1, 1, Q), (1, 1, Q, K), (1, 1, Q), (1, 1, Q, K). Indices ascend up to the
            count; those of the blocks that are not listed follow, ascending too.
        """
        return self._lists(by_key=False)

    def by_key(self) -> tuple[torch.Tensor, ...]:
        """Return the same for each key block's query blocks; shapes (1, 1, K) and (1, 1, K, Q)."""
        return self._lists(by_key=True)

    def _lists(self, *, by_key: bool) -> tuple[torch.Tensor, ...]:
        if self.end.is_cuda:
            from hf_megapack.kernels.fused_tree_blocks import fused_lists

            return fused_lists(self, by_key=by_key)
        return plain_lists(self, by_key=by_key)


def tree_blocks(
    subtree_end: torch.Tensor,
    position_ids: torch.Tensor,
    query_slots: torch.Tensor | None,
    *,
    size: tuple[int, int],
    window: int | None,
) -> TreeBlocks:
    """Sort out the blocks of a row.

    Args:
        subtree_end: First slot after the subtree that begins at each slot. Integer, shape (num_slots,).
        position_ids: Depth in its example of each slot. Integer, shape (num_slots,).
        query_slots: Slots that query, ascending; None for all. Integer, shape (num_queries,).
        size: Queries and keys of a block.
        window: Sliding window in positions, None for full attention.
    """
    if subtree_end.is_cuda:
        from hf_megapack.kernels.fused_tree_blocks import fused_tree_blocks

        return fused_tree_blocks(subtree_end, position_ids, query_slots, size=size, window=window)
    return plain_tree_blocks(subtree_end, position_ids, query_slots, size=size, window=window)


def plain_tree_blocks(
    subtree_end: torch.Tensor,
    position_ids: torch.Tensor,
    query_slots: torch.Tensor | None,
    *,
    size: tuple[int, int],
    window: int | None,
) -> TreeBlocks:
    """Do what `tree_blocks` says in plain PyTorch."""
    end, depths = subtree_end.to(torch.int32), position_ids.to(torch.int32)
    all_slots = torch.arange(len(end), dtype=torch.int32, device=end.device)
    queries = all_slots if query_slots is None else query_slots.to(torch.int32)
    slots, query_depths = (_whole_blocks(x, size[0]) for x in (queries, depths.index_select(0, queries)))
    key_slots, position, end = (_whole_blocks(x, size[1]) for x in (all_slots, depths, end))
    return TreeBlocks(
        num_queries=len(queries),
        num_slots=len(depths),
        size=size,
        window=window,
        slots=None if query_slots is None else slots,
        end=end,
        position=position,
        query_bounds=_extremes(size[0], slots, query_depths),
        key_bounds=_extremes(size[1], key_slots, position, end),
    )


def plain_matrices(blocks: TreeBlocks) -> torch.Tensor:
    """Return which blocks are computed with the mask, then which without. bool, shape (2, Q, K)."""
    first_query, last_query, least_query, most_query = blocks.query_bounds[:, :, None]
    first_key, last_key, least_key, most_key, least_end, most_end = blocks.key_bounds
    some = (first_key <= last_query) & (most_end > first_query)
    every = (last_key <= first_query) & (least_end > last_query)
    if blocks.window is not None:
        some &= least_query - most_key < blocks.window
        every &= most_query - least_key < blocks.window
    return torch.stack((some & ~every, some & every))


def plain_lists(blocks: TreeBlocks, *, by_key: bool) -> tuple[torch.Tensor, ...]:
    """Do what `TreeBlocks.by_query` and `TreeBlocks.by_key` say in plain PyTorch."""
    matrices = plain_matrices(blocks)
    matrices = matrices.mT if by_key else matrices
    counts = matrices.sum(dim=2, dtype=torch.int32)
    indices = matrices.to(torch.int8).argsort(dim=2, descending=True, stable=True).to(torch.int32)
    return counts[None, :1], indices[None, :1], counts[None, 1:], indices[None, 1:]


def _whole_blocks(array: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat the last entry until the blocks are whole, which changes no block's extremes."""
    missing = -array.shape[0] % size
    return torch.cat((array, array[-1:].expand(missing))) if missing else array


def _extremes(size: int, *arrays: torch.Tensor) -> torch.Tensor:
    """Return the least and the greatest entry of each block, array by array."""
    return torch.stack([bound for array in arrays for bound in torch.aminmax(array.view(-1, size), dim=1)])
