"""How many slots a row really takes: the only place that rounds lengths up.

Two multiples, because there are two kinds of hardware rule: context parallelism may cut every sequence, so each pays
for it; tensor parallelism, sequence parallelism and FP8 tiles see only the finished row, so it is paid once per row.
Planner, layout, dummies and counts all ask `Alignment`; a second formula would not crash, it would read wrong tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from hf_megapack.errors import ConfigError, DataError

# Slots that context parallelism hands out together: the block of the attention kernels.
CONTEXT_BLOCK = 128


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The two multiples of a row and everything that follows from them.

    Attributes:
        sequence_multiple: Every sequence of a row is padded to a multiple of this.
        packed_multiple: The finished row is padded to a multiple of this, once, at its tail.

    Raises:
        ConfigError: If a multiple is not a whole number of at least 1.
    """

    sequence_multiple: int = 1
    packed_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("sequence_multiple", "packed_multiple"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")

    @classmethod
    def for_layout(
        cls,
        *,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        fp8: str | None = None,
        attention: Literal["tree", "thd"] = "tree",
    ) -> Self:
        """Derive both multiples from the parallel layout and the FP8 recipe.

        Args:
            tensor_parallel_size: Ranks that share each linear layer.
            context_parallel_size: Ranks that share each row.
            fp8: FP8 recipe, None for none. Recipes without a rule of their own get the coarsest, that of "blockwise".
            attention: "thd" cuts every sequence into 2 x context_parallel_size chunks; "tree" hands out blocks of 128
                slots of the whole row.

        Returns:
            The smallest alignment that suits all of it.

        Raises:
            ConfigError: If a size is below 1, the recipe is still "auto", or `attention` is unknown.

        Example:
            >>> Alignment.for_layout(tensor_parallel_size=4, context_parallel_size=2, fp8="blockwise", attention="thd")
            Alignment(sequence_multiple=16, packed_multiple=1024)
        """
        for name, size in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("context_parallel_size", context_parallel_size),
        ):
            if size < 1:
                raise ConfigError(f"{name} is {size}; it must be at least 1")
        if attention not in ("tree", "thd"):
            raise ConfigError(f'attention is {attention!r}; alignment is known for "tree" and "thd"')
        ranks = tensor_parallel_size * context_parallel_size
        sequence_multiple = 1
        packed_multiple = tensor_parallel_size
        if context_parallel_size > 1 and attention == "thd":
            sequence_multiple = packed_multiple = 2 * ranks
        elif context_parallel_size > 1:
            packed_multiple = math.lcm(CONTEXT_BLOCK * context_parallel_size, ranks)
        if fp8 is not None:
            fp8_multiple = _fp8_multiple(fp8, tensor_parallel_size, context_parallel_size)
            packed_multiple = math.lcm(packed_multiple, fp8_multiple)
        return cls(sequence_multiple=sequence_multiple, packed_multiple=packed_multiple)

    def layout(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the slot boundaries of sequences that are laid side by side in one row.

        Args:
            lengths: Tokens of each sequence, each at least 1.

        Returns:
            int64, shape (len(lengths) + 1,), first 0, last the slots of the row. The row's tail padding counts to the
            last sequence; it begins after the last sequence's own padding.

        Raises:
            DataError: If a length is below 1.

        Example:
            >>> Alignment(packed_multiple=512).layout([100, 200]).tolist()
            [0, 100, 512]
            >>> Alignment(sequence_multiple=8, packed_multiple=8).layout([5, 3]).tolist()
            [0, 8, 16]
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        if sizes.size and sizes.min() < 1:
            raise DataError(f"sequence {int(sizes.argmin())} has {int(sizes.min())} tokens; each needs at least 1")
        boundaries = np.zeros(sizes.size + 1, dtype=np.int64)
        np.cumsum(-(-sizes // self.sequence_multiple) * self.sequence_multiple, out=boundaries[1:])
        if sizes.size:
            boundaries[-1] = self.footprint(int(boundaries[-1]))
        return boundaries

    def align_sequence(self, length: int) -> int:
        """Return the slots that one sequence takes inside a row, without the row's tail."""
        return _round_up(length, self.sequence_multiple)

    def footprint(self, num_slots: int) -> int:
        """Return the slots of a row whose sequences together take `num_slots`: the tail padding included."""
        return _round_up(num_slots, self.packed_multiple)

    def capacity(self, packed_sequence_length: int) -> int:
        """Return the row capacity in force: no row can be smaller than one aligned tile."""
        return max(packed_sequence_length, self.packed_multiple)

    def fill_limit(self, capacity: int) -> int:
        """Return the most slots that sequences may take so that the row's footprint stays within `capacity`."""
        return capacity - capacity % self.packed_multiple


NO_ALIGNMENT = Alignment()


def _fp8_multiple(fp8: str, tensor_parallel_size: int, context_parallel_size: int) -> int:
    """Return the slots that FP8 tiles need over all ranks of a row.

    Args:
        fp8: FP8 recipe.
        tensor_parallel_size: Ranks that share each linear layer.
        context_parallel_size: Ranks that share each row.

    Returns:
        A multiple for the whole row.

    Raises:
        ConfigError: If the recipe is unresolved: another machine could resolve it to another grid.
    """
    recipe = fp8.strip().lower()
    if recipe in ("", "auto"):
        raise ConfigError(
            f"fp8 is {fp8!r}, which machines resolve differently; name the recipe: "
            'None, "tensorwise", "delayed", "blockwise" or "mxfp8"'
        )
    ranks = tensor_parallel_size * context_parallel_size
    if recipe == "mxfp8":
        return 32 * ranks
    return 128 * ranks if tensor_parallel_size > 1 else 16 * context_parallel_size
