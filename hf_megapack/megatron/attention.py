"""Core attention over a row of prefix trees: slot i sees slot j exactly when j <= i < subtree_end[j].

Each slot therefore sees its ancestors and itself, never a sibling branch, another root or padding. The row's tree
travels with the microbatch in `TreeParams`, never as module state: recompute and interleaved pipelines would read
another microbatch's. Where ranks share a row, queries are those of the rank's own slots, keys those of the whole row.

Shapes: T slots of the row, L slots of this rank (T where rows are not shared), H query heads, G key and value heads,
D head size, Q slots of one query block, K slots they can see.
"""

import functools
import importlib.util
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention

from hf_megapack.megatron.context import ContextShare, gather_keys_and_values
from hf_megapack.packing.alignment import CONTEXT_BLOCK

# Long enough that a block is a good matrix product, short enough that few keys are read for nothing.
HOST_BLOCK = 256
FLEX_BLOCK = 128
SMALLEST_FLEX_HEAD = 16
FLASH_HEAD_SIZES = (64, 128)
# Lengths, gradient modes and windows that one process may meet.
MAX_COMPILATIONS = 1024


@dataclass
class TreeParams(PackedSeqParams):
    """What one microbatch's row says about itself, in the argument that Megatron-Core hands to every layer.

    Attributes:
        position_ids: Depth of each slot in its example. int64, shape (T,).
        subtree_end: First slot after the subtree that begins at each slot. int64, shape (T,).
        loss_slots: Which of this rank's slots have a label and count. int64, shape (num_loss_slots,).
        loss_labels: Token that each of them predicts. int64, shape (num_loss_slots,).
        loss_counts: Number of examples that learn it. int64, same shape.
        loss_scale: One over the loss-bearing tokens of the whole update.
        wants_logits: Return the logits of all slots instead of the loss.
        share: What this rank holds of the row, None for all of it.
        num_expert_places: The most slots that any of the ranks which share this rank's experts has, of whatever row it
            runs at the same time; 0 where nobody asks.
        cache: Block plans, made once for a row and shared by its layers.
    """

    position_ids: torch.Tensor | None = None
    subtree_end: torch.Tensor | None = None
    loss_slots: torch.Tensor | None = None
    loss_labels: torch.Tensor | None = None
    loss_counts: torch.Tensor | None = None
    loss_scale: float = 0.0
    wants_logits: bool = False
    share: ContextShare | None = None
    num_expert_places: int = 0
    cache: dict = field(default_factory=dict)

    @property
    def local_positions(self) -> torch.Tensor:
        """Depth in its example of each slot of this rank. int64, shape (L,)."""
        return self.position_ids if self.share is None else self.position_ids[self.share.slots]

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
            # The slots of a block follow one another.
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


def tree_block_mask(params: TreeParams, num_queries: int, num_slots: int, *, window: int | None):
    """Return FlexAttention's BlockMask of a row, from the extremes of each block; no mask of T x T is made.

    Args:
        params: The row, on the device that will attend.
        num_queries: Queries, L or more: those beyond the rank's own slots see padding only.
        num_slots: Keys, T or more: those beyond the row are one more root, which no slot of the row sees.
        window: Sliding window in positions, None for full attention.

    Returns:
        `torch.nn.attention.flex_attention.BlockMask`. A block that might be visible in part is computed with the mask;
        one that every query of the block sees whole is computed without.
    """
    from torch.nn.attention.flex_attention import BlockMask

    key = ("flex", num_queries, num_slots, window)
    if key in params.cache:
        return params.cache[key]
    # Whole blocks, so that kernels read no further than the arrays reach.
    num_blocks = -(-num_slots // FLEX_BLOCK)
    end = _extended(params.subtree_end, num_blocks * FLEX_BLOCK, num_slots)
    position = _extended(params.position_ids, num_blocks * FLEX_BLOCK, 0)
    slots = None
    if params.share is not None:
        # Queries beyond the rank's own stand where the padding keys do, or at the row's last slot.
        slots = _extended(params.share.slots, -(-num_queries // FLEX_BLOCK) * FLEX_BLOCK, num_slots - 1)

    def mask_mod(batch, head, query, key_slot):
        slot = query if slots is None else slots[query]
        seen = (key_slot <= slot) & (slot < end[key_slot])
        return seen if window is None else seen & (position[slot] - position[key_slot] < window)

    ends = end.view(num_blocks, FLEX_BLOCK)
    first = torch.arange(num_blocks, device=end.device) * FLEX_BLOCK
    last = (first + FLEX_BLOCK).clamp(max=num_slots) - 1
    # The slots of a block of queries follow one another: it is a block of the row.
    query = slice(None) if slots is None else slots[::FLEX_BLOCK] // FLEX_BLOCK
    first_query, last_query = first[query, None], last[query, None]
    some = (first[None, :] <= last_query) & (ends.amax(1)[None, :] > first_query)
    whole = (last[None, :] <= first_query) & (ends.amin(1)[None, :] > last_query)
    if window is not None:
        whole = torch.zeros_like(whole)
    partial = some & ~whole
    # Both directions at once: BlockMask would derive the second with many small kernels.
    params.cache[key] = BlockMask(
        (num_queries, num_slots),
        *_counts_and_indices(partial),
        *_counts_and_indices(whole),
        *_counts_and_indices(partial.T.contiguous()),
        *_counts_and_indices(whole.T.contiguous()),
        BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
        mask_mod=mask_mod,
    )
    return params.cache[key]


def _extended(array: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """Return an int32 copy of `length` entries, those beyond the array being `value`."""
    return torch.nn.functional.pad(array.to(torch.int32), (0, length - array.shape[0]), value=value)


def _counts_and_indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]


def allow_compilations() -> None:
    """Raise the number of versions of one function that torch.compile keeps.

    Past its limit it runs the function eagerly, and eager FlexAttention needs memory for every pair of slots.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MAX_COMPILATIONS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MAX_COMPILATIONS)


@functools.cache
def _compiled_flex_attention(dynamic: bool):
    from torch.nn.attention.flex_attention import flex_attention

    allow_compilations()
    return torch.compile(flex_attention, dynamic=dynamic)


@functools.cache
def _has_flash_attention() -> bool:
    """Whether FlashAttention-4's kernels, which FlexAttention can use, are installed."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def flex_backend(query_LHD: torch.Tensor) -> str:
    """Return the kernels of FlexAttention that serve these queries.

    Args:
        query_LHD: On the GPU.

    Returns:
        "FLASH" (FlashAttention-4) where it is installed and can: 16-bit types on Hopper and later, heads of 64 or 128,
        results that may differ in the last bit from run to run. Otherwise "TRITON".
    """
    is_fit = (
        query_LHD.dtype in (torch.bfloat16, torch.float16)
        and query_LHD.shape[-1] in FLASH_HEAD_SIZES
        and torch.cuda.get_device_capability(query_LHD.device)[0] >= 9
        and not torch.are_deterministic_algorithms_enabled()
    )
    return "FLASH" if is_fit and _has_flash_attention() else "TRITON"


def bucket(num_slots: int) -> int:
    """Return the length to which the FLASH kernels pad a row: each length is a compilation of its own.

    Sixteen steps to each power of two, at least a block apart: 3 % more slots on average, for attention alone.

    Args:
        num_slots: Slots of the row.

    Returns:
        A multiple of FLEX_BLOCK, `num_slots` or more.

    Example:
        >>> [bucket(n) for n in (1, 128, 129, 4000, 4097, 16384, 16385)]
        [128, 128, 256, 4096, 4352, 16384, 17408]
    """
    step = max(FLEX_BLOCK, 1 << max(0, (num_slots - 1).bit_length() - 5))
    return -(-num_slots // step) * step


def flex_tree_attention(
    query_LHD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    params: TreeParams,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend on the GPU with FlexAttention. Arguments and result as `dense_tree_attention`."""
    num_queries, num_slots, head_dim = query_LHD.shape[0], key_TGD.shape[0], query_LHD.shape[-1]
    if head_dim < SMALLEST_FLEX_HEAD:
        missing = SMALLEST_FLEX_HEAD - head_dim
        query_LHD, key_TGD, value_TGD = (
            torch.nn.functional.pad(x, (0, missing)) for x in (query_LHD, key_TGD, value_TGD)
        )
    is_flash = flex_backend(query_LHD) == "FLASH"
    if is_flash:
        lengths = bucket(num_queries), bucket(num_slots)
        query_LHD = _pad_slots(query_LHD, lengths[0])
        key_TGD, value_TGD = _pad_slots(key_TGD, lengths[1]), _pad_slots(value_TGD, lengths[1])
    else:
        lengths = num_queries, num_slots
    output_HLD = _compiled_flex_attention(not is_flash)(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query_LHD, key_TGD, value_TGD)),
        block_mask=tree_block_mask(params, *lengths, window=window),
        scale=scale,
        enable_gqa=query_LHD.shape[1] != key_TGD.shape[1],
        kernel_options={"BACKEND": "FLASH" if is_flash else "TRITON"},
    )
    return output_HLD.squeeze(0).transpose(0, 1)[:num_queries, :, :head_dim]


def _pad_slots(tensor: torch.Tensor, num_slots: int) -> torch.Tensor:
    missing = num_slots - tensor.shape[0]
    return torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor


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

    # FlexAttention is compiled by itself, with shapes of its own.
    @torch.compiler.disable
    def forward(
        self, query_LHD: torch.Tensor, key_LGD: torch.Tensor, value_LGD: torch.Tensor, params: TreeParams
    ) -> torch.Tensor:
        """Attend within one row.

        Args:
            query_LHD: Shape (L, H, D): one row is one microbatch.
            key_LGD: Shape (L, G, D).
            value_LGD: Shape (L, G, D).
            params: The row.

        Returns:
            Shape (L, H * D).
        """
        if params.share is not None:
            key_LGD, value_LGD = gather_keys_and_values(key_LGD, value_LGD, params.share)
        attend = flex_tree_attention if query_LHD.is_cuda else host_tree_attention
        return attend(query_LHD, key_LGD, value_LGD, params, scale=self.scale, window=self.window).flatten(1)
