"""Decide which examples make up each optimizer update: a seeded batch sampler, the same on every process.

Every example comes exactly once per epoch (`drop_last` may leave out the last, smaller update). Nothing here looks at
tokens, ranks or rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import ConfigError

SHUFFLE_UNITS = ("conversation", "example")


class UpdateSampler:
    """Yield lists of example indices, one list per optimizer update; use it as a DataLoader's `batch_sampler`.

    Args:
        num_examples: Examples in the dataset.
        examples_per_update: Examples that one optimizer update learns from.
        seed: Seed of the order; together with the epoch it fixes every list.
        shuffle: Whether the order changes from the dataset's own.
        conversation_ids: Conversation of each example, shape (num_examples,); None makes every example its own.
        shuffle_unit: "conversation" keeps the examples of one conversation together, in dataset order, and
            shuffles conversations (an update boundary may still cut one); "example" shuffles examples.
        drop_last: Whether to leave out a last update that is smaller than `examples_per_update`.

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
        self._units = np.arange(num_examples)
        if conversation_ids is not None:
            ids = np.asarray(conversation_ids)
            if ids.shape != (num_examples,):
                raise ConfigError(f"conversation_ids has shape {ids.shape}, expected ({num_examples},)")
            if shuffle_unit == "conversation":
                self._units = _first_seen_numbers(ids)
        self._examples_per_update = examples_per_update
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
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
        order = self._epoch_order().tolist()
        size = self._examples_per_update
        for update in range(len(self)):
            yield order[update * size : (update + 1) * size]

    def _epoch_order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._units))
        generator = np.random.Generator(np.random.PCG64([self._seed, self._epoch]))
        rank_of_unit = generator.permutation(int(self._units.max()) + 1)
        return np.argsort(rank_of_unit[self._units], kind="stable")


def _first_seen_numbers(ids: np.ndarray) -> np.ndarray:
    """Return ids renumbered 0, 1, 2, ... in order of first appearance, so that their values do not matter."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]
