"""UpdateSampler: every example once per epoch, conversations together, the same lists everywhere; prefixes together."""

import random
from itertools import pairwise

import numpy as np
import pytest
from accelerate.data_loader import skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_megapack.data import sampler as sampler_module
from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.errors import ConfigError
from hf_megapack.packing import PackingReport, gather_examples, order_by_prefix
from tests.helpers.assets import load_conversations, load_tokenizer


@st.composite
def sampler_arguments(draw):
    ids = draw(st.lists(st.integers(0, 12), min_size=1, max_size=60))
    shuffle = draw(st.booleans())
    return {
        "num_examples": len(ids),
        "examples_per_update": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 2**31)),
        "shuffle": shuffle,
        "conversation_ids": draw(st.sampled_from([ids, None])),
        "shuffle_unit": draw(st.sampled_from(["conversation", "example"])),
        "prefix_order": draw(st.sampled_from([None, prefix_order(draw(prompts(len(ids))))])) if shuffle else None,
    }


@st.composite
def prompts(draw, count):
    """Return for each example the blocks of its prompt, nested and repeated as those of real conversations are."""
    block = st.integers(0, 2)
    return draw(st.lists(st.lists(block, max_size=4), min_size=count, max_size=count))


def as_examples(prompts_):
    """Return examples whose prompts are `prompts_`, 32 equal tokens for each block, and one learned token."""
    tokens = [[1 + block for block in prompt for _ in range(32)] for prompt in prompts_]
    return [{"input_ids": [*prompt, 9, 9], "loss_mask": [0] * len(prompt) + [0, 1]} for prompt in tokens]


def prefix_order(prompts_):
    return order_by_prefix([gather_examples(as_examples(prompts_))])


def flat(updates):
    return [index for update in updates for index in update]


@settings(max_examples=100, deadline=None)
@given(sampler_arguments(), st.integers(0, 5))
def test_epoch_is_a_permutation_in_full_updates(arguments, epoch):
    """Every example comes once; all updates but the last have the asked size; `len` counts them."""
    sampler = UpdateSampler(**arguments)
    sampler.set_epoch(epoch)
    updates = list(sampler)
    size = arguments["examples_per_update"]
    assert sorted(flat(updates)) == list(range(arguments["num_examples"]))
    assert len(updates) == len(sampler)
    assert all(len(update) == size for update in updates[:-1])
    assert 1 <= len(updates[-1]) <= size
    assert all(type(index) is int for index in flat(updates))


@settings(max_examples=100, deadline=None)
@given(sampler_arguments(), st.integers(0, 5))
def test_same_seed_and_epoch_give_the_same_lists_in_another_sampler(arguments, epoch):
    first, second = UpdateSampler(**arguments), UpdateSampler(**arguments)
    list(first)
    first.set_epoch(epoch)
    second.set_epoch(epoch)
    assert list(first) == list(second) == list(first)


@settings(max_examples=100, deadline=None)
@given(sampler_arguments())
def test_conversations_stay_together_in_turn_order(arguments):
    """The examples of one conversation are neighbours in the epoch's order, in dataset order."""
    arguments = {**arguments, "shuffle": True, "shuffle_unit": "conversation", "prefix_order": None}
    ids = arguments["conversation_ids"] or list(range(arguments["num_examples"]))
    order = flat(UpdateSampler(**arguments))
    runs = [0]
    for before, after in pairwise(order):
        if ids[before] == ids[after]:
            assert before < after
        else:
            runs.append(after)
    assert len(runs) == len(set(ids))


@settings(max_examples=100, deadline=None)
@given(sampler_arguments())
def test_drop_last_leaves_out_only_the_smaller_update(arguments):
    size = arguments["examples_per_update"]
    if arguments["num_examples"] < size:
        with pytest.raises(ConfigError, match="drop_last leaves nothing"):
            UpdateSampler(**arguments, drop_last=True)
        return
    whole = [update for update in UpdateSampler(**arguments) if len(update) == size]
    sampler = UpdateSampler(**arguments, drop_last=True)
    assert list(sampler) == whole
    assert len(sampler) == len(whole)


@pytest.mark.parametrize("unit", ["conversation", "example"])
def test_epochs_and_seeds_change_the_order(unit):
    def order(seed, epoch):
        ids = np.arange(100) // 2
        sampler = UpdateSampler(
            num_examples=100, examples_per_update=8, seed=seed, conversation_ids=ids, shuffle_unit=unit
        )
        sampler.set_epoch(epoch)
        return tuple(flat(sampler))

    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(100)) not in orders


def test_conversation_numbers_do_not_matter_only_who_shares_one():
    ids = [7, 7, 3, 3, 3, 9]
    renamed = [0, 0, 50, 50, 50, 1]
    orders = [
        list(UpdateSampler(num_examples=6, examples_per_update=2, seed=1, conversation_ids=given))
        for given in (ids, renamed)
    ]
    assert orders[0] == orders[1]


def test_without_shuffle_the_order_is_the_datasets():
    sampler = UpdateSampler(num_examples=7, examples_per_update=3, seed=0, shuffle=False)
    assert list(sampler) == [[0, 1, 2], [3, 4, 5], [6]]


def test_works_as_batch_sampler_of_a_dataloader():
    data = [f"example {index}" for index in range(10)]
    sampler = UpdateSampler(num_examples=10, examples_per_update=4, seed=3)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)
    assert len(loader) == 3
    assert list(loader) == [[data[index] for index in update] for update in sampler]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_examples": 0}, "at least one example"),
        ({"examples_per_update": 0}, "examples_per_update must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"shuffle_unit": "row"}, "shuffle_unit must be one of"),
        ({"conversation_ids": [1, 2]}, r"conversation_ids has shape \(2,\), expected \(5,\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, problem):
    with pytest.raises(ConfigError, match=problem):
        UpdateSampler(**{"num_examples": 5, "examples_per_update": 2, "seed": 0, **change})


# grouping by prefix


def test_grouping_needs_a_shuffled_order_and_one_place_per_example():
    order = prefix_order([[0], [1]])
    with pytest.raises(ConfigError, match="turn shuffle on"):
        UpdateSampler(num_examples=2, examples_per_update=1, seed=0, shuffle=False, prefix_order=order)
    with pytest.raises(ConfigError, match="prefix_order is of 2 examples, expected 3"):
        UpdateSampler(num_examples=3, examples_per_update=1, seed=0, prefix_order=order)


@pytest.mark.parametrize("unit", ["conversation", "example"])
def test_equal_prefixes_meet_in_updates_that_come_in_random_order(unit):
    """32 prompts of 4 examples each, 4 per update: every update is one prompt, in another order each epoch."""
    prompt_of = np.arange(128) % 32
    order = prefix_order([[prompt & 1, prompt >> 1 & 1, prompt >> 2 & 1, prompt >> 3] for prompt in prompt_of.tolist()])
    sampler = UpdateSampler(num_examples=128, examples_per_update=4, seed=0, shuffle_unit=unit, prefix_order=order)
    prompt_orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found = [set(prompt_of[update].tolist()) for update in sampler]
        assert all(len(prompts_) == 1 for prompts_ in found)
        prompt_orders.append(tuple(prompts_.pop() for prompts_ in found))
        # Left as the grouping walks them, the updates of one first block would follow one another: one change.
        assert sum(before % 2 != after % 2 for before, after in pairwise(prompt_orders[-1])) > 5
    assert len(set(prompt_orders)) == 3


def test_prompts_below_one_fork_meet_other_prompts_each_epoch():
    """Sorted order alone would put the same prompts into one update for ever."""
    order = prefix_order([[0, 1 + index // 2] for index in range(64)])
    sampler = UpdateSampler(num_examples=64, examples_per_update=4, seed=0, prefix_order=order)
    pairs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        pairs.append({frozenset(index // 2 for index in update) for update in sampler})
        assert all(len(pair) == 2 for pair in pairs[-1])
    assert len(pairs[0] & pairs[1]) < len(pairs[0]) / 2


@pytest.mark.parametrize("size", [1, 3, 8])
def test_no_example_moves_further_than_a_window(monkeypatch, size):
    """With examples as units, grouping rearranges the order that the same seed gives without it."""
    monkeypatch.setattr(sampler_module, "_WINDOW_EXAMPLES", 1)
    monkeypatch.setattr(sampler_module, "_WINDOW_UPDATES", 4)
    order = prefix_order([[index % 2, index % 3] for index in range(100)])
    arguments = {"num_examples": 100, "examples_per_update": size, "seed": 3, "shuffle_unit": "example"}
    plain, grouped = (flat(UpdateSampler(**arguments, prefix_order=given)) for given in (None, order))
    assert sorted(grouped) == list(range(100))
    moved = np.abs(np.argsort(plain) - np.argsort(grouped))
    assert 0 < moved.max() < 4 * size


def test_conversations_of_one_prefix_reach_a_window_together(monkeypatch):
    """In data of many windows, examples as units meet only by chance."""
    monkeypatch.setattr(sampler_module, "_WINDOW_EXAMPLES", 1)
    monkeypatch.setattr(sampler_module, "_WINDOW_UPDATES", 4)
    monkeypatch.setattr(sampler_module, "_FAMILY_EXAMPLES", 10)
    order = prefix_order([[index % 3, index // 3 % 3, index // 9 % 3] for index in range(270)])
    pure = {}
    for unit in ("conversation", "example"):
        sampler = UpdateSampler(num_examples=270, examples_per_update=5, seed=0, shuffle_unit=unit, prefix_order=order)
        pure[unit] = sum(len({index % 27 for index in update}) == 1 for update in sampler)
    # Of 54 updates; a family of ten fills two updates, unless a window or another family cuts it.
    assert pure["conversation"] > 40
    assert pure["example"] < 5


@settings(max_examples=50, deadline=None)
@given(sampler_arguments(), st.integers(0, 2), st.data())
def test_skipping_updates_gives_the_lists_that_are_left(arguments, epoch, data):
    """What resuming does: accelerate rebuilds the loader around the sampler and drops the first updates."""
    loader = DataLoader(range(arguments["num_examples"]), batch_sampler=UpdateSampler(**arguments), collate_fn=list)
    loader.batch_sampler.set_epoch(epoch)
    whole = list(loader)
    skipped = data.draw(st.integers(0, len(whole)))
    assert list(skip_first_batches(loader, skipped)) == whole[skipped:]


@pytest.fixture(scope="module")
def turns():
    """One example per assistant turn of the small real conversations, and their conversations."""
    transform = ChatTransform(load_tokenizer(), assistant_mask="each")
    rows = load_conversations("bfcl") + load_conversations("tau")
    found = list(transform.tokenize(rows, range(len(rows)), format_name="messages"))
    examples = [{"input_ids": example.input_ids, "loss_mask": example.loss_mask} for example in found]
    return examples, [example.conversation_id for example in found]


def sharing(examples, updates):
    """Return logical tokens per executed token of the updates, by packing them."""
    collator = PrefixTreeCollator(packed_sequence_length=32768)
    reports = [PackingReport.from_batch(collator([examples[index] for index in update])) for update in updates]
    return sum(reports, PackingReport()).sharing


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("unit", ["conversation", "example"])
def test_grouping_recovers_the_sharing_of_file_order(turns, unit, size):
    """At least 80 % of it, where shuffled examples have far less."""
    examples, conversations = turns
    count = len(examples)
    order = order_by_prefix(gather_examples(examples[first : first + 7]) for first in range(0, count, 7))
    in_file_order = sharing(examples, [range(first, min(first + size, count)) for first in range(0, count, size)])
    mixed = random.Random(0).sample(range(count), count)
    shuffled = sharing(examples, [mixed[first : first + size] for first in range(0, count, size)])
    sampler = UpdateSampler(
        num_examples=count, examples_per_update=size, seed=0, conversation_ids=conversations, shuffle_unit=unit,
        prefix_order=order,
    )  # fmt: skip
    grouped = sharing(examples, sampler)
    assert shuffled < 0.7 * in_file_order
    assert grouped >= 0.8 * in_file_order
