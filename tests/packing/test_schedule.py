"""The schedule: equal counts, even loads, required dummies only."""

import random

import numpy as np
import pytest

from hf_megapack.errors import ConfigError
from hf_megapack.packing import RankLayout, schedule_rows
from hf_megapack.packing.schedule import heaviest_load


@pytest.mark.parametrize(
    ("num_rows", "dp", "pp", "vpp", "group", "local"),
    [
        (1, 1, 2, 2, 2, 2),
        (3, 1, 2, 2, 2, 4),
        (4, 1, 2, 2, 3, 5),
        (5, 1, 4, 2, 4, 8),
        (5, 2, 1, 1, None, 3),
        (7, 2, 2, 2, 2, 4),
        (7, 2, 2, 2, None, 4),
        (3, 1, 4, 1, None, 3),
    ],
)
def test_num_local_microbatches(num_rows, dp, pp, vpp, group, local):
    ranks = RankLayout(
        data_parallel_size=dp,
        pipeline_parallel_size=pp,
        virtual_pipeline_parallel_size=vpp,
        microbatch_group_size=group,
    )
    assert ranks.num_local_microbatches(num_rows) == local


def test_interleaved_counts_are_ones_that_megatron_runs():
    """Megatron asks for at least one whole group and for a last group that is empty or no smaller than the pipeline."""
    for pp in (2, 3, 4, 8):
        for group in range(pp, 2 * pp + 2):
            ranks = RankLayout(pipeline_parallel_size=pp, virtual_pipeline_parallel_size=2, microbatch_group_size=group)
            for num_rows in range(1, 40):
                local = ranks.num_local_microbatches(num_rows)
                assert local >= max(num_rows, group)
                assert local % group == 0 or local % group >= pp
                # One fewer would break a rule or leave a row out.
                fewer = local - 1
                assert fewer < max(num_rows, group) or 0 < fewer % group < pp


@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_size": 0},
        {"pipeline_parallel_size": 0},
        {"pipeline_parallel_size": 4, "virtual_pipeline_parallel_size": 2, "microbatch_group_size": 3},
    ],
)
def test_sizes_that_cannot_run_are_refused(sizes):
    with pytest.raises(ConfigError, match="must be at least"):
        RankLayout(**sizes)


def test_dummies_copy_the_cheapest_row_and_loads_are_even():
    """331 | 205 + 193, and a dummy of 193 beside 331."""
    schedule = schedule_rows([331, 205, 193], RankLayout(data_parallel_size=2))
    assert schedule.row_index.tolist() == [[0, 2], [1, 2]]
    assert schedule.is_dummy.tolist() == [[False, True], [False, False]]
    assert heaviest_load([331, 205, 193], schedule) == 331 + 193


def test_every_row_runs_once_and_every_rank_runs_as_often():
    rng = random.Random(41)
    for _ in range(200):
        num_rows = rng.randint(1, 20)
        ranks = RankLayout(
            data_parallel_size=rng.randint(1, 5),
            pipeline_parallel_size=rng.randint(1, 3),
            virtual_pipeline_parallel_size=rng.randint(1, 2),
        )
        costs = [rng.uniform(1, 100) for _ in range(num_rows)]
        shape = (ranks.data_parallel_size, ranks.num_local_microbatches(num_rows))
        schedule = schedule_rows(costs, ranks)
        assert schedule.row_index.shape == schedule.is_dummy.shape == shape
        assert sorted(schedule.row_index[~schedule.is_dummy].tolist()) == list(range(num_rows))
        assert set(schedule.row_index[schedule.is_dummy].tolist()) <= {int(np.argmin(costs))}
        loads = np.asarray(costs)[schedule.row_index].sum(axis=1)
        assert loads.max() - loads.min() <= max(costs) - min(costs) + 1e-9
