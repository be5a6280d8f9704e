"""Tree attention: the fast paths against the plain twin, and what a slot may see."""

import dataclasses

import numpy as np
import pytest
import torch

from hf_megapack.megatron.attention import (
    FLEX_BLOCK,
    HOST_BLOCK,
    TreeParams,
    bucket,
    dense_tree_attention,
    host_tree_attention,
    tree_block_mask,
    visible,
)
from hf_megapack.megatron.context import ContextShare
from hf_megapack.packing import split_row


def shared_with(row: TreeParams, num_ranks: int, rank: int) -> TreeParams:
    """Return the row as one of several ranks holds it."""
    slots = split_row(row.subtree_end.numpy(), num_ranks).slots
    everyone = torch.from_numpy(slots.ravel())
    share = ContextShare(
        slots=torch.from_numpy(slots[rank]), slots_by_rank=everyone, place_of_slot=everyone.argsort(), group=None
    )
    return dataclasses.replace(row, share=share, cache={})


def random_row(num_slots: int, seed: int, longest: int = 40) -> TreeParams:
    """Return a random forest in preorder: segments of 1 to `longest` slots, each under an open ancestor or a root."""
    rng = np.random.default_rng(seed)
    starts, open_path, parent_of, depth_at = [], [], {}, []
    slot = 0
    while slot < num_slots:
        length = min(int(rng.integers(1, longest)), num_slots - slot)
        keep = int(rng.integers(0, len(open_path) + 1))
        del open_path[keep:]
        parent_of[slot] = open_path[-1] if open_path else None
        base = depth_at[open_path[-1][1] - 1] + 1 if open_path else 0
        depth_at.extend(range(base, base + length))
        starts.append(slot)
        open_path.append((slot, slot + length))
        slot += length
    end = np.full(num_slots, num_slots)
    for start in starts:
        segment_end = next((s for s in starts if s > start), num_slots)
        after = [s for s in starts if s > start and not _descends(s, start, parent_of)]
        end[start:segment_end] = min(after, default=num_slots)
    return TreeParams(position_ids=torch.tensor(depth_at), subtree_end=torch.from_numpy(end))


def _descends(segment, ancestor, parent_of):
    while segment is not None:
        if segment == ancestor:
            return True
        segment = parent_of[segment][0] if parent_of[segment] else None
    return False


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


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("num_slots", "longest"), [(60, 40), (128, 40), (500, 40), (1000, 600)])
def test_block_mask_computes_every_visible_pair_and_skips_the_mask_only_where_all_is_visible(
    num_slots, longest, window
):
    row = random_row(num_slots, seed=num_slots + 1, longest=longest)
    slots = torch.arange(num_slots)
    num_whole = assert_mask_computes(
        tree_block_mask(row, num_slots, num_slots, window=window), visible(slots, slots, row, window)
    )
    assert (num_whole > 0) == (longest == 600 and window is None)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("rank", [0, 1])
def test_block_mask_of_a_shared_row_is_that_of_the_ranks_own_slots(rank, window):
    row = shared_with(random_row(1024, seed=5, longest=600), 2, rank)
    seen = visible(row.share.slots, torch.arange(1024), row, window)
    assert_mask_computes(tree_block_mask(row, 512, 1024, window=window), seen)


def test_padded_lengths_are_few_and_little_longer():
    lengths = np.random.default_rng(0).integers(1, 70_000, 2_000)
    padded = np.array([bucket(int(n)) for n in lengths])
    assert ((padded >= lengths) & (padded % FLEX_BLOCK == 0)).all()
    assert (padded - lengths < np.maximum(FLEX_BLOCK, lengths / 16 + 1)).all()
    # Fifty rows of 16K slots at most are a dozen lengths or so.
    assert len({bucket(int(n)) for n in np.linspace(9_000, 16_384, 50)}) <= 16


@pytest.mark.parametrize("num_slots", [60, 500, 1000])
def test_block_mask_of_a_padded_row_shows_the_padding_to_nobody(num_slots):
    row, padded = random_row(num_slots, seed=num_slots, longest=600), bucket(num_slots)
    mask = tree_block_mask(row, padded, padded, window=None)
    slots = torch.arange(padded)
    beyond = padded - num_slots
    end = torch.cat((row.subtree_end, torch.full((beyond,), padded)))
    seen = visible(slots, slots, TreeParams(subtree_end=end), None)
    assert beyond
    assert not seen[:num_slots, num_slots:].any()
    assert not seen[num_slots:, :num_slots].any()
    assert_mask_computes(mask, seen)


@pytest.mark.parametrize("attend", [dense_tree_attention, host_tree_attention])
@pytest.mark.parametrize("window", [None, 30])
def test_ranks_that_share_a_row_attend_as_one_does(attend, window):
    row = random_row(768, seed=3)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(768, heads, 16, generator=generator) for heads in (4, 2, 2))
    whole = dense_tree_attention(query, key, value, row, scale=0.3, window=window)
    for rank in range(3):
        share = shared_with(row, 3, rank)
        slots = share.share.slots
        assert torch.equal(share.local_positions, row.position_ids[slots])
        ours = attend(query[slots], key, value, share, scale=0.3, window=window)
        torch.testing.assert_close(ours, whole[slots], rtol=1e-5, atol=1e-6)


def assert_mask_computes(mask, seen: torch.Tensor) -> int:
    """Check that a block mask computes exactly the visible pairs; return how many blocks it computes unmasked."""
    size = 128
    computed = torch.zeros_like(seen)
    num_whole = 0
    for counts, indices, is_whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for block in range(counts.shape[-1]):
            for key_block in indices[0, 0, block, : counts[0, 0, block]].tolist():
                queries = slice(block * size, (block + 1) * size)
                keys = slice(key_block * size, (key_block + 1) * size)
                num_whole += is_whole
                computed[queries, keys] = True if is_whole else seen[queries, keys]
    assert torch.equal(computed, seen)
    return num_whole
