"""Updates leave the packing process as one flat buffer, and the time spent on them is known."""

import time

import numpy as np
import torch

from hf_megapack.config import MegaPackConfig
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.loading import build_loader, next_batch
from hf_megapack.meter import UpdateMeter


def rows() -> list[dict]:
    """Seven examples of one prompt."""
    return [{"input_ids": np.arange(100 + i), "loss_mask": np.arange(100 + i) >= 90} for i in range(7)]


def test_a_worker_hands_over_buffers_that_read_back_as_the_updates(tmp_path):
    args = MegaPackConfig(output_dir=str(tmp_path), use_cpu=True, dataloader_num_workers=1)
    collator = PrefixTreeCollator(packed_sequence_length=1000)
    loader = build_loader(rows(), collator, args, update_size=3, is_training=False)
    assert all(item.dtype == torch.uint8 and item.dim() == 1 for item in loader)
    iterator = iter(loader)
    batches = []
    while (batch := next_batch(iterator, torch.device("cpu"))) is not None:
        batches.append(batch)
    assert [batch.num_examples for batch in batches] == [3, 3, 1]
    expected = collator(rows()[:3])
    assert np.array_equal(batches[0].rows[0].input_ids, expected.rows[0].input_ids)
    assert np.array_equal(batches[0].rows[0].subtree_end, expected.rows[0].subtree_end)


def test_the_meter_tells_packing_time_and_waiting_time():
    meter = UpdateMeter()
    with meter.waiting():
        time.sleep(0.02)
    assert 0.02 <= meter.take(0)["waiting_seconds"] < 1.0
    assert meter.take(0)["waiting_seconds"] == 0.0
