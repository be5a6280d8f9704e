"""Which blocks of a row's attention are computed, and which of them need a mask; made on the device, without a wait.

A block is left out where none of its pairs of slots is visible and computed without a mask where all are. Both are
told from the extremes of a block's slots and positions, so nothing of the size of the square of a row is made, and a
block that is computed with the mask may have no visible pair.

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
        partial: Blocks that are computed with the mask. bool, shape (Q, K).
        whole: Blocks that are computed without. bool, shape (Q, K).
    """

    num_queries: int
    num_slots: int
    size: tuple[int, int]
    window: int | None
    slots: torch.Tensor | None
    end: torch.Tensor
    position: torch.Tensor
    partial: torch.Tensor
    whole: torch.Tensor

    def by_query(self) -> tuple[torch.Tensor, ...]:
        """Return counts and indices of each query block's partial key blocks, then of its whole ones.

        Returns:
            Four int32 tensors of shapes (1, 1, Q), (1, 1, Q, K), (1, 1, Q), (1, 1, Q, K); indices ascend.
        """
        return _counts_and_indices(torch.stack((self.partial, self.whole)))

    def by_key(self) -> tuple[torch.Tensor, ...]:
        """Return the same for each key block's query blocks; shapes (1, 1, K) and (1, 1, K, Q)."""
        return _counts_and_indices(torch.stack((self.partial.T, self.whole.T)))


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
    num_slots = subtree_end.shape[0]
    end, position = (_whole_blocks(x.to(torch.int32), size[1]) for x in (subtree_end, position_ids))
    first_key, last_key = _bounds(num_slots, size[1], end.device)
    if query_slots is None:
        num_queries, slots = num_slots, None
        first_query, last_query = _bounds(num_slots, size[0], end.device)
    else:
        num_queries, slots = query_slots.shape[0], _whole_blocks(query_slots.to(torch.int32), size[0])
        first_query, last_query = slots[:: size[0]], slots[size[0] - 1 :: size[0]]
    least_end, most_end = torch.aminmax(end.view(-1, size[1]), dim=1)
    first_query, last_query = first_query[:, None], last_query[:, None]
    some = (first_key <= last_query) & (most_end > first_query)
    whole = (last_key <= first_query) & (least_end > last_query)
    if window is not None:
        depths = position_ids.to(torch.int32)
        depths = _whole_blocks(depths, size[0]) if slots is None else depths.index_select(0, slots)
        least_query, most_query = torch.aminmax(depths.view(-1, size[0]), dim=1, keepdim=True)
        least_key, most_key = torch.aminmax(position.view(-1, size[1]), dim=1)
        some &= least_query - most_key < window
        whole &= most_query - least_key < window
    return TreeBlocks(
        num_queries=num_queries,
        num_slots=num_slots,
        size=size,
        window=window,
        slots=slots,
        end=end,
        position=position,
        partial=some & ~whole,
        whole=some & whole,
    )


def _bounds(num_slots: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last slot of each block."""
    first = torch.arange(0, num_slots, size, dtype=torch.int32, device=device)
    return first, (first + (size - 1)).clamp(max=num_slots - 1)


def _whole_blocks(array: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat the last entry until the blocks are whole, which changes no block's extremes."""
    missing = -array.shape[0] % size
    return torch.cat((array, array[-1:].expand(missing))) if missing else array


def _counts_and_indices(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return counts and indices for each of two matrices of blocks."""
    counts = blocks.sum(dim=2, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=2, descending=True, stable=True).to(torch.int32)
    return counts[None, :1], indices[None, :1], counts[None, 1:], indices[None, 1:]
