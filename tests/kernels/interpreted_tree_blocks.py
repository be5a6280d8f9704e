"""The Triton kernels of a row's blocks in Triton's interpreter, against plain PyTorch.

test_tree_blocks.py runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import pytest

from hf_megapack.kernels import fused_tree_blocks
from tests.helpers.tree_blocks import SIZES, count_equal_blocks, random_slots
from tests.helpers.trees import random_tree, two_branches


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_slots", [1, 37, 384, 450])
def test_blocks_equal_those_of_plain_pytorch(num_slots, is_shared, window, size):
    slots = random_slots(num_slots, seed=32) if is_shared else None
    kinds = count_equal_blocks(*random_tree(num_slots, seed=32, longest=300), slots, size=size, window=window)
    # The longest row has blocks of all three kinds, unless the window is shorter than a block.
    assert num_slots < 450 or min(kinds) > 0 or (window is not None and size[0] > window)


# Branches that end around an edge; windows just too short for a block before, or for the whole of it.
@pytest.mark.parametrize(
    ("branch", "window"), [(31, None), (32, None), (33, None), (47, None), (48, None), (64, 17), (64, 31)]
)
def test_blocks_at_whose_edges_branches_and_windows_end(branch, window):
    count_equal_blocks(*two_branches(16, branch, 64), None, size=(16, 16), window=window)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("is_shared", [False, True])
def test_lists_that_a_program_makes_in_several_parts(is_shared, window, monkeypatch):
    """Lists of up to 20 blocks, 8 at a time."""
    monkeypatch.setattr(fused_tree_blocks, "LIST_BLOCK", 8)
    slots = random_slots(317, seed=1) if is_shared else None
    kinds = count_equal_blocks(*random_tree(317, seed=1, longest=60), slots, size=(16, 16), window=window)
    assert min(kinds) > 0
