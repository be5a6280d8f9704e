"""Rows to data-parallel ranks and microbatches: equal counts on every rank, loads as even as whole rows allow.

A rank that runs out of rows runs the shortest row again as a dummy, which counts for nothing and keeps ranks in step.
"""

from collections.abc import Sequence

import numpy as np

from hf_megapack.batch import PackedRow, RowSchedule
from hf_megapack.errors import ConfigError
from hf_megapack.packing.rows import num_visible_pairs

# So many visible pairs cost what a slot costs in linear layers: by their FLOPs 3,000 in a 135M model, 26,000 in an 8B.
PAIRS_PER_SLOT = 8192


def num_local_microbatches(
    num_rows: int,
    *,
    data_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_parallel_size: int = 1,
    microbatch_group_size: int | None = None,
) -> int:
    """Return the microbatches that every data-parallel rank runs.

    Args:
        num_rows: Rows of the update.
        data_parallel_size: Ranks that the rows are dealt to.
        pipeline_parallel_size: Pipeline stages.
        virtual_pipeline_parallel_size: Model chunks per stage; 1 for a plain pipeline.
        microbatch_group_size: Microbatches that a chunk runs in a row before the next; None for
            `pipeline_parallel_size`.

    Returns:
        At least the rows per rank, and as many as an interleaved pipeline can run.

    Raises:
        ConfigError: If a size is below 1, or the group is smaller than the pipeline.

    Source:
        megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving (0.16.1, 0.19.2): at
        least one whole group, and a last group that is full or no smaller than the pipeline.

    Example:
        >>> num_local_microbatches(5, pipeline_parallel_size=4, virtual_pipeline_parallel_size=2)
        8
    """
    group = pipeline_parallel_size if microbatch_group_size is None else microbatch_group_size
    sizes = (num_rows, data_parallel_size, pipeline_parallel_size, virtual_pipeline_parallel_size)
    if min(sizes) < 1:
        raise ConfigError(f"rows, data, pipeline and virtual pipeline sizes are {sizes}; each must be at least 1")
    local = -(-num_rows // data_parallel_size)
    if virtual_pipeline_parallel_size == 1:
        return local
    if group < pipeline_parallel_size:
        raise ConfigError(f"microbatch_group_size is {group}; it must be at least the {pipeline_parallel_size} stages")
    local = max(local, group)
    remainder = local % group
    if 0 < remainder < pipeline_parallel_size:
        local += pipeline_parallel_size - remainder
    return local


def row_cost(row: PackedRow) -> float:
    """Return what a row costs in slots of linear layers, its attention included."""
    return row.input_ids.size + num_visible_pairs(row.subtree_end) / PAIRS_PER_SLOT


def schedule_rows(costs: Sequence[float], *, data_parallel_size: int, num_microbatches: int) -> RowSchedule:
    """Deal rows to ranks, the costliest first, each to the least loaded rank that still has a free microbatch.

    Args:
        costs: Cost of each row, by `row_cost`.
        data_parallel_size: Ranks to deal to.
        num_microbatches: Microbatches of every rank, by `num_local_microbatches`.

    Returns:
        The schedule; each rank runs its rows from costliest to cheapest, then its dummies.

    Raises:
        ConfigError: If the rows do not fit into the microbatches.

    Example:
        >>> schedule = schedule_rows([5.0, 4.0, 1.0], data_parallel_size=2, num_microbatches=2)
        >>> schedule.row_index.tolist(), schedule.is_dummy.tolist()
        ([[0, 2], [1, 2]], [[False, True], [False, False]])
    """
    if len(costs) > data_parallel_size * num_microbatches:
        raise ConfigError(f"{len(costs)} rows do not fit into {data_parallel_size} x {num_microbatches} microbatches")
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
