"""Attention over a row without shared prefixes, sequence by sequence: Transformer Engine's variable-length kernels.

Every sequence of such a row is a root and attends causally within itself; its padding comes last and is seen by its
own slots only. Tree attention computes the same for such a row, so it is the plain twin and what runs on a CPU. This is
the only module that calls Transformer Engine's attention.

Shapes: L slots of this rank, H query heads, G key and value heads, D head size.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from hf_megapack.errors import BackendError
from hf_megapack.megatron.context import ContextShare
from hf_megapack.megatron.host import integers_on_device

# With larger heads cuDNN 9's gradients were wrong on an H200 (transformer-engine 2.20.2): zeros beyond the first part.
LARGEST_HEAD = 128
_UNFUSED = "NVTE_UNFUSED_ATTN"


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Sequences:
    """The sequences of one row; every layer attends with the same ones.

    Attributes:
        cu_seqlens: Slot boundaries in the whole row, its tail padding being the last sequence. int32, on the device,
            shape (num_sequences + 1,).
        longest: Slots of the longest sequence, known on the host.
        group: The ranks that share the row, each holding two chunks of every sequence; None where rows are not shared.
    """

    cu_seqlens: torch.Tensor
    longest: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, share: ContextShare | None) -> "Sequences":
        """Move the boundaries of a row's sequences to the device.

        Args:
            cu_seqlens: From `packing.sequence_boundaries`. int32, shape (num_sequences + 1,).
            share: What this rank holds of the row, None for all of it.
        """
        return cls(
            cu_seqlens=integers_on_device(cu_seqlens, np.int32),
            longest=int(np.diff(cu_seqlens).max()),
            group=None if share is None else share.group,
        )


def fused_sequence_attention(
    query_LHD: torch.Tensor,
    key_LGD: torch.Tensor,
    value_LGD: torch.Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend on the GPU with Transformer Engine.

    Args:
        query_LHD: bfloat16 or float16, shape (L, H, D).
        key_LGD: Shape (L, G, D), H a multiple of G.
        value_LGD: Shape (L, G, D).
        sequences: Of the row.
        scale: Factor on the scores.
        window: Number of latest slots of its sequence that a slot sees, itself included; None for all.

    Returns:
        Shape (L, H, D), the query's dtype.

    Raises:
        BackendError: If heads are larger than LARGEST_HEAD, or Transformer Engine has no fused kernel for these
            tensors on this GPU.

    Source:
        `transformer_engine.pytorch.DotProductAttention.forward`, 2.20: boundaries are those of the whole row also where
        ranks share it; given twice as the same tensor they say that nothing lies between sequences.
    """
    from transformer_engine.pytorch import autocast

    if query_LHD.shape[2] > LARGEST_HEAD:
        raise BackendError(
            f"attention='thd' has no right gradients for heads of size {query_LHD.shape[2]}; it must be at most "
            f"{LARGEST_HEAD}. Use attention='tree'."
        )
    is_repeatable = torch.are_deterministic_algorithms_enabled()
    heads = (query_LHD.shape[1], key_LGD.shape[1], query_LHD.shape[2])
    attend = _transformer_engine_attention(heads, scale, window, is_repeatable, sequences.group)
    boundaries, longest = sequences.cu_seqlens, sequences.longest
    try:
        # The fp8 option concerns matrix products with weights alone.
        with autocast(enabled=False), _fused_only():
            output = attend(
                query_LHD,
                key_LGD,
                value_LGD,
                cu_seqlens_q=boundaries,
                cu_seqlens_kv=boundaries,
                cu_seqlens_q_padded=boundaries,
                cu_seqlens_kv_padded=boundaries,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                pad_between_seqs=False,
            )
    except ValueError as error:
        raise BackendError(
            f"Transformer Engine has no fused attention for {heads[0]} query heads, {heads[1]} key and value heads of "
            f"size {heads[2]}, {query_LHD.dtype}, window {window}, {boundaries.numel() - 1} sequences of at most "
            f"{longest} slots{', repeatable to the bit' if is_repeatable else ''}: {error} Use attention='tree'."
        ) from error
    return output.view_as(query_LHD)


@contextlib.contextmanager
def _fused_only() -> Iterator[None]:
    """Keep Transformer Engine from its unfused attention, which pads sequences to the longest and keeps all scores.

    Only for a call: Megatron-Core wants the variable unset, or as it has set it, when a model is built.
    """
    before = os.environ.get(_UNFUSED)
    os.environ[_UNFUSED] = "0"
    try:
        yield
    finally:
        os.environ.pop(_UNFUSED)
        if before is not None:
            os.environ[_UNFUSED] = before


@functools.cache
def _transformer_engine_attention(
    heads: tuple[int, int, int], scale: float, window: int | None, is_repeatable: bool, group: dist.ProcessGroup | None
) -> Callable[..., torch.Tensor]:
    """Return Transformer Engine's module for attention of one kind; layers share it, for it has no parameters.

    Args:
        heads: Query heads and key and value heads of this rank, and their size.
        scale: Factor on the scores.
        window: Sliding window in slots, None for full attention.
        is_repeatable: Whether torch asks for deterministic algorithms; the constructor reads it from torch.
        group: The ranks that share each row, None for no sharing.
    """
    from transformer_engine.pytorch import DotProductAttention

    num_heads, num_groups, head_dim = heads
    attention = DotProductAttention(
        num_heads,
        head_dim,
        num_gqa_groups=num_groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        # Slots before its own that a slot sees, and slots after it.
        window_size=(-1, 0) if window is None else (window - 1, 0),
        softmax_scale=scale,
    )
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
        attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), cp_comm_type="p2p")
    return attention
