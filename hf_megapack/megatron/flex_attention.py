"""FlexAttention's Triton kernels over the blocks of a row; they serve every length, type and head from 16 on."""

import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hf_megapack.kernels.tree_blocks import TreeBlocks

SMALLEST_HEAD = 16
# Gradient modes, windows and types that one process may meet.
MAX_COMPILATIONS = 1024


def block_mask(blocks: TreeBlocks) -> BlockMask:
    """Return a row's blocks as FlexAttention takes them.

    Args:
        blocks: The blocks.

    Returns:
        The mask, both directions at once: BlockMask would derive the second with many small kernels.
    """
    slots, end, position, window = blocks.slots, blocks.end, blocks.position, blocks.window

    def mask_mod(batch, head, query, key_slot):
        slot = query if slots is None else slots[query]
        seen = (key_slot <= slot) & (slot < end[key_slot])
        return seen if window is None else seen & (position[slot] - position[key_slot] < window)

    lengths = blocks.num_queries, blocks.num_slots
    return BlockMask(lengths, *blocks.by_query(), *blocks.by_key(), BLOCK_SIZE=blocks.size, mask_mod=mask_mod)


def flex_attend(
    query_LHD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, *, mask: BlockMask, scale: float
) -> torch.Tensor:
    """Attend with FlexAttention, compiled for dynamic shapes.

    Args:
        query_LHD: Shape (L, H, D), on the GPU.
        key_TGD: Shape (T, G, D).
        value_TGD: Shape (T, G, D).
        mask: From `block_mask`.
        scale: Factor on the scores.

    Returns:
        Shape (L, H, D).
    """
    head_dim = query_LHD.shape[-1]
    missing = max(0, SMALLEST_HEAD - head_dim)
    if missing:
        query_LHD, key_TGD, value_TGD = (
            torch.nn.functional.pad(x, (0, missing)) for x in (query_LHD, key_TGD, value_TGD)
        )
    output_HLD = _compiled()(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query_LHD, key_TGD, value_TGD)),
        block_mask=mask,
        scale=scale,
        enable_gqa=query_LHD.shape[1] != key_TGD.shape[1],
        kernel_options={"BACKEND": "TRITON"},
    )
    return output_HLD.squeeze(0).transpose(0, 1)[..., :head_dim]


def allow_compilations() -> None:
    """Raise the number of versions of one function that torch.compile keeps.

    Past its limit it runs the function eagerly, and eager FlexAttention needs memory for every pair of slots.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MAX_COMPILATIONS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MAX_COMPILATIONS)


@functools.cache
def _compiled():
    allow_compilations()
    return torch.compile(flex_attention, dynamic=True)
