"""Decide which examples make up each optimizer update: a seeded batch sampler, the same on every process.

Every example comes exactly once per epoch (`drop_last` may leave out the last, smaller update), and an epoch's lists
depend on the arguments and the epoch alone, so that a resumed run skips to where it was. Nothing here looks at tokens,
ranks or rows.

Grouping by prefix works on the shuffled order: it is cut into windows, the examples of one window are brought together,
and the updates that come of it are shuffled again. The window bounds how far an example moves, so epochs stay mixed.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hf_megapack.errors import ConfigError
from hf_megapack.packing import PrefixOrder, prefix_families, shuffle_by_prefix

SHUFFLE_UNITS = ("conversation", "example")

# A window is at most this many updates, or as many as hold this many examples if that is more.
_WINDOW_UPDATES = 16
_WINDOW_EXAMPLES = 4096
# Conversations move into a window together if so many examples or fewer have their prefix.
_FAMILY_EXAMPLES = 256


class UpdateSampler:
    """Yield lists of example indices, one list per optimizer update; use it as a DataLoader's `batch_sampler`.

    Args:
        num_examples: Examples in the dataset.
        examples_per_update: Examples that one optimizer update learns from.
        seed: Seed of the order; together with the epoch it fixes every list.
        shuffle: Whether the order changes from the dataset's own.
        conversation_ids: Conversation of each example, shape (num_examples,); None makes every example its own.
        shuffle_unit: "conversation" keeps the examples of one conversation together, in dataset order, and
            shuffles conversations (an update boundary may still cut one); "example" shuffles examples. With
            `prefix_order` it decides whether conversations of one prefix reach a window together, or each example
            alone.
        drop_last: Whether to leave out a last update that is smaller than `examples_per_update`.
        prefix_order: Order of the examples by prefix; given, examples of a window with common prefixes come into the
            same update.

    Raises:
        ConfigError: If there is nothing to yield, or an argument has a value that is not allowed.

    Example:
        >>> sampler = UpdateSampler(num_examples=5, examples_per_update=2, seed=0, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[0, 1], [2, 3], [4]], 3)
    """

    def __init__(  # noqa: PLR0913 - keyword-only, as a DataLoader argument list is
        self,
        *,
        num_examples: int,
        examples_per_update: int,
        seed: int,
        shuffle: bool = True,
        conversation_ids: Sequence[int] | np.ndarray | None = None,
        shuffle_unit: str = "conversation",
        drop_last: bool = False,
        prefix_order: PrefixOrder | None = None,
    ) -> None:
        if num_examples < 1:
            raise ConfigError(f"a sampler needs at least one example, got num_examples={num_examples}")
        if examples_per_update < 1:
            raise ConfigError(f"examples_per_update must be at least 1, got {examples_per_update}")
        if seed < 0:
            raise ConfigError(f"seed must not be negative, got {seed}")
        if shuffle_unit not in SHUFFLE_UNITS:
            raise ConfigError(f"shuffle_unit must be one of {SHUFFLE_UNITS}, got {shuffle_unit!r}")
        if drop_last and num_examples < examples_per_update:
            raise ConfigError(
                f"drop_last leaves nothing: {num_examples} examples are fewer than examples_per_update="
                f"{examples_per_update}; lower the batch size or turn drop_last off"
            )
        if prefix_order is not None and not shuffle:
            raise ConfigError("examples are grouped by prefix in a shuffled order; turn shuffle on or leave out both")
        if prefix_order is not None and prefix_order.rank.shape != (num_examples,):
            raise ConfigError(f"prefix_order is of {prefix_order.rank.size} examples, expected {num_examples}")
        self._units = np.arange(num_examples)
        if conversation_ids is not None:
            ids = np.asarray(conversation_ids)
            if ids.shape != (num_examples,):
                raise ConfigError(f"conversation_ids has shape {ids.shape}, expected ({num_examples},)")
            if shuffle_unit == "conversation":
                self._units = _first_seen_numbers(ids)
        if prefix_order is not None and shuffle_unit == "conversation":
            self._units = _related_units(self._units, prefix_order)
        self._examples_per_update = examples_per_update
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._prefix_order = prefix_order
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; the same epoch gives the same lists."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of updates per epoch."""
        full, rest = divmod(len(self._units), self._examples_per_update)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this epoch's updates."""
        generator = np.random.Generator(np.random.PCG64([self._seed, self._epoch]))
        order = self._shuffled_order(generator)
        updates = self._cut(order) if self._prefix_order is None else self._grouped_updates(order, generator)
        for _, update in zip(range(len(self)), updates, strict=False):
            yield update.tolist()

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        return np.split(order, range(self._examples_per_update, order.size, self._examples_per_update))

    def _shuffled_order(self, generator: np.random.Generator) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._units))
        rank_of_unit = generator.permutation(int(self._units.max()) + 1)
        return np.argsort(rank_of_unit[self._units], kind="stable")

    def _grouped_updates(self, order: np.ndarray, generator: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield the updates of each window in random order, an incomplete one at the very end."""
        size = self._examples_per_update
        updates_per_window = max(_WINDOW_UPDATES, _WINDOW_EXAMPLES // size)
        num_updates = -(-order.size // size)
        # Windows of equal size: a small one at the end would share less.
        num_windows = -(-num_updates // updates_per_window)
        bounds = np.arange(num_windows + 1) * num_updates // num_windows * size
        for start, stop in pairwise(bounds.tolist()):
            window = order[start:stop]
            updates = self._cut(shuffle_by_prefix(self._prefix_order, window, generator))
            num_full = window.size // size
            for update in [*generator.permutation(num_full), *range(num_full, len(updates))]:
                yield updates[update]


def _first_seen_numbers(ids: np.ndarray) -> np.ndarray:
    """Return ids renumbered 0, 1, 2, ... in order of first appearance, so that their values do not matter."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]


def _related_units(units: np.ndarray, order: PrefixOrder) -> np.ndarray:
    """Join conversations whose last examples are of one prefix family, so that they come into the same window."""
    last_example = np.empty(int(units.max()) + 1, dtype=np.int64)
    last_example[units] = np.arange(units.size)
    return prefix_families(order, _FAMILY_EXAMPLES)[last_example[units]]
