"""The stand-ins for CUDA are there while Megatron-Core runs, and gone afterwards."""

import pytest
import torch

import hf_megapack.megatron  # noqa: F401 (the quiet import comes first)

# isort: split
from megatron.core.tensor_parallel import random as mcore_random

from hf_megapack.megatron.host import has_gpu, host_device

pytestmark = pytest.mark.skipif(has_gpu(), reason="with a GPU nothing is replaced")


def test_cuda_means_the_host_inside_and_only_inside():
    before = (torch.cuda.current_device, torch.cuda.synchronize, mcore_random._get_cuda_rng_state)
    with host_device():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
        state = mcore_random._get_cuda_rng_state()
        first = torch.rand(3)
        mcore_random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), first)
    assert (torch.cuda.current_device, torch.cuda.synchronize, mcore_random._get_cuda_rng_state) == before


def test_the_originals_return_after_an_error():
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="inside"), host_device():
        raise RuntimeError("inside")
    assert torch.cuda.current_device is before
