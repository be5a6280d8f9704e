"""UpdateSampler: every example once per epoch, conversations together, the same lists everywhere."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_megapack.data.sampler import UpdateSampler
from hf_megapack.errors import ConfigError


@st.composite
def sampler_arguments(draw):
    ids = draw(st.lists(st.integers(0, 12), min_size=1, max_size=60))
    return {
        "num_examples": len(ids),
        "examples_per_update": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 2**31)),
        "shuffle": draw(st.booleans()),
        "conversation_ids": draw(st.sampled_from([ids, None])),
        "shuffle_unit": draw(st.sampled_from(["conversation", "example"])),
    }


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
    arguments = {**arguments, "shuffle": True, "shuffle_unit": "conversation"}
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
