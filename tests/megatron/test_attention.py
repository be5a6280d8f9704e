"""Tree attention: the fast paths against the plain twin, and what a slot may see."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hf_megapack.kernels.tree_blocks import plain_matrices
from hf_megapack.megatron.attention import (
    HOST_BLOCK,
    TreeParams,
    dense_tree_attention,
    host_tree_attention,
    row_blocks,
    visible,
)
from hf_megapack.megatron.context import part_of_row
from hf_megapack.megatron.flex_attention import block_mask
from hf_megapack.packing import split_row, split_sequences
from tests.helpers.trees import random_tree, two_branches


class SharedRow(NamedTuple):
    """A row as one of several ranks holds it, and which slots of it are this rank's and which they see."""

    params: TreeParams
    slots: torch.Tensor
    seen: torch.Tensor


def shared_with(row: TreeParams, num_ranks: int, rank: int, cu_seqlens: np.ndarray | None = None) -> SharedRow:
    """Return the row as one of several ranks holds it, cut into blocks or, if given, within its sequences."""
    ends = row.subtree_end.numpy()
    layout = SimpleNamespace(context_size=num_ranks, context_rank=rank, context_group=None)
    part = part_of_row(row.position_ids.numpy(), ends, layout, cu_seqlens)
    split = split_row(ends, num_ranks) if cu_seqlens is None else split_sequences(cu_seqlens, num_ranks)
    position_ids, subtree_end = torch.from_numpy(part.position_ids), torch.from_numpy(part.subtree_end)
    params = TreeParams(position_ids=position_ids, subtree_end=subtree_end, share=part.share)
    return SharedRow(params, torch.from_numpy(part.slots), torch.from_numpy(split.seen[rank]))


def random_row(num_slots: int, seed: int, longest: int = 40) -> TreeParams:
    """Return a random row: segments of 1 to `longest` slots, each under an open ancestor or a root."""
    position_ids, subtree_end = random_tree(num_slots, seed, longest)
    return TreeParams(position_ids=position_ids, subtree_end=subtree_end)


def random_qkv(num_slots, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_slots)
    shapes = ((num_slots, 4, 16), (num_slots, 2, 16), (num_slots, 2, 16))
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("num_slots", [1, 100, HOST_BLOCK, HOST_BLOCK + 1, 3 * HOST_BLOCK - 5])
def test_host_attention_equals_its_twin_in_values_and_gradients(num_slots, window):
    qkv, row = random_qkv(num_slots), random_row(num_slots, seed=num_slots)
    results = []
    for attend in (dense_tree_attention, host_tree_attention):
        output = attend(*qkv, row, scale=0.3, window=window)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        results.append((output, *torch.autograd.grad((output * weights).sum(), qkv)))
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-12, atol=1e-12)


def test_a_slot_sees_its_ancestors_and_itself_only():
    """Prefix of 3 slots, children of 2 and 1: row sums 1, 2, 3, 4, 5, 4."""
    row = TreeParams(position_ids=torch.tensor([0, 1, 2, 3, 4, 3]), subtree_end=torch.tensor([6, 6, 6, 5, 5, 6]))
    slots = torch.arange(6)
    assert visible(slots, slots, row, None).sum(dim=1).tolist() == [1, 2, 3, 4, 5, 4]
    # The window counts positions of the path: the second child is at position 3, right after the prefix.
    assert visible(slots, slots, row, 2).int()[5].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("size", [(128, 128), (128, 64), (192, 128)])
@pytest.mark.parametrize("window", [None, 50, 400])
@pytest.mark.parametrize(("num_slots", "longest"), [(60, 40), (128, 40), (500, 40), (1000, 600)])
def test_blocks_hold_every_visible_pair_and_skip_the_mask_only_where_all_is_visible(num_slots, longest, window, size):
    row = random_row(num_slots, seed=num_slots + 1, longest=longest)
    slots = torch.arange(num_slots)
    blocks = row_blocks(row, size, window)
    num_whole = assert_blocks_compute(blocks, visible(slots, slots, row, window))
    assert (num_whole > 0) == (longest == 600 and window != 50)


def test_a_window_leaves_out_the_blocks_that_are_too_far():
    """One sequence of eight blocks, of which each slot sees the block before and its own at most."""
    row = TreeParams(position_ids=torch.arange(1024), subtree_end=torch.full((1024,), 1024))
    blocks = row_blocks(row, (128, 128), 128)
    partial, whole = plain_matrices(blocks)
    assert torch.equal(partial, torch.ones(8, 8).triu(-1).tril().bool())
    assert not whole.any()
    # 385 positions: the two blocks between are seen whole.
    assert plain_matrices(row_blocks(row, (128, 128), 385))[1].sum() == 7 + 6


def test_blocks_at_whose_edges_branches_and_windows_end():
    """Of blocks of 16: branches that end around an edge, windows that reach around one."""
    slots, num_whole = torch.arange(64), 0
    for branch in (31, 32, 33, 47, 48, 49, 64):
        position_ids, subtree_end = two_branches(16, branch, 64)
        row = TreeParams(position_ids=position_ids, subtree_end=subtree_end)
        for window in (None, *range(14, 20), *range(30, 36)):
            num_whole += assert_blocks_compute(row_blocks(row, (16, 16), window), visible(slots, slots, row, window))
    assert num_whole > 0


@pytest.mark.parametrize("size", [(128, 128), (128, 64), (192, 128)])
@pytest.mark.parametrize("window", [None, 50, 400])
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_of_a_shared_row_are_those_of_the_ranks_own_slots(rank, window, size):
    row = random_row(1024, seed=5, longest=600)
    shared = shared_with(row, 2, rank)
    assert_blocks_compute(row_blocks(shared.params, size, window), visible(shared.slots, shared.seen, row, window))


@pytest.mark.parametrize("window", [None, 50])
def test_the_mask_of_flex_attention_shows_what_is_visible(window):
    row = random_row(500, seed=2)
    mask, slots = block_mask(row_blocks(row, (128, 128), window)), torch.arange(500)
    seen = mask.mask_mod(None, None, slots[:, None], slots[None, :])
    assert torch.equal(seen, visible(slots, slots, row, window))
    row = random_row(512, seed=2)
    shared = shared_with(row, 2, 1)
    mask = block_mask(row_blocks(shared.params, (128, 128), window))
    seen = mask.mask_mod(None, None, torch.arange(256)[:, None], torch.arange(len(shared.seen))[None, :])
    assert torch.equal(seen, visible(shared.slots, shared.seen, row, window))


@pytest.mark.parametrize("attend", [dense_tree_attention, host_tree_attention])
@pytest.mark.parametrize("window", [None, 30])
def test_ranks_that_share_a_row_attend_as_one_does(attend, window):
    row = random_row(768, seed=3)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(768, heads, 16, generator=generator) for heads in (4, 2, 2))
    whole = dense_tree_attention(query, key, value, row, scale=0.3, window=window)
    for rank in range(3):
        shared = shared_with(row, 3, rank)
        slots, seen = shared.slots, shared.seen
        assert torch.equal(shared.params.local_positions, row.position_ids[slots])
        ours = attend(query[slots], key[seen], value[seen], shared.params, scale=0.3, window=window)
        torch.testing.assert_close(ours, whole[slots], rtol=1e-5, atol=1e-6)


def assert_blocks_compute(blocks, seen: torch.Tensor) -> int:
    """Check that a row's blocks compute exactly the visible pairs; return how many they compute unmasked."""
    computed = torch.zeros_like(seen)
    partial, partial_indices, whole, whole_indices = blocks.by_query()
    for counts, indices, is_whole in ((partial, partial_indices, False), (whole, whole_indices, True)):
        for block in range(counts.shape[-1]):
            key_blocks = indices[0, 0, block, : counts[0, 0, block]].tolist()
            assert key_blocks == sorted(key_blocks)
            for key_block in key_blocks:
                queries = slice(block * blocks.size[0], (block + 1) * blocks.size[0])
                keys = slice(key_block * blocks.size[1], (key_block + 1) * blocks.size[1])
                computed[queries, keys] = True if is_whole else seen[queries, keys]
    assert torch.equal(computed, seen)
    matrices = plain_matrices(blocks)
    assert_lists(blocks.by_query(), matrices)
    assert_lists(blocks.by_key(), matrices.mT)
    return int(whole.sum())


def assert_lists(lists, matrices: torch.Tensor) -> None:
    """Check lists row by row: what is listed ascends up to the count, then the rest ascends."""
    for counts, indices, matrix in zip(lists[::2], lists[1::2], matrices, strict=True):
        assert counts.shape == (1, 1, len(matrix))
        for count, blocks, row in zip(counts[0, 0].tolist(), indices[0, 0].tolist(), matrix.tolist(), strict=True):
            listed = [block for block, is_listed in enumerate(row) if is_listed]
            assert count == len(listed)
            assert blocks == listed + sorted(set(range(len(row))) - set(listed))
