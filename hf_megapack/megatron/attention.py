"""Core attention over a row of prefix trees: slot i sees slot j exactly when j <= i < subtree_end[j].

Each slot therefore sees its ancestors and itself, never a sibling branch, another root or padding. The row's tree
travels with the microbatch in `TreeParams`, never as module state: recompute and interleaved pipelines would read
another microbatch's. Where ranks share a row, queries are those of the rank's own slots, and keys those of the slots
that these see, counted as if the row had no others.
A row that shares nothing may come with its sequences: on a GPU `sequences.py` then attends within each of them.

Shapes: L slots of this rank, T slots that they see (where rows are not shared, both are all slots of the row), H query
heads, G key and value heads, D head size, Q slots of one query block, K slots they can see.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention

from hf_megapack.kernels.tree_blocks import TreeBlocks, tree_blocks
from hf_megapack.megatron.context import ContextShare, LossShare
from hf_megapack.megatron.flex_attention import block_mask, flex_attend
from hf_megapack.megatron.sequences import Sequences, fused_sequence_attention
from hf_megapack.packing.alignment import CONTEXT_BLOCK

# Long enough that a block is a good matrix product, short enough that few keys are read for nothing.
HOST_BLOCK = 256
FLEX_BLOCKS = (128, 128)
FLASH_HEAD_SIZES = (64, 128, 256)


@dataclass
class TreeParams(PackedSeqParams):
    """What one microbatch's row says about itself, in the argument that Megatron-Core hands to every layer.

    Attributes:
        position_ids: Depth of each slot in its example. int64, shape (T,).
        subtree_end: First slot after the subtree that begins at each slot. int64, shape (T,).
        loss_slots: Which of this rank's slots have a label and count. int64, shape (num_loss_slots,).
        loss_share: How these are evened out over the ranks that share the row; None to compute the losses of all of
            them here.
        loss_labels: Token that each slot predicts whose loss is computed here. int64, shape (num_losses,).
        loss_counts: Number of examples that learn it. int64, same shape.
        loss_scale: One over the loss-bearing tokens of the whole update.
        wants_logits: Return the logits of all slots instead of the loss.
        share: What this rank holds of the row, None for all of it.
        sequences: To attend within each of them, where the row shares nothing; None to attend as a tree.
        num_expert_places: The most slots that any of the ranks which share this rank's experts has, of whatever row it
            runs at the same time; 0 where nobody asks.
        cache: Block plans, made once for a row and shared by its layers.
    """

    position_ids: torch.Tensor | None = None
    subtree_end: torch.Tensor | None = None
    loss_slots: torch.Tensor | None = None
    loss_share: LossShare | None = None
    loss_labels: torch.Tensor | None = None
    loss_counts: torch.Tensor | None = None
    loss_scale: float = 0.0
    wants_logits: bool = False
    share: ContextShare | None = None
    sequences: Sequences | None = None
    num_expert_places: int = 0
    cache: dict = field(default_factory=dict)

    @property
    def local_positions(self) -> torch.Tensor:
        """Depth in its example of each slot of this rank. int64, shape (L,)."""
        return self.position_ids if self.share is None else self.position_ids[self.share.slots]

    def is_fetched(self, device: torch.device) -> bool:
        """Whether attention wants keys and values that other ranks hold before it begins.

        Transformer Engine's attention within sequences passes them on by itself.
        """
        return self.share is not None and (self.sequences is None or device.type != "cuda")

    def query_slots(self, num_queries: int) -> torch.Tensor:
        """Return the slots of this rank's queries. int64, shape (num_queries,)."""
        return torch.arange(num_queries) if self.share is None else self.share.slots


def visible(query_slots: torch.Tensor, key_slots: torch.Tensor, params: TreeParams, window: int | None) -> torch.Tensor:
    """Return which key slots each query slot sees.

    Args:
        query_slots: Integer, shape (Q,) or broadcastable against `key_slots`.
        key_slots: Integer, shape (K,) or broadcastable against `query_slots`.
        params: The row.
        window: Number of latest positions of its own path that a slot sees, itself included; None for all.

    Returns:
        bool, the broadcast shape of `query_slots[..., None]` and `key_slots`.
    """
    query = query_slots[..., None]
    seen = (key_slots <= query) & (query < params.subtree_end[key_slots])
    if window is not None:
        seen = seen & (params.position_ids[query] - params.position_ids[key_slots] < window)
    return seen


def dense_tree_attention(
    query_LHD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    params: TreeParams,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend with the whole mask in memory: the plain twin that faster paths are compared with.

    Args:
        query_LHD: Shape (L, H, D).
        key_TGD: Shape (T, G, D), H a multiple of G.
        value_TGD: Shape (T, G, D).
        params: The row.
        scale: Factor on the scores.
        window: Sliding window in positions, None for full attention.

    Returns:
        Shape (L, H, D), the query's dtype.
    """
    queries = params.query_slots(query_LHD.shape[0]).to(query_LHD.device)
    keys = torch.arange(key_TGD.shape[0], device=query_LHD.device)
    repeats = query_LHD.shape[1] // key_TGD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(repeats, dim=1) for x in (key_TGD, value_TGD))
    scores_HQK = torch.einsum("qhd,khd->hqk", query_LHD, key_THD) * scale
    scores_HQK = scores_HQK.masked_fill(~visible(queries, keys, params, window), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores_HQK.softmax(dim=-1), value_THD)


class _HostBlock(NamedTuple):
    """Queries of one block, the key slots that some of them see (a slice where these follow one another), the mask."""

    queries: slice
    keys: slice | torch.Tensor
    mask: torch.Tensor


def _host_plan(params: TreeParams, num_queries: int, window: int | None, dtype: torch.dtype) -> list[_HostBlock]:
    """Return the query blocks of a row; the layers of a microbatch share them, masks included."""
    key = ("host", window, dtype)
    if key not in params.cache:
        slots, plan = params.query_slots(num_queries), []
        size = HOST_BLOCK if params.share is None else CONTEXT_BLOCK
        for start in range(0, num_queries, size):
            block = slice(start, min(start + size, num_queries))
            # The slots of a block follow one another, unless sequences were cut: then some keys are read in vain.
            first, stop = int(slots[block][0]), int(slots[block][-1]) + 1
            earlier = (params.subtree_end[:first] > first).nonzero()[:, 0]
            keys = torch.cat((earlier, torch.arange(first, stop)))
            mask = torch.zeros(len(slots[block]), len(keys), dtype=dtype)
            mask.masked_fill_(~visible(slots[block], keys, params, window), float("-inf"))
            begin = int(keys[0])
            # Most blocks of a conversation see one run of keys: a view of it needs no copy for every layer.
            is_run = stop - begin == len(keys)
            plan.append(_HostBlock(block, slice(begin, stop) if is_run else keys, mask))
        params.cache[key] = plan
    return params.cache[key]


def host_tree_attention(
    query_LHD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    params: TreeParams,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend block by block on the host, reading only the keys that a block of queries can see.

    Arguments and result as `dense_tree_attention`; work and memory follow the visible pairs, not the square of the row.
    """
    query_HLD, key_GTD, value_GTD = (x.transpose(0, 1).unsqueeze(0) for x in (query_LHD, key_TGD, value_TGD))
    outputs = []
    for queries, keys, mask in _host_plan(params, query_LHD.shape[0], window, query_LHD.dtype):
        output = scaled_dot_product_attention(
            query_HLD[:, :, queries],
            key_GTD[:, :, keys],
            value_GTD[:, :, keys],
            attn_mask=mask,
            scale=scale,
            enable_gqa=query_LHD.shape[1] != key_TGD.shape[1],
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


@functools.cache
def has_flash_attention() -> bool:
    """Whether FlashAttention-4's kernels are installed."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def gpu_kernels(query_LHD: torch.Tensor) -> str:
    """Return the kernels that serve these queries on a GPU.

    Args:
        query_LHD: On the GPU.

    Returns:
        "flash" (FlashAttention-4) where it is installed and can: 16-bit types on Hopper and later, heads of 64, 128 or
        256, results that may differ in the last bit from run to run. Otherwise "triton" (FlexAttention).
    """
    is_fit = (
        query_LHD.dtype in (torch.bfloat16, torch.float16)
        and query_LHD.shape[-1] in FLASH_HEAD_SIZES
        and torch.cuda.get_device_capability(query_LHD.device)[0] >= 9
        and not torch.are_deterministic_algorithms_enabled()
    )
    return "flash" if is_fit and has_flash_attention() else "triton"


def row_blocks(params: TreeParams, size: tuple[int, int], window: int | None) -> TreeBlocks:
    """Return the blocks of a row that this rank's queries compute.

    Args:
        params: The row, on the device that will attend.
        size: Queries and keys of a block.
        window: Sliding window in positions, None for full attention.
    """
    slots = None if params.share is None else params.share.slots
    return tree_blocks(params.subtree_end, params.position_ids, slots, size=size, window=window)


def prepare_row(query_LHD: torch.Tensor, params: TreeParams, window: int | None) -> Callable[..., torch.Tensor]:
    """Return the attention of a row's layers on the GPU.

    Args:
        query_LHD: Of one layer; the others' have the same type and size.
        params: The row.
        window: Sliding window in positions, None for full attention.

    Returns:
        A function of query, key, value and `scale`, to `dense_tree_attention`'s result.
    """
    if gpu_kernels(query_LHD) == "flash":
        from hf_megapack.megatron.flash_attention import block_sizes, flash_attend, flash_mask

        sizes = block_sizes(query_LHD.shape[-1])
        blocks = {size: row_blocks(params, size, window) for size in set(sizes)}
        return functools.partial(flash_attend, mask=flash_mask(blocks[sizes.forward], blocks[sizes.backward]))
    return functools.partial(flex_attend, mask=block_mask(row_blocks(params, FLEX_BLOCKS, window)))


def gpu_tree_attention(
    query_LHD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    params: TreeParams,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend on the GPU, block by block. Arguments and result as `dense_tree_attention`."""
    key = ("gpu", window, query_LHD.dtype)
    if key not in params.cache:
        params.cache[key] = prepare_row(query_LHD, params, window)
    return params.cache[key](query_LHD, key_TGD, value_TGD, scale=scale)


class TreeAttention(torch.nn.Module):
    """The core attention module of every layer.

    Source:
        Constructor as `megatron.core.transformer.dot_product_attention.DotProductAttention`, 0.16.1 and 0.19.2; the
        call is that of `layers.TreeSelfAttention`.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, softmax_scale=None, **_unused):
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window = config.tree_windows[layer_number - 1]

    # The kernels are compiled by themselves.
    @torch.compiler.disable
    def forward(
        self, query_LHD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, params: TreeParams
    ) -> torch.Tensor:
        """Attend within one row.

        Args:
            query_LHD: Shape (L, H, D): one row is one microbatch.
            key_TGD: Shape (T, G, D); if Transformer Engine attends, that of this rank's slots, (L, G, D).
            value_TGD: Likewise.
            params: The row.

        Returns:
            Shape (L, H * D).
        """
        options = {"scale": self.scale, "window": self.window}
        if params.sequences is not None and query_LHD.is_cuda:
            return fused_sequence_attention(query_LHD, key_TGD, value_TGD, params.sequences, **options).flatten(1)
        attend = gpu_tree_attention if query_LHD.is_cuda else host_tree_attention
        return attend(query_LHD, key_TGD, value_TGD, params, **options).flatten(1)
