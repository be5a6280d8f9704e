"""Tokenize many texts, the shared beginning of neighbours once.

The invariant: the result equals tokenizing each text alone. A control token splits text before anything else happens,
so what precedes one is tokenized the same whatever follows: two texts that agree up to one share the tokens before it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from tokenizers import Encoding, Tokenizer

# Shorter beginnings are not worth the copying.
_MIN_SHARED_CHARACTERS = 200


class TextEncoder:
    """A tokenizer's tables, with nothing left over from how it was called before.

    Args:
        serialised: The tokenizer as `tokenizers.Tokenizer.to_str` writes it.
    """

    def __init__(self, serialised: str) -> None:
        self.backend = Tokenizer.from_str(serialised)
        # Truncation and padding are traces of earlier calls of the tokenizer, not part of it.
        self.backend.no_truncation()
        self.backend.no_padding()
        added = list(self.backend.get_added_tokens_decoder().items())
        self.special_tokens = [token.content for _, token in added if token.special]
        self._split_ids = {
            token.content: token_id
            for token_id, token in added
            if token.special
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            and not any(token.content in other.content for _, other in added if other.content != token.content)
        }

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the tokens of each text and their character offsets.

        Args:
            texts: What to tokenize; texts that share a beginning should be neighbours.
            add_special_tokens: Whether the tokenizer adds the tokens that it puts around plain text.

        Yields:
            Token ids, int32, shape (num_tokens,), and offsets, int64, shape (num_tokens, 2).
        """
        cuts: list[tuple[int, int | None]] = [(0, None)] * len(texts)
        if not add_special_tokens:
            cuts[1:] = [self._last_shared_split(*pair) for pair in pairwise(texts)]
        rests = [text[cut:] for text, (cut, _) in zip(texts, cuts, strict=True)]
        encodings = self.backend.encode_batch(rests, add_special_tokens=add_special_tokens)
        ids, offsets = np.empty(0, np.int32), np.empty((0, 2), np.int64)
        for text, (cut, split_id), encoding in zip(texts, cuts, encodings, strict=True):
            before_ids, before_offsets = ids, offsets
            ids, offsets = _as_arrays(encoding)
            if cut:
                kept = int(np.searchsorted(np.maximum.accumulate(before_offsets[:, 1]), cut, side="right"))
                is_split = kept < len(before_ids) and before_ids[kept] == split_id and before_offsets[kept, 0] == cut
                if is_split and ids[0] == split_id:
                    ids = np.concatenate((before_ids[:kept], ids))
                    offsets = np.concatenate((before_offsets[:kept], offsets + cut))
                else:
                    ids, offsets = _as_arrays(self.backend.encode(text, add_special_tokens=False))
            yield ids, offsets

    def encode_pieces(
        self, text: str, cuts: Sequence[int], *, add_special_tokens: bool
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokenize a text so that no token reaches over a cut.

        Args:
            text: What to tokenize.
            cuts: Positions in the text, ascending.
            add_special_tokens: Whether the tokenizer adds the tokens that it puts around plain text.

        Returns:
            Ids and offsets as `encode` yields them, or None if the tokenizer does not write the pieces as it writes the
            whole (some put a space before every text).
        """
        whole = self.backend.encode(text, add_special_tokens=add_special_tokens)
        ids, offsets = _as_arrays(whole)
        # What the tokenizer puts around a text, it puts around the pieces together.
        inside = np.flatnonzero(np.array(whole.special_tokens_mask) == 0)
        first, stop = (inside[0], inside[-1] + 1) if len(inside) else (0, 0)
        parts = [(ids[:first], offsets[:first])]
        for start, end in pairwise([0, *cuts, len(text)]):
            piece_ids, piece_offsets = _as_arrays(self.backend.encode(text[start:end], add_special_tokens=False))
            piece_offsets += start
            if start:
                # Some offsets leave out whitespace, and its token would seem to end where the piece begins.
                piece_offsets[:, 1] = np.maximum(piece_offsets[:, 1], start + 1)
            parts.append((piece_ids, piece_offsets))
        parts.append((ids[stop:], offsets[stop:]))
        ids, offsets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        decoded = [self.backend.decode(list(each), skip_special_tokens=False) for each in (ids, whole.ids)]
        return (ids, offsets) if decoded[0] == decoded[1] else None

    def _last_shared_split(self, first: str, second: str) -> tuple[int, int | None]:
        """Return where the last control token in the common beginning of two texts starts, and its id."""
        length = common_length(first, second)
        if length < _MIN_SHARED_CHARACTERS:
            return 0, None
        cut, token = max(((first.rfind(token, 0, length), token) for token in self._split_ids), default=(-1, ""))
        return (cut, self._split_ids[token]) if cut >= _MIN_SHARED_CHARACTERS else (0, None)


def _as_arrays(encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(encoding.ids, dtype=np.int32)
    # Faster than an array of the tuples.
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * len(ids))
    return ids, offsets.reshape(-1, 2)


def common_length(first: str, second: str) -> int:
    """Return how many leading characters two texts share.

    Args:
        first: One text.
        second: The other.

    Example:
        >>> common_length("abc", "abd")
        2
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
