"""The blocks that Triton kernels make of a row, against those of plain PyTorch."""

import dataclasses

import numpy as np
import torch

from hf_megapack.kernels.tree_blocks import plain_lists, plain_tree_blocks

# Those of the attention kernels, and one of which short rows have many.
SIZES = [(128, 128), (192, 128), (128, 64), (64, 128), (64, 64), (16, 24)]


def random_slots(num_slots: int, seed: int) -> torch.Tensor:
    """Return a run of slots and about half of the others, ascending; at least one. int64."""
    rng = np.random.default_rng(seed)
    is_query = rng.random(num_slots) < 0.5
    is_query[rng.integers(num_slots) :][: num_slots // 3 + 1] = True
    return torch.from_numpy(is_query.nonzero()[0])


def count_equal_blocks(
    position_ids: torch.Tensor,
    subtree_end: torch.Tensor,
    query_slots: torch.Tensor | None,
    *,
    size: tuple[int, int],
    window: int | None,
) -> tuple[int, int, int]:
    """Check that both make the same of a row, to the bit. Arguments as `tree_blocks`, on the device to test.

    Returns:
        Blocks that are computed with the mask, without, and not at all.
    """
    # Triton has no wheels for some platforms.
    from hf_megapack.kernels.fused_tree_blocks import fused_lists, fused_tree_blocks

    ours, twin = (
        make(subtree_end, position_ids, query_slots, size=size, window=window)
        for make in (fused_tree_blocks, plain_tree_blocks)
    )
    for field in dataclasses.fields(twin):
        assert_same(getattr(ours, field.name), getattr(twin, field.name))
    for by_key in (True, False):
        lists = plain_lists(twin, by_key=by_key)
        for one, other in zip(fused_lists(ours, by_key=by_key), lists, strict=True):
            assert_same(one, other)
    partial, whole = int(lists[0].sum()), int(lists[2].sum())
    return partial, whole, lists[1].numel() - partial - whole


def assert_same(ours: object, twin: object) -> None:
    """Compare two numbers, or two tensors in type, shape and every entry."""
    if isinstance(twin, torch.Tensor):
        assert ours.dtype == twin.dtype
        assert torch.equal(ours, twin)
    else:
        assert ours == twin
