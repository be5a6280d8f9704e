"""Which experts a router chose for which context, and the same choice made again: to tell flips from errors.

A token's choice of experts depends on all tokens before it in its example and on nothing else, so what one packing
chose can be looked up in another by context. In a replay the selection is the recorded one and the scores are computed
anew, with their gradients. This is for comparing runs; training never replays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hf_megapack.batch import PackedBatch, PackedRow
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.megatron.moe import FrozenRouter

Choices = dict[tuple[int, int], tuple[int, ...]]
"""(number of the router, context) to the experts chosen, sorted."""


def contexts(row: PackedRow) -> np.ndarray:
    """Return a number for each slot that stands for its token and all before it in its example; -1 for padding.

    Args:
        row: Any row.

    Returns:
        int64, shape (num_slots,).
    """
    known = np.full(row.input_ids.size, -1, dtype=np.int64)
    parts = row.segments
    for start, end, parent in zip(parts.start, parts.end, parts.parent, strict=True):
        context = 0 if parent < 0 else int(known[parts.end[parent] - 1])
        for slot in range(start, end):
            context = hash((context, int(row.input_ids[slot])))
            known[slot] = context
    return known


class _Listener:
    """Takes the place of Megatron-Core's RouterReplay on one router; rows come one after the other."""

    def __init__(self, number: int, rows: list[np.ndarray], chosen: Choices, wanted: Choices | None):
        self._number, self._rows, self._chosen, self._wanted = number, iter(rows), chosen, wanted

    def get_replay_topk(self, scores, topk, num_groups, group_topk, default):
        values, indices = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        row = next(self._rows).tolist()
        if self._wanted is not None:
            given = [self._wanted.get((self._number, context)) for context in row]
            kept = indices.tolist()
            indices = torch.tensor(
                [kept[slot] if x is None else x for slot, x in enumerate(given)], device=scores.device
            )
            values = scores.gather(1, indices)
        for context, experts in zip(row, indices.sort(dim=1).values.tolist(), strict=True):
            if context != -1:
                self._chosen[self._number, context] = tuple(experts)
        return values, indices


@contextmanager
def listening(backend: MegatronBackend, batch: PackedBatch, wanted: Choices | None = None) -> Iterator[Choices]:
    """Record what routers choose while a batch runs once, forward; layers must not be recomputed.

    Args:
        backend: Of one process.
        batch: What will run.
        wanted: Choices to make again; where there is none, the router chooses.

    Yields:
        The choices, which fill while the batch runs.
    """
    routers = [module for module in backend.model.modules() if isinstance(module, FrozenRouter)]
    rows = [contexts(batch.rows[index]) for index in batch.schedule.row_index[0]]
    chosen: Choices = {}
    for number, router in enumerate(routers):
        router.router_replay = _Listener(number, rows, chosen, wanted)
    try:
        yield chosen
    finally:
        for router in routers:
            router.router_replay = None


def num_flips(ours: Choices, theirs: Choices) -> int:
    """Return for how many routers and contexts of both runs the chosen experts differ."""
    both = ours.keys() & theirs.keys()
    assert both, "the runs have no context in common"
    return sum(ours[key] != theirs[key] for key in both)
