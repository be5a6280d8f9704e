"""Rows to data-parallel ranks and microbatches: equal counts on every rank, loads as even as whole rows allow.

A rank that runs out of rows runs the cheapest row again as a dummy, which counts for nothing and keeps ranks in step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_megapack.batch import RowSchedule
from hf_megapack.errors import ConfigError

# So many visible pairs cost what a slot costs in linear layers: by their FLOPs 3,000 in a 135M model, 26,000 in an 8B.
PAIRS_PER_SLOT = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """The parallel sizes that decide how many microbatches there are.

    Attributes:
        data_parallel_size: Ranks that the rows are dealt to.
        pipeline_parallel_size: Pipeline stages.
        virtual_pipeline_parallel_size: Model chunks per stage; 1 for a plain pipeline.
        microbatch_group_size: Microbatches that a chunk runs before the next one does; None for
            `pipeline_parallel_size`.

    Raises:
        ConfigError: If a size is below 1, or the group is smaller than an interleaved pipeline.
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_parallel_size: int = 1
    microbatch_group_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.virtual_pipeline_parallel_size > 1 and self._group_size < self.pipeline_parallel_size:
            raise ConfigError(
                f"microbatch_group_size is {self._group_size}; it must be at least the "
                f"{self.pipeline_parallel_size} stages of the pipeline"
            )

    @property
    def _group_size(self) -> int:
        return self.pipeline_parallel_size if self.microbatch_group_size is None else self.microbatch_group_size

    def num_local_microbatches(self, num_rows: int) -> int:
        """Return the microbatches that every data-parallel rank runs.

        Args:
            num_rows: Rows of the update, at least 1.

        Returns:
            At least the rows per rank, and as many as an interleaved pipeline can run.

        Source:
            megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving (0.16.1, 0.19.2):
            at least one whole group, and a last group that is full or no smaller than the pipeline.

        Example:
            >>> RankLayout(pipeline_parallel_size=4, virtual_pipeline_parallel_size=2).num_local_microbatches(5)
            8
        """
        local = -(-num_rows // self.data_parallel_size)
        if self.virtual_pipeline_parallel_size == 1:
            return local
        local = max(local, self._group_size)
        remainder = local % self._group_size
        if 0 < remainder < self.pipeline_parallel_size:
            local += self.pipeline_parallel_size - remainder
        return local


SINGLE_RANK = RankLayout()


def slots_cost(num_slots: int, num_pairs: int) -> float:
    """Return what slots cost, their attention included, in slots of linear layers."""
    return num_slots + num_pairs / PAIRS_PER_SLOT


def schedule_rows(costs: Sequence[float], ranks: RankLayout) -> RowSchedule:
    """Deal rows to ranks, the costliest first, each to the least loaded rank that still has a free microbatch.

    Args:
        costs: Cost of each row, by `slots_cost`.
        ranks: Ranks to deal to.

    Returns:
        The schedule; each rank runs its rows from costliest to cheapest, then its dummies.

    Example:
        >>> schedule = schedule_rows([5.0, 4.0, 1.0], RankLayout(data_parallel_size=2))
        >>> schedule.row_index.tolist(), schedule.is_dummy.tolist()
        ([[0, 2], [1, 2]], [[False, True], [False, False]])
    """
    data_parallel_size, num_microbatches = ranks.data_parallel_size, ranks.num_local_microbatches(len(costs))
    cheapest = min(range(len(costs)), key=lambda row: (costs[row], row))
    row_index = np.full((data_parallel_size, num_microbatches), cheapest, dtype=np.int32)
    is_dummy = np.ones((data_parallel_size, num_microbatches), dtype=bool)
    # A free microbatch costs a dummy: counting it up front makes each row's price the excess over that dummy.
    loads = [num_microbatches * costs[cheapest]] * data_parallel_size
    taken = [0] * data_parallel_size
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        free = (rank for rank in range(data_parallel_size) if taken[rank] < num_microbatches)
        rank = min(free, key=lambda rank: (loads[rank], taken[rank], rank))
        row_index[rank, taken[rank]] = row
        is_dummy[rank, taken[rank]] = False
        loads[rank] += costs[row] - costs[cheapest]
        taken[rank] += 1
    return RowSchedule(row_index=row_index, is_dummy=is_dummy)


def heaviest_load(costs: Sequence[float], schedule: RowSchedule) -> float:
    """Return the cost of the most loaded rank, its dummies included: what the whole update waits for."""
    return float(np.asarray(costs)[schedule.row_index].sum(axis=1).max())
