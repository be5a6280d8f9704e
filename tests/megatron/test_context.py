"""What ranks that share a row fetch from each other, and where its gradient goes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.errors import DataError
from hf_megapack.megatron.context import even_out, fetch_keys_and_values, part_of_row, share_losses
from hf_megapack.megatron.step import run_rows
from hf_megapack.packing import split_row, split_sequences
from tests.helpers.thread_ranks import run_on_threads
from tests.helpers.trees import random_tree

NUM_SLOTS = 1536


def fetch(group, row, cu_seqlens, keys, values, grads):
    """Return what this rank sees of keys and values, and the gradients of its own."""
    position_ids, subtree_end = row
    layout = SimpleNamespace(context_size=group.size(), context_rank=group.rank(), context_group=group)
    part = part_of_row(position_ids, subtree_end, layout, cu_seqlens)
    own = [x[part.slots].clone().requires_grad_() for x in (keys, values)]
    seen = fetch_keys_and_values(*own, part.share)
    given = [grad[group.rank(), : len(x)] for grad, x in zip(grads, seen, strict=True)]
    return [x.detach() for x in seen], torch.autograd.grad(seen, own, given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_has_what_its_slots_see_and_gets_the_sum_of_its_gradients(num_ranks, is_flat, dtype, monkeypatch):
    if is_flat:
        sizes = np.array([24, 240, 72, 1200])
        row = np.concatenate([np.arange(size) for size in sizes]), np.repeat(np.cumsum(sizes), sizes)
        cu_seqlens = np.concatenate(([0], np.cumsum(sizes)))
        split = split_sequences(cu_seqlens, num_ranks)
    else:
        row = tuple(x.numpy() for x in random_tree(NUM_SLOTS, seed=3, longest=300))
        cu_seqlens, split = None, split_row(row[1], num_ranks)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, NUM_SLOTS, 2, 4, generator=generator, dtype=torch.float64).to(dtype)
    grads = torch.randn(2, num_ranks, NUM_SLOTS, 2, 4, generator=generator, dtype=torch.float64).to(dtype)
    results = run_on_threads(num_ranks, lambda group: fetch(group, row, cu_seqlens, keys, values, grads), monkeypatch)
    totals = torch.zeros_like(grads[:, 0], dtype=torch.float64)
    for rank, (seen, _) in enumerate(results):
        slots = split.seen[rank]
        assert torch.equal(torch.stack(seen), torch.stack((keys, values))[:, slots])
        totals[:, slots] += grads[:, rank, : len(slots)]
    for rank, (_, own_grads) in enumerate(results):
        expected = totals[:, split.slots[rank]].to(dtype)
        # The sum is rounded once, whatever the number of ranks.
        torch.testing.assert_close(torch.stack(own_grads), expected, rtol=1e-12, atol=1e-12)
    num_fetched = sum(seen.size for seen in split.seen) - NUM_SLOTS
    assert 0 < num_fetched < (num_ranks - 1) * NUM_SLOTS, "some of the others' slots are needed, not all"


def test_a_rank_counts_the_slots_that_it_sees():
    """Prefix of 128 slots and two branches of 128: the first rank holds the prefix and itself a branch."""
    positions = np.concatenate([np.arange(128), np.arange(128, 256), np.arange(128, 256), np.arange(128)])
    ends = np.repeat([384, 256, 384, 512], 128)
    parts = []
    for rank in range(2):
        layout = SimpleNamespace(context_size=2, context_rank=rank, context_group=None)
        parts.append(part_of_row(positions, ends, layout))
    first, second = parts
    assert first.slots[::128].tolist() == [0, 128]
    assert first.share.num_seen == 256
    assert first.subtree_end[::128].tolist() == [256, 256]
    assert first.share.sent == [[], [(0, 128)]], "the prefix"
    assert first.share.received == [[], []]
    # The prefix, the second branch and what follows: the first branch does not exist here.
    assert second.slots[::128].tolist() == [256, 384]
    assert second.subtree_end[::128].tolist() == [256, 256, 384]
    assert second.share.num_seen == 384
    assert second.share.slots.tolist() == list(range(128, 384))
    assert second.share.received == [[(0, 128)], []]
    assert second.position_ids[::128].tolist() == [0, 128, 0]
    assert second.share.sent == [[], []]


@pytest.mark.parametrize("data_rank", [0, 1])
@pytest.mark.parametrize(("sizes", "needed"), [((2, 1, False), 256), ((1, 4, True), 4), ((2, 3, True), 768)])
def test_a_row_that_does_not_divide_is_refused_on_every_rank(data_rank, sizes, needed):
    """Also on ranks that run other rows: they would wait for the one that raised."""
    context, tensor, is_sequence_parallel = sizes
    collator = PrefixTreeCollator(packed_sequence_length=needed, data_parallel_size=2)
    examples = [{"input_ids": np.arange(n), "loss_mask": np.ones(n)} for n in (needed, needed - 1)]
    layout = SimpleNamespace(
        context_size=context,
        tensor_size=tensor,
        sequence_parallel=is_sequence_parallel,
        data_size=2,
        data_rank=data_rank,
        pipeline_size=1,
        num_chunks=1,
    )
    batch = collator(examples)
    assert [row.input_ids.size % needed > 0 for row in batch.rows].count(True) == 1
    with pytest.raises(DataError, match=rf"A row of \d+ slots cannot be shared.*packed_multiple {needed},"):
        run_rows([SimpleNamespace(vocab_size=1000)], batch, layout, None, attention="tree")


def even_losses(group, row, is_learned, hidden, grads):
    """Return the slots whose losses this rank computes, their hidden states, and the gradients of its own."""
    layout = SimpleNamespace(context_size=group.size(), context_rank=group.rank(), context_group=group)
    part = part_of_row(*row, layout)
    slots, share = share_losses(is_learned, part, layout)
    own_slots = part.slots[is_learned[part.slots]]
    own = hidden[own_slots].requires_grad_()
    evened = own if share is None else even_out(own, share)
    return slots, evened.detach(), own_slots, torch.autograd.grad(evened, own, grads[slots])[0]


@pytest.mark.parametrize("num_learned", [0, 1, 5, 700])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_compute_equally_many_losses_and_get_the_gradients_of_their_own(num_ranks, num_learned, monkeypatch):
    row = tuple(x.numpy() for x in random_tree(NUM_SLOTS, seed=3, longest=300))
    is_learned = np.zeros(NUM_SLOTS, dtype=bool)
    # Close together: most of them are one rank's.
    is_learned[100 : 100 + num_learned] = True
    generator = torch.Generator().manual_seed(0)
    hidden, grads = torch.randn(2, NUM_SLOTS, 8, generator=generator, dtype=torch.float64)
    results = run_on_threads(num_ranks, lambda group: even_losses(group, row, is_learned, hidden, grads), monkeypatch)
    computed = np.concatenate([slots for slots, *_ in results])
    assert np.array_equal(np.sort(computed), np.flatnonzero(is_learned)), "each loss once"
    sizes = [slots.size for slots, *_ in results]
    assert max(sizes) - min(sizes) <= 1
    for slots, evened, own_slots, own_grads in results:
        assert torch.equal(evened, hidden[slots])
        assert torch.equal(own_grads, grads[own_slots])
