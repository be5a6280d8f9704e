"""Tokenized examples, checked and laid end to end: the form in which the packing room reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_megapack.errors import DataError


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ExampleSet:
    """The examples of one update as flat arrays.

    Attributes:
        tokens: Tokens of all examples, end to end. int32, shape (num_tokens,).
        is_learned: True where the next token of the same example is loss-bearing. bool, shape (num_tokens,).
        offsets: Example `i` is `tokens[offsets[i]:offsets[i + 1]]`. int64, shape (num_examples + 1,).
        lengths: Tokens of each example. int64, shape (num_examples,).
        shareable: Leading tokens of each example that other examples may share. int64, shape (num_examples,).
        share_supervised: True if slots that are learned may be shared; then all of an example is shareable.
    """

    tokens: np.ndarray
    is_learned: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    shareable: np.ndarray
    share_supervised: bool


def gather_examples(examples: Sequence[Mapping[str, Any]], *, share_supervised: bool = False) -> ExampleSet:
    """Check the examples of an update and lay them end to end.

    Args:
        examples: Each with `input_ids` (integers, at least one) and `loss_mask` (0 or 1 per token, unshifted; index 0
            never counts); `attention_mask`, where there is one, may only mark padding on the right, which is cut off.
            Numpy arrays are read as they are; lists are slower.
        share_supervised: Also share slots that are learned, where prefix and label agree.

    Returns:
        The examples, in the given order.

    Raises:
        DataError: If there is no example, a column is missing, an example is empty or not one-dimensional, two columns
            differ in length, padding is anywhere but on the right, a mask value is neither 0 nor 1, or a token is
            negative or beyond int32.

    Example:
        >>> examples = gather_examples([{"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1]}])
        >>> examples.is_learned.tolist(), examples.shareable.tolist()
        ([False, True, True, False], [1])
    """
    if not len(examples):
        raise DataError("an update has no examples; give it at least one")
    arrays = [_read_example(index, example) for index, example in enumerate(examples)]
    lengths = np.fromiter((ids.size for ids, _ in arrays), dtype=np.int64, count=len(arrays))
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = np.concatenate([ids for ids, _ in arrays])
    mask = np.concatenate([mask for _, mask in arrays])
    # The bits of all tokens together are negative or too large exactly if one token is.
    if not 0 <= np.bitwise_or.reduce(tokens) < 2**31:
        index, at, value = _locate((tokens < 0) | (tokens >= 2**31), tokens, offsets)
        raise DataError(f"example {index}: token {value} at {at} is not a vocabulary index")
    learned = mask if mask.dtype == bool else mask.astype(bool)
    if mask.dtype.kind not in "biu" or np.bitwise_or.reduce(mask) not in (0, 1):
        wrong = learned != mask
        if wrong.any():
            index, at, value = _locate(wrong, mask, offsets)
            raise DataError(f"example {index}: loss_mask is {value} at {at}; it must be 0 or 1")
    learned[offsets[:-1]] = False
    is_learned = np.zeros_like(learned)
    is_learned[:-1] = learned[1:]
    return ExampleSet(
        tokens=tokens.astype(np.int32, copy=False),
        is_learned=is_learned,
        offsets=offsets,
        lengths=lengths,
        shareable=lengths if share_supervised else _shareable_lengths(is_learned, offsets, lengths),
        share_supervised=share_supervised,
    )


def _read_example(index: int, example: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and loss mask of one example without its padding."""
    try:
        ids, mask = np.asarray(example["input_ids"]), np.asarray(example["loss_mask"])
    except KeyError as error:
        raise DataError(f"example {index} has no {error.args[0]}; its columns are {sorted(example)}") from None
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise DataError(
            f"example {index}: input_ids has shape {ids.shape} and type {ids.dtype}; "
            "it must be a list of at least one integer"
        )
    _check_length(index, "loss_mask", mask, ids)
    if "attention_mask" not in example:
        return ids, mask
    attended = np.asarray(example["attention_mask"])
    _check_length(index, "attention_mask", attended, ids)
    size = int(np.count_nonzero(attended))
    if size == 0 or not attended[:size].all():
        raise DataError(
            f"example {index}: attention_mask must be ones, then zeros, with at least one 1; "
            "pad on the right or not at all (packing needs no padding)"
        )
    return ids[:size], mask[:size]


def _check_length(index: int, name: str, column: np.ndarray, ids: np.ndarray) -> None:
    if column.shape != ids.shape:
        raise DataError(f"example {index}: {name} has shape {column.shape}, input_ids {ids.shape}; they must agree")


def _locate(wrong: np.ndarray, values: np.ndarray, offsets: np.ndarray) -> tuple[int, int, Any]:
    """Return example, index in the example and value of the first wrong entry."""
    at = int(np.flatnonzero(wrong)[0])
    example = int(np.searchsorted(offsets, at, side="right")) - 1
    return example, at - int(offsets[example]), values[at].item()


def _shareable_lengths(is_learned: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how many leading tokens of each example predict nothing that is learned.

    The position before a loss-bearing token predicts it; shared, it would need a label for each owner.
    """
    learned_at = np.flatnonzero(is_learned)
    nearest = np.searchsorted(learned_at, offsets[:-1])
    first_learned = np.append(learned_at, offsets[-1])[nearest]
    return np.minimum(first_learned - offsets[:-1], lengths)
