"""The Triton kernels behind `tree_blocks`: the extremes of each block, and the lists of one direction.

They are compiled for sizes of blocks, directions and kinds of masks, never for a length. Offsets into lists are int64:
these grow with the square of the row.
"""

import torch
import triton
import triton.language as tl

from hf_megapack.kernels.tree_blocks import TreeBlocks

# Blocks that a program sorts out at a time.
LIST_BLOCK = 1024


@triton.jit
def _store_extremes(bounds, values, stride):
    tl.store(bounds, tl.min(values, axis=0))
    tl.store(bounds + stride, tl.max(values, axis=0))


@triton.jit
def _bound_keys(  # noqa: PLR0913 (as the kernel)
    subtree_end, position_ids, end, position, bounds, block, num_slots, num_blocks,
    size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Fill a key block of `end` and `position`, and find its extremes."""
    lane = tl.arange(0, width)
    # Where the block or the row ends before the vector does, the last entry is read again.
    slot = tl.minimum(block * size + tl.minimum(lane, size - 1), num_slots - 1)
    depth = tl.load(position_ids + slot).to(tl.int32)
    after = tl.load(subtree_end + slot).to(tl.int32)
    tl.store(position + block * size + lane, depth, mask=lane < size)
    tl.store(end + block * size + lane, after, mask=lane < size)
    _store_extremes(bounds + block, slot, num_blocks)
    _store_extremes(bounds + 2 * num_blocks + block, depth, num_blocks)
    _store_extremes(bounds + 4 * num_blocks + block, after, num_blocks)


@triton.jit
def _bound_queries(  # noqa: PLR0913 (as the kernel)
    position_ids, query_slots, slots, bounds, block, num_queries, num_blocks,
    size: tl.constexpr, width: tl.constexpr, has_slots: tl.constexpr,
):  # fmt: skip
    """Fill a query block of `slots`, and find its extremes."""
    lane = tl.arange(0, width)
    slot = tl.minimum(block * size + tl.minimum(lane, size - 1), num_queries - 1)
    if has_slots:
        slot = tl.load(query_slots + slot).to(tl.int32)
        tl.store(slots + block * size + lane, slot, mask=lane < size)
    depth = tl.load(position_ids + slot).to(tl.int32)
    _store_extremes(bounds + block, slot, num_blocks)
    _store_extremes(bounds + 2 * num_blocks + block, depth, num_blocks)


@triton.jit(do_not_specialize=["num_queries", "num_slots", "num_query_blocks", "num_key_blocks"])
def _bound_blocks(  # noqa: PLR0913 (a kernel's arguments)
    subtree_end, position_ids, query_slots,
    slots, end, position, query_bounds, key_bounds,
    num_queries, num_slots, num_query_blocks, num_key_blocks,
    query_size: tl.constexpr, key_size: tl.constexpr,
    query_width: tl.constexpr, key_width: tl.constexpr, has_slots: tl.constexpr,
):  # fmt: skip
    """Each program handles a key block or a query block."""
    block = tl.program_id(0)
    if block < num_key_blocks:
        _bound_keys(
            subtree_end, position_ids, end, position, key_bounds, block, num_slots, num_key_blocks, key_size, key_width
        )
    else:
        block -= num_key_blocks
        _bound_queries(
            position_ids, query_slots, slots, query_bounds, block, num_queries, num_query_blocks,
            query_size, query_width, has_slots,
        )  # fmt: skip


@triton.jit
def _sort_out(  # noqa: PLR0913 (two blocks)
    query_bounds, key_bounds, query, key, num_query_blocks, num_key_blocks, window, has_window: tl.constexpr
):
    """Return 1 where a block is computed with the mask, then 1 where without; `query` or `key` is a vector."""
    has_query, has_key = query < num_query_blocks, key < num_key_blocks
    query_bounds += query
    key_bounds += key
    first_query = tl.load(query_bounds, mask=has_query, other=0)
    last_query = tl.load(query_bounds + num_query_blocks, mask=has_query, other=0)
    first_key = tl.load(key_bounds, mask=has_key, other=0)
    last_key = tl.load(key_bounds + num_key_blocks, mask=has_key, other=0)
    least_end = tl.load(key_bounds + 4 * num_key_blocks, mask=has_key, other=0)
    most_end = tl.load(key_bounds + 5 * num_key_blocks, mask=has_key, other=0)
    some = has_query & has_key & (first_key <= last_query) & (most_end > first_query)
    every = (last_key <= first_query) & (least_end > last_query)
    if has_window:
        least_query = tl.load(query_bounds + 2 * num_query_blocks, mask=has_query, other=0)
        most_query = tl.load(query_bounds + 3 * num_query_blocks, mask=has_query, other=0)
        least_key = tl.load(key_bounds + 2 * num_key_blocks, mask=has_key, other=0)
        most_key = tl.load(key_bounds + 3 * num_key_blocks, mask=has_key, other=0)
        some = some & (least_query - most_key < window)
        every = every & (most_query - least_key < window)
    return (some & ~every).to(tl.int32), (some & every).to(tl.int32)


@triton.jit
def _store_indices(indices, is_listed, block, num_blocks, num_before, count):
    """Write listed blocks from the front and the others from `count` on; return how many are listed by now."""
    before = num_before + tl.cumsum(is_listed, axis=0) - is_listed
    place = tl.where(is_listed > 0, before, count + block - before)
    tl.store(indices + place, block, mask=block < num_blocks)
    return num_before + tl.sum(is_listed, axis=0)


@triton.jit(do_not_specialize=["num_query_blocks", "num_key_blocks", "window"])
def _list_blocks(  # noqa: PLR0913 (a kernel's arguments)
    query_bounds, key_bounds,
    partial_counts, partial_indices, whole_counts, whole_indices,
    num_query_blocks, num_key_blocks, window,
    by_key: tl.constexpr, has_window: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """List the key blocks of one query block, or the query blocks of one key block."""
    row = tl.program_id(0)
    num_blocks = num_query_blocks if by_key else num_key_blocks
    num_partial, num_whole = 0, 0
    for start in range(0, num_blocks, width):
        block = start + tl.arange(0, width)
        query, key = (block, row) if by_key else (row, block)
        partial, whole = _sort_out(
            query_bounds, key_bounds, query, key, num_query_blocks, num_key_blocks, window, has_window
        )
        num_partial += tl.sum(partial, axis=0)
        num_whole += tl.sum(whole, axis=0)
    tl.store(partial_counts + row, num_partial)
    tl.store(whole_counts + row, num_whole)
    partial_indices += row.to(tl.int64) * num_blocks
    whole_indices += row.to(tl.int64) * num_blocks
    partial_before, whole_before = 0, 0
    for start in range(0, num_blocks, width):
        block = start + tl.arange(0, width)
        query, key = (block, row) if by_key else (row, block)
        partial, whole = _sort_out(
            query_bounds, key_bounds, query, key, num_query_blocks, num_key_blocks, window, has_window
        )
        partial_before = _store_indices(partial_indices, partial, block, num_blocks, partial_before, num_partial)
        whole_before = _store_indices(whole_indices, whole, block, num_blocks, whole_before, num_whole)


def fused_tree_blocks(
    subtree_end: torch.Tensor,
    position_ids: torch.Tensor,
    query_slots: torch.Tensor | None,
    *,
    size: tuple[int, int],
    window: int | None,
) -> TreeBlocks:
    """Do what `tree_blocks` says in one launch."""
    num_slots = len(subtree_end)
    num_queries = num_slots if query_slots is None else len(query_slots)
    num_query_blocks, num_key_blocks = triton.cdiv(num_queries, size[0]), triton.cdiv(num_slots, size[1])
    options = {"dtype": torch.int32, "device": subtree_end.device}
    end, position = (torch.empty(num_key_blocks * size[1], **options) for _ in range(2))
    slots = None if query_slots is None else torch.empty(num_query_blocks * size[0], **options)
    query_bounds, key_bounds = torch.empty(4, num_query_blocks, **options), torch.empty(6, num_key_blocks, **options)
    # The stand-ins are never touched.
    _bound_blocks[(num_query_blocks + num_key_blocks,)](
        subtree_end.contiguous(), position_ids.contiguous(),
        subtree_end if query_slots is None else query_slots.contiguous(), end if slots is None else slots,
        end, position, query_bounds, key_bounds,
        num_queries, num_slots, num_query_blocks, num_key_blocks,
        query_size=size[0],
        key_size=size[1],
        query_width=triton.next_power_of_2(size[0]),
        key_width=triton.next_power_of_2(size[1]),
        has_slots=slots is not None,
    )  # fmt: skip
    return TreeBlocks(
        num_queries=num_queries,
        num_slots=num_slots,
        size=size,
        window=window,
        slots=slots,
        end=end,
        position=position,
        query_bounds=query_bounds,
        key_bounds=key_bounds,
    )


def fused_lists(blocks: TreeBlocks, *, by_key: bool) -> tuple[torch.Tensor, ...]:
    """Do what `TreeBlocks.by_query` and `TreeBlocks.by_key` say in one launch."""
    num_query_blocks, num_key_blocks = blocks.query_bounds.shape[1], blocks.key_bounds.shape[1]
    shape = (num_key_blocks, num_query_blocks) if by_key else (num_query_blocks, num_key_blocks)
    lists = [
        torch.empty(1, 1, *lengths, dtype=torch.int32, device=blocks.end.device) for lengths in (shape[:1], shape) * 2
    ]
    _list_blocks[shape[:1]](
        blocks.query_bounds, blocks.key_bounds,
        *lists,
        num_query_blocks, num_key_blocks, 0 if blocks.window is None else blocks.window,
        by_key=by_key,
        has_window=blocks.window is not None,
        width=LIST_BLOCK,
    )  # fmt: skip
    return tuple(lists)
