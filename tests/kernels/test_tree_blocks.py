"""The kernels of a row's blocks in Triton's interpreter; tests/megatron/test_attention.py judges plain PyTorch."""

from tests.helpers.interpreter import run_in_interpreter


def test_the_kernels_in_the_interpreter_equal_plain_pytorch():
    assert run_in_interpreter("interpreted_tree_blocks.py") == 107
