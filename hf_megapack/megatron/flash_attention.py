"""FlashAttention-4's kernels over the blocks of a row, for 16-bit types on Hopper and later.

They are called directly, not through FlexAttention: it compiles them again for every length, and here they are compiled
once for a kind of head and mask. Import this module only where flash-attn-4 is installed.

Source:
    `flash_attn.cute.flash_attn_func` with `mask_mod` and `block_sparse_tensors`, flash-attn-4 4.0.0b36.
"""

from typing import NamedTuple

import cutlass
import torch
from cutlass import cute
from flash_attn.cute import flash_attn_func
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.utils import scalar_to_ssa

from hf_megapack.kernels.tree_blocks import TreeBlocks
from hf_megapack.megatron.flash_order import let_heads_take_turns

let_heads_take_turns()


class FlashMask(NamedTuple):
    """A row's blocks as FlashAttention-4 takes them.

    Attributes:
        function: Whether a query sees a key, for blocks that need a mask; compiled into the kernels.
        arrays: What it reads: int32, each with an entry for every key slot or for every query.
        by_query: Each query block's key blocks, for the forward pass.
        by_key: Each key block's query blocks, for the backward pass.
    """

    function: object
    arrays: list[torch.Tensor]
    by_query: BlockSparseTensorsTorch
    by_key: BlockSparseTensorsTorch


class BlockSizes(NamedTuple):
    """Queries and keys of a block in the forward and in the backward pass."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def block_sizes(head_dim: int) -> BlockSizes:
    """Return the blocks that suit the kernels' tiles.

    Args:
        head_dim: Elements of a head: 64, 128 or 256.

    Source:
        `_tile_size_fwd_sm90` and `_tile_size_bwd_sm90` of `flash_attn.cute.interface`, flash-attn-4 4.0.0b36.
    """
    if head_dim == 64:
        return BlockSizes((192, 128), (128, 128))
    keys = 128 if head_dim == 128 else 64
    return BlockSizes((128, keys), (64, keys))


def _load(array: cute.Tensor, index: cute.TensorSSA) -> cute.TensorSSA:
    """Return an entry of a contiguous int32 array.

    Not by indexing: the compiler would move such a load behind each element's test of the row's end, where the kernels
    wait for one after the other.
    """
    return scalar_to_ssa(cute.arch.load(array.iterator + index[0], cutlass.Int32), cutlass.Int32)


@cute.jit
def _sees_tree(batch, head, query, key, seqlen_info, arrays):
    end = _load(arrays[0], key)
    return (key <= query) & (query < end)


@cute.jit
def _sees_tree_in_window(batch, head, query, key, seqlen_info, arrays):
    end, position = _load(arrays[0], key), _load(arrays[1], key)
    slot, first_position = _load(arrays[2], query), _load(arrays[3], query)
    return (key <= slot) & (slot < end) & (position >= first_position)


@cute.jit
def _sees_tree_from_slots(batch, head, query, key, seqlen_info, arrays):
    end, slot = _load(arrays[0], key), _load(arrays[1], query)
    return (key <= slot) & (slot < end)


def flash_mask(forward: TreeBlocks, backward: TreeBlocks) -> FlashMask:
    """Return a row's blocks as FlashAttention-4 takes them.

    Args:
        forward: The blocks, of `block_sizes`.
        backward: The same row's.
    """
    lists = [
        BlockSparseTensorsTorch(*forward.by_query(), block_size=forward.size),
        BlockSparseTensorsTorch(*backward.by_key(), block_size=backward.size),
    ]
    slots = forward.slots
    if forward.window is not None:
        if slots is None:
            # Whole blocks: the mask is asked for queries behind the last one too.
            slots = torch.arange(-(-forward.num_slots // forward.size[0]) * forward.size[0], device=forward.end.device)
            slots = slots.clamp_(max=forward.num_slots - 1).to(torch.int32)
        first_position = forward.position.index_select(0, slots) - (forward.window - 1)
        return FlashMask(_sees_tree_in_window, [forward.end, forward.position, slots, first_position], *lists)
    if slots is not None:
        return FlashMask(_sees_tree_from_slots, [forward.end, slots], *lists)
    return FlashMask(_sees_tree, [forward.end], *lists)


def flash_attend(
    query_LHD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, *, mask: FlashMask, scale: float
) -> torch.Tensor:
    """Attend with FlashAttention-4. The backward pass may differ in the last bit from run to run.

    Args:
        query_LHD: Shape (L, H, D), bfloat16 or float16, on the GPU.
        key_TGD: Shape (T, G, D).
        value_TGD: Shape (T, G, D).
        mask: From `flash_mask`.
        scale: Factor on the scores.

    Returns:
        Shape (L, H, D).
    """
    output_LHD, _ = flash_attn_func(
        *(x.unsqueeze(0) for x in (query_LHD, key_TGD, value_TGD)),
        softmax_scale=scale,
        mask_mod=mask.function,
        aux_tensors=mask.arrays,
        block_sparse_tensors=mask.by_query,
        block_sparse_tensors_bwd=mask.by_key,
    )
    return output_LHD.squeeze(0)
