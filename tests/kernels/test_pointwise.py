"""The pointwise kernels in Triton's interpreter; on the GPU tests/megatron/test_gpu.py runs models on them."""

from tests.helpers.interpreter import run_in_interpreter


def test_the_kernels_in_the_interpreter_equal_plain_pytorch():
    assert run_in_interpreter("interpreted_pointwise.py") == 41


def test_ranks_that_fetch_keys_with_the_kernel_equal_plain_pytorch():
    assert run_in_interpreter("interpreted_shared_heads.py") == 2
