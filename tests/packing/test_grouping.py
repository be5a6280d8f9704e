"""Order by prefix: neighbours share, subtrees stay whole, and equal examples keep the dataset's order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_megapack.packing import gather_examples, order_by_prefix, prefix_families, shuffle_by_prefix
from hf_megapack.packing.grouping import BLOCK_TOKENS

prompts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=30)


def gather(prompts_, *, share_supervised=False):
    """Return examples with a block of equal tokens for each number of their prompt, then two learned tokens."""
    tokens = [[1 + block for block in prompt for _ in range(BLOCK_TOKENS)] for prompt in prompts_]
    return gather_examples(
        [{"input_ids": [*prompt, 9, 9, 9], "loss_mask": [0] * len(prompt) + [0, 1, 1]} for prompt in tokens],
        share_supervised=share_supervised,
    )


def shared_blocks(first, second):
    """Return how many leading blocks two prompts have in common."""
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count


@settings(max_examples=100, deadline=None)
@given(prompts)
def test_common_is_what_neighbours_share_and_order_is_the_best(prompts_):
    """Each neighbour shares as much as any example before it does: the order is that of a sorted list."""
    order = order_by_prefix([gather(prompts_)])
    sorted_prompts = [prompts_[index] for index in np.argsort(order.rank)]
    assert sorted(order.rank.tolist()) == list(range(len(prompts_)))
    assert order.common[0] == 0
    for place in range(1, len(prompts_)):
        shared = [shared_blocks(sorted_prompts[place], before) for before in sorted_prompts[:place]]
        assert order.common[place] == BLOCK_TOKENS * shared[-1] == BLOCK_TOKENS * max(shared)


@settings(max_examples=50, deadline=None)
@given(prompts, st.integers(1, 8))
def test_reading_in_parts_changes_nothing(prompts_, size):
    whole = order_by_prefix([gather(prompts_)])
    parts = order_by_prefix(gather(prompts_[first : first + size]) for first in range(0, len(prompts_), size))
    assert whole.rank.tolist() == parts.rank.tolist()
    assert whole.common.tolist() == parts.common.tolist()


def test_equal_prompts_keep_the_order_of_the_dataset():
    ranks = order_by_prefix([gather([[1], [0], [1], [1]])]).rank
    assert ranks[0] < ranks[2] < ranks[3]


def test_every_token_of_a_block_and_its_place_count():
    base = list(range(1, BLOCK_TOKENS + 1))
    changed = [[*base[:at], base[at] + 50, *base[at + 1 :]] for at in range(BLOCK_TOKENS)]
    swapped = [base[1], base[0], *base[2:]]
    rows = [base, base, *changed, swapped]
    order = order_by_prefix([gather_examples([{"input_ids": [*r, 9], "loss_mask": [0] * (len(r) + 1)} for r in rows])])
    assert sorted(order.common.tolist()) == [0] * (len(rows) - 1) + [BLOCK_TOKENS]


def test_only_what_may_be_shared_counts():
    """A learned block is common to two examples only where learned slots are shared."""
    learned = {"input_ids": [1] * BLOCK_TOKENS, "loss_mask": [1] * BLOCK_TOKENS}
    for share_supervised in (False, True):
        examples = gather_examples([learned, learned], share_supervised=share_supervised)
        assert order_by_prefix([examples]).common.tolist() == [0, BLOCK_TOKENS * share_supervised]


@settings(max_examples=100, deadline=None)
@given(prompts, st.integers(0, 3), st.data())
def test_a_random_walk_keeps_every_prefix_in_one_run(prompts_, seed, data):
    """Of the examples asked for, those that begin with any given prefix are neighbours."""
    order = order_by_prefix([gather(prompts_)])
    indices = st.sampled_from(range(len(prompts_)))
    members = np.array(data.draw(st.lists(indices, min_size=1, unique=True)))
    walked = shuffle_by_prefix(order, members, np.random.Generator(np.random.PCG64(seed))).tolist()
    assert sorted(walked) == sorted(members.tolist())
    for prefix in {tuple(prompts_[index][:depth]) for index in walked for depth in range(1, 6)}:
        places = [at for at, index in enumerate(walked) if tuple(prompts_[index][: len(prefix)]) == prefix]
        assert places == list(range(places[0], places[0] + len(places)))


def test_random_walks_differ_and_reach_every_order_of_the_branches():
    order = order_by_prefix([gather([[0, 0], [0, 1], [0, 2], [1]])])
    generator = np.random.Generator(np.random.PCG64(0))
    seen = {tuple(shuffle_by_prefix(order, np.arange(4), generator).tolist()) for _ in range(200)}
    # Three branches below the fork, 3! orders, and the fourth example before or after all of them.
    assert len(seen) == 12


@settings(max_examples=100, deadline=None)
@given(prompts, st.integers(1, 12))
def test_a_family_is_the_largest_subtree_within_the_limit(prompts_, limit):
    """Two examples are of one family exactly if the examples with some common prefix of theirs are few enough."""
    families = prefix_families(order_by_prefix([gather(prompts_)]), limit)
    for first in range(len(prompts_)):
        for second in range(first):
            depth = shared_blocks(prompts_[first], prompts_[second])
            prefixes = [prompts_[first][:size] for size in range(1, depth + 1)]
            counts = [sum(prompt[: len(prefix)] == prefix for prompt in prompts_) for prefix in prefixes]
            assert (families[first] == families[second]) == any(count <= limit for count in counts)
