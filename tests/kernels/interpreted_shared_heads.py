"""Ranks that split heads and fetch keys with the kernel, in Triton's interpreter, against plain PyTorch.

test_pointwise.py runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_megapack.kernels.pointwise import HeadNorm
from hf_megapack.megatron import shared_heads
from hf_megapack.megatron.context import part_of_row
from tests.helpers.spawn import run_ranks
from tests.helpers.trees import two_branches

NUM_GROUPS, HEADS_OF_GROUP, HEAD_DIM, HALF = 3, 4, 24, 8


def compare_with_plain(rank: int, num_ranks: int, has_norm: bool) -> None:
    """Compare values and gradients of one rank in both ways."""
    row = [x.numpy() for x in two_branches(fork=100, branch=200, num_slots=128 * num_ranks)]
    layout = SimpleNamespace(context_size=num_ranks, context_rank=rank, context_group=dist.group.WORLD)
    share = part_of_row(*row, layout).share
    generator = torch.Generator().manual_seed(rank)
    mixed = torch.randn(128, NUM_GROUPS * HEADS_OF_GROUP * HEAD_DIM, generator=generator)
    angles = torch.randn(128, 1, HALF, generator=generator)
    rotation = torch.stack((angles.cos(), angles.sin()))
    norm = HeadNorm(*torch.randn(2, HEAD_DIM, generator=generator), 1e-5) if has_norm else None
    results = []
    for split in (_with_the_kernel, shared_heads.split_and_fetch_heads):
        own = mixed.clone().requires_grad_()
        heads = split(own, rotation, norm, share, num_groups=NUM_GROUPS, head_dim=HEAD_DIM)
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9 + rank)) for x in heads]
        results.append((*heads, *torch.autograd.grad(heads, own, weights)))
    assert len(results[0][1]) == share.num_seen > 0
    for name, (ours, plain) in enumerate(zip(*results, strict=True)):
        assert (ours - plain).norm() <= 2e-6 * plain.norm(), (rank, name)


def _with_the_kernel(mixed, rotation, norm, share, *, num_groups, head_dim):
    return shared_heads._SplitAndFetch.apply(mixed, rotation, norm, share, num_groups, head_dim)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_kernel_fetches_what_plain_pytorch_does(num_ranks):
    """Two ranks with a norm and one sum of gradients, three without and with sums in float32."""
    run_ranks(compare_with_plain, num_ranks, num_ranks, num_ranks == 2)
