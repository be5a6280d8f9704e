"""Core attention over a row of prefix trees: slot i sees slot j exactly when j <= i < subtree_end[j].

Each slot therefore sees its ancestors and itself, never a sibling branch, another root or padding. The row's tree
travels with the microbatch in `TreeParams`, never as module state: recompute and interleaved pipelines would read
another microbatch's.

Shapes: T slots, H query heads, G key and value heads, D head size, Q slots of one query block, K slots they can see.
"""

import functools
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention

# Long enough that a block is a good matrix product, short enough that few keys are read for nothing.
HOST_BLOCK = 256
FLEX_BLOCK = 128


@dataclass
class TreeParams(PackedSeqParams):
    """What one microbatch's row says about itself, in the argument that Megatron-Core hands to every layer.

    Attributes:
        position_ids: Depth of each slot in its example. int64, shape (T,).
        subtree_end: First slot after the subtree that begins at each slot. int64, shape (T,).
        loss_slots: Slots that have a label and count. int64, shape (num_loss_slots,).
        loss_labels: Token that each of them predicts. int64, shape (num_loss_slots,).
        loss_counts: Number of examples that learn it. int64, same shape.
        loss_scale: One over the loss-bearing tokens of the whole update.
        wants_logits: Return the logits of all slots instead of the loss.
        cache: Block plans, made once for a row and shared by its layers.
    """

    position_ids: torch.Tensor | None = None
    subtree_end: torch.Tensor | None = None
    loss_slots: torch.Tensor | None = None
    loss_labels: torch.Tensor | None = None
    loss_counts: torch.Tensor | None = None
    loss_scale: float = 0.0
    wants_logits: bool = False
    cache: dict = field(default_factory=dict)


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
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    params: TreeParams,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend with the whole mask in memory: the plain twin that faster paths are compared with.

    Args:
        query_THD: Shape (T, H, D).
        key_TGD: Shape (T, G, D), H a multiple of G.
        value_TGD: Shape (T, G, D).
        params: The row.
        scale: Factor on the scores.
        window: Sliding window in positions, None for full attention.

    Returns:
        Shape (T, H, D), the query's dtype.
    """
    slots = torch.arange(query_THD.shape[0], device=query_THD.device)
    repeats = query_THD.shape[1] // key_TGD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(repeats, dim=1) for x in (key_TGD, value_TGD))
    scores_HQK = torch.einsum("qhd,khd->hqk", query_THD, key_THD) * scale
    scores_HQK = scores_HQK.masked_fill(~visible(slots, slots, params, window), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores_HQK.softmax(dim=-1), value_THD)


def _host_plan(params: TreeParams, num_slots: int) -> list[tuple[slice, torch.Tensor]]:
    """Return the query blocks of a row, each with the key slots that some slot of the block sees, ascending."""
    if "host" not in params.cache:
        plan = []
        for start in range(0, num_slots, HOST_BLOCK):
            stop = min(start + HOST_BLOCK, num_slots)
            earlier = (params.subtree_end[:start] > start).nonzero()[:, 0]
            plan.append((slice(start, stop), torch.cat((earlier, torch.arange(start, stop)))))
        params.cache["host"] = plan
    return params.cache["host"]


def host_tree_attention(
    query_THD: torch.Tensor,
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
    query_HTD, key_GTD, value_GTD = (x.transpose(0, 1).unsqueeze(0) for x in (query_THD, key_TGD, value_TGD))
    slots = torch.arange(query_THD.shape[0])
    outputs = []
    for block, key_slots in _host_plan(params, query_THD.shape[0]):
        output = scaled_dot_product_attention(
            query_HTD[:, :, block],
            key_GTD.index_select(2, key_slots),
            value_GTD.index_select(2, key_slots),
            attn_mask=visible(slots[block], key_slots, params, window),
            scale=scale,
            enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2).squeeze(0).transpose(0, 1)


def tree_block_mask(params: TreeParams, num_slots: int, window: int | None):
    """Return FlexAttention's BlockMask of a row, from the extremes of each block; no mask of T x T is made.

    Args:
        params: The row, on the device that will attend.
        num_slots: T.
        window: Sliding window in positions, None for full attention.

    Returns:
        `torch.nn.attention.flex_attention.BlockMask`. A block that might be visible in part is computed with the mask;
        one that every query of the block sees whole is computed without.
    """
    from torch.nn.attention.flex_attention import BlockMask

    key = ("flex", window)
    if key in params.cache:
        return params.cache[key]
    end, position = params.subtree_end, params.position_ids

    def mask_mod(batch, head, query, key_slot):
        seen = (key_slot <= query) & (query < end[key_slot])
        return seen if window is None else seen & (position[query] - position[key_slot] < window)

    num_blocks = -(-num_slots // FLEX_BLOCK)
    padding = num_blocks * FLEX_BLOCK - num_slots
    ends = torch.nn.functional.pad(end, (0, padding), value=num_slots).view(num_blocks, FLEX_BLOCK)
    first = torch.arange(num_blocks, device=end.device) * FLEX_BLOCK
    last = (first + FLEX_BLOCK).clamp(max=num_slots) - 1
    some = (first[None, :] <= last[:, None]) & (ends.amax(1)[None, :] > first[:, None])
    whole = (last[None, :] <= first[:, None]) & (ends.amin(1)[None, :] > last[:, None])
    if window is not None:
        whole = torch.zeros_like(whole)
    partial = some & ~whole
    params.cache[key] = BlockMask.from_kv_blocks(
        *_counts_and_indices(partial),
        *_counts_and_indices(whole),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_slots, num_slots),
    )
    return params.cache[key]


def _counts_and_indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]


@functools.cache
def _compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    # Rows differ in length, so one dynamic kernel serves them all.
    return torch.compile(flex_attention, dynamic=True)


def flex_tree_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    params: TreeParams,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend on the GPU with FlexAttention. Arguments and result as `dense_tree_attention`."""
    output_HTD = _compiled_flex_attention()(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query_THD, key_TGD, value_TGD)),
        block_mask=tree_block_mask(params, query_THD.shape[0], window),
        scale=scale,
        enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
    )
    return output_HTD.squeeze(0).transpose(0, 1)


class TreeAttention(torch.nn.Module):
    """The core attention module of every layer.

    Source:
        Constructor and call as `megatron.core.transformer.dot_product_attention.DotProductAttention`, 0.16.1 and
        0.19.2.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, softmax_scale=None, **_unused):
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.window = config.tree_windows[layer_number - 1]

    def forward(self, query_TBHD, key_TBGD, value_TBGD, attention_mask, *, packed_seq_params, **_unused):
        """Attend within one row.

        Args:
            query_TBHD: Shape (T, 1, H, D): one row is one microbatch.
            key_TBGD: Shape (T, 1, G, D).
            value_TBGD: Shape (T, 1, G, D).
            attention_mask: Unused; Megatron-Core passes it to every core attention.
            packed_seq_params: The row, a `TreeParams`.

        Returns:
            Shape (T, 1, H * D).
        """
        attend = flex_tree_attention if query_TBHD.is_cuda else host_tree_attention
        output_THD = attend(
            query_TBHD.squeeze(1),
            key_TBGD.squeeze(1),
            value_TBGD.squeeze(1),
            packed_seq_params,
            scale=self.scale,
            window=self.window,
        )
        return output_THD.flatten(1).unsqueeze(1)
