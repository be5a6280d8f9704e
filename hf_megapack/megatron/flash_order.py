"""The order in which FlashAttention-4's backward pass on Hopper takes heads and blocks of keys.

It takes head after head. A block of keys takes as long as queries see it, so those of a prefix that many branches share
take many times the mean, and the last heads' keep a few processors busy when nothing else is left. Here the last heads
take turns block by block: as a row begins with its prefixes, the longest blocks of all of them come first. What each
block computes stays what it is.
"""

import functools
import importlib.metadata
import operator
from collections.abc import Callable

# So many that their blocks fill the time that the longest one takes; of more heads less stays in the cache.
HEADS_IN_TURN = 8
_VERSION = "4.0.0b36"


def in_turn(
    block: int,
    head: int,
    num_blocks: int,
    num_heads: int,
    *,
    minimum: Callable = min,
    integer: Callable = operator.index,
) -> tuple[int, int]:
    """Return which block and head a program works on.

    Args:
        block: Block of keys in the usual order.
        head: Query head in the usual order.
        num_blocks: Blocks of keys.
        num_heads: Query heads.
        minimum: Of two integers.
        integer: What makes an integer of a condition.
    """
    size = minimum(HEADS_IN_TURN, num_heads)
    first = num_heads - size
    is_last = integer(head >= first)
    place = (head - first) * num_blocks + block
    return block + is_last * (place // size - block), head + is_last * (first + place % size - head)


@functools.cache
def let_heads_take_turns() -> None:
    """Put the order in place for kernels that are compiled from now on.

    FlashAttention-4 has no setting for it, so the class that says which program does what is replaced by a subclass; in
    versions other than the one that this was written for it may mean something else, and their own order stays.

    Source:
        `SingleTileScheduler`, as `flash_attn.cute.flash_bwd_sm90` uses it, of that version.
    """
    # Built from source, the kernels may come under another name.
    versions = {found.version for found in importlib.metadata.distributions(name="flash-attn-4")}
    if _VERSION not in versions:
        return
    from cutlass import Int32
    from cutlass import min as minimum
    from flash_attn.cute import flash_bwd_sm90

    class LastHeadsInTurn(flash_bwd_sm90.SingleTileScheduler):
        @staticmethod
        def create(params, *args, **options):
            scheduler = super(LastHeadsInTurn, LastHeadsInTurn).create(params, *args, **options)
            block, head, batch = scheduler._blk_coord
            sizes = Int32(params.num_block), Int32(params.num_head)
            scheduler._blk_coord = *in_turn(block, head, *sizes, minimum=minimum, integer=Int32), batch
            return scheduler

    flash_bwd_sm90.SingleTileScheduler = LastHeadsInTurn
