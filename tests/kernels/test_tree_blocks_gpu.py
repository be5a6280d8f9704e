"""The Triton kernels of a row's blocks on a GPU, against plain PyTorch."""

import pytest
import torch

from tests.helpers.tree_blocks import SIZES, count_equal_blocks, random_slots
from tests.helpers.trees import random_tree

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_slots", [1, 60, 128, 3333, 20_000])
def test_blocks_equal_those_of_plain_pytorch(num_slots, is_shared, window, size):
    """The longest row's smallest blocks make lists that a program writes in two parts."""
    row = (x.cuda() for x in random_tree(num_slots, seed=num_slots, longest=600))
    slots = random_slots(num_slots, seed=num_slots).cuda() if is_shared else None
    kinds = count_equal_blocks(*row, slots, size=size, window=window)
    assert num_slots < 20_000 or min(kinds) > 0


def test_nothing_is_compiled_for_another_length():
    from hf_megapack.kernels import fused_tree_blocks

    def num_compiled() -> int:
        kernels = (fused_tree_blocks._bound_blocks, fused_tree_blocks._list_blocks)
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    numbers = []
    for num_slots in (1, 128, 700, 2048, 3333, 20_000):
        count_equal_blocks(*(x.cuda() for x in random_tree(num_slots, seed=0)), None, size=(128, 64), window=None)
        numbers.append(num_compiled())
    assert numbers[0] > 0
    assert set(numbers) == {numbers[0]}
