"""Rows of prefix trees, in preorder, as two tensors: position_ids and subtree_end, int64, shape (num_slots,)."""

import numpy as np
import torch


def random_tree(num_slots: int, seed: int, longest: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random forest: segments of 1 to `longest` slots, each under an open ancestor or a root."""
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
    return torch.tensor(depth_at), torch.from_numpy(end)


def _descends(segment, ancestor, parent_of):
    while segment is not None:
        if segment == ancestor:
            return True
        segment = parent_of[segment][0] if parent_of[segment] else None
    return False


def two_branches(fork: int, branch: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a prefix of `fork` slots with two branches: one up to slot `branch`, one from there to the row's end."""
    slots = torch.arange(num_slots)
    position_ids = slots - (branch - fork) * (slots >= branch)
    subtree_end = torch.where((slots >= fork) & (slots < branch), branch, num_slots)
    return position_ids, subtree_end
