"""The order of heads and key blocks in the backward pass of FlashAttention-4."""

import importlib.metadata
import sys
from itertools import product
from types import SimpleNamespace

import pytest

from hf_megapack.megatron.flash_order import HEADS_IN_TURN, in_turn, let_heads_take_turns


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


@pytest.mark.parametrize("versions", [[], ["4.0.0b35"]])
def test_kernels_of_another_version_or_name_keep_their_order(versions, monkeypatch):
    found = [SimpleNamespace(version=version) for version in versions]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_name: found)
    # Importing it would fail.
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    let_heads_take_turns.__wrapped__()
