"""Different ways to compute the same update give the same loss and gradients; README.md here lists them."""

import dataclasses

import numpy as np
import pytest
import torch
from peft import LoraConfig

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.packing import Alignment
from tests.helpers.backend_args import backend_args
from tests.helpers.reference_model import save_random_model

BOUND = 1e-12
WHOLE_UPDATE = 10_000


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """A tiny Qwen3 in float64 with a random adapter."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_random_model("qwen3", folder)
    args = backend_args()
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    backend = MegatronBackend(str(folder), args, config)
    backend.model.double()
    yield backend
    backend.close()


def random_update(seed: int) -> list[dict]:
    """Return examples that branch from each other anywhere, supervised runs included, with repeats and prefixes."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(9):
        if examples and rng.random() < 0.8:
            parent = examples[rng.integers(len(examples))]
            keep = int(rng.integers(1, len(parent["input_ids"]) + 1))
        else:
            parent, keep = None, 0
        size = int(rng.integers(0, 60)) if keep > 1 else int(rng.integers(2, 60))
        ids = rng.integers(0, 4096, size)
        mask = np.repeat(rng.integers(0, 2, -(-size // 7)), 7)[:size]
        if parent is not None:
            ids = np.concatenate((parent["input_ids"][:keep], ids))
            mask = np.concatenate((parent["loss_mask"][:keep], mask))
        examples.append({"input_ids": ids, "loss_mask": mask.astype(np.uint8)})
    examples.append(examples[int(rng.integers(len(examples)))])
    return examples


def run(backend, batch):
    result = backend.run_step(batch)
    return result, {key: parameter.grad.clone() for key, parameter in backend.parameters.items()}


def assert_equal_steps(ours, reference):
    (result, gradients), (expected, expected_gradients) = ours, reference
    assert result.loss == pytest.approx(expected.loss, rel=BOUND)
    assert result.entropy == pytest.approx(expected.entropy, rel=BOUND)
    assert (result.num_correct, result.num_loss_tokens) == (expected.num_correct, expected.num_loss_tokens)
    for key, gradient in gradients.items():
        scale = expected_gradients[key].abs().max()
        assert scale > 0
        assert (gradient - expected_gradients[key]).abs().max() <= BOUND * scale, key


def unpacked(examples):
    """Every example in a row of its own: `ffd` shares nothing, and no two fit."""
    batch = PrefixTreeCollator(packed_sequence_length=WHOLE_UPDATE, packing_strategy="ffd")(examples)
    rows = [
        PrefixTreeCollator(packed_sequence_length=WHOLE_UPDATE, packing_strategy="ffd")([example]).rows[0]
        for example in examples
        if example["loss_mask"][1:].any()
    ]
    schedule = dataclasses.replace(
        batch.schedule,
        row_index=np.arange(len(rows), dtype=np.int32)[None],
        is_dummy=np.zeros((1, len(rows)), dtype=bool),
    )
    return dataclasses.replace(batch, rows=tuple(rows), schedule=schedule)


@pytest.mark.parametrize("seed", range(6))
def test_packed_equals_unpacked_and_shared_equals_unshared(backend, seed):
    examples = random_update(seed)
    longest = max(len(example["input_ids"]) for example in examples)
    reference = run(backend, unpacked(examples))
    executed = {}
    for share_supervised in (False, True):
        for capacity in (longest, 2 * longest, WHOLE_UPDATE):
            for min_shared_tokens in (1, 8):
                collator = PrefixTreeCollator(
                    packed_sequence_length=capacity,
                    min_shared_tokens=min_shared_tokens,
                    share_supervised=share_supervised,
                )
                batch = collator(examples)
                executed[share_supervised] = sum(len(row.input_ids) for row in batch.rows)
                assert_equal_steps(run(backend, batch), reference)
    assert executed[True] < executed[False]


@pytest.mark.parametrize(
    ("strategy", "alignment"),
    [
        ("ffd", Alignment(sequence_multiple=16, packed_multiple=64)),
        ("mffd", Alignment(sequence_multiple=8, packed_multiple=8)),
        ("balanced", Alignment(sequence_multiple=4, packed_multiple=100)),
        ("prefix_tree", Alignment(sequence_multiple=1, packed_multiple=128)),
    ],
)
def test_aligned_equals_unaligned(backend, strategy, alignment):
    examples = random_update(11)
    reference = run(backend, unpacked(examples))
    for capacity in (320, 640):
        collator = PrefixTreeCollator(
            packed_sequence_length=capacity, packing_strategy=strategy, alignment=alignment, min_shared_tokens=8
        )
        batch = collator(examples)
        owned = sum(int((row.segments.end - row.segments.start).sum()) for row in batch.rows)
        assert owned < sum(len(row.input_ids) for row in batch.rows)
        assert_equal_steps(run(backend, batch), reference)


@pytest.mark.parametrize("data_parallel_size", [2, 3, 16])
def test_dummies_equal_none(backend, data_parallel_size):
    """What the ranks compute one after the other here, summed, is what one rank computes."""
    examples = random_update(5)
    reference = run(backend, PrefixTreeCollator(packed_sequence_length=WHOLE_UPDATE)(examples))
    batch = PrefixTreeCollator(packed_sequence_length=200, data_parallel_size=data_parallel_size)(examples)
    assert batch.schedule.is_dummy.any() == (data_parallel_size > len(examples))
    totals, loss, num_correct, entropy = None, 0.0, 0, 0.0
    for rank in range(data_parallel_size):
        schedule = dataclasses.replace(
            batch.schedule,
            row_index=batch.schedule.row_index[rank : rank + 1],
            is_dummy=batch.schedule.is_dummy[rank : rank + 1],
        )
        result, gradients = run(backend, dataclasses.replace(batch, schedule=schedule))
        loss, num_correct, entropy = loss + result.loss, num_correct + result.num_correct, entropy + result.entropy
        totals = gradients if totals is None else {key: totals[key] + gradients[key] for key in totals}
    summed = dataclasses.replace(reference[0], loss=loss, num_correct=num_correct, entropy=entropy)
    assert_equal_steps((summed, totals), reference)


def test_float64_is_really_used(backend):
    assert all(parameter.dtype == torch.float64 for parameter in backend.model.parameters())
