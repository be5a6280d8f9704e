"""The order of heads and key blocks in the backward pass of FlashAttention-4."""

from itertools import product

import pytest

from hf_megapack.megatron.flash_order import HEADS_IN_TURN, in_turn


@pytest.mark.parametrize("num_heads", [1, 3, HEADS_IN_TURN, HEADS_IN_TURN + 1, 40])
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 256])
def test_each_block_of_each_head_has_one_turn_and_the_last_heads_share_theirs(num_blocks, num_heads):
    order = [
        in_turn(block, head, num_blocks, num_heads) for head, block in product(range(num_heads), range(num_blocks))
    ]
    num_last = min(HEADS_IN_TURN, num_heads)
    others, last = range(num_heads - num_last), range(num_heads - num_last, num_heads)
    expected = [(block, head) for head in others for block in range(num_blocks)]
    expected += [(block, head) for block in range(num_blocks) for head in last]
    assert order == expected
