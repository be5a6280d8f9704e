"""Character spans to token masks.

A loss mask is unshifted: 1 marks a token that is learned. Nothing here knows messages or templates.
"""

from collections.abc import Sequence

import numpy as np

from hf_megapack.data.template import Span


def token_extents(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each token's text begins and ends, giving whitespace that offsets leave out to the next token.

    Args:
        offsets: Character offsets as a fast tokenizer reports them, some with leading whitespace trimmed. int,
            shape (num_tokens, 2).

    Returns:
        Begin and end of each token, both int64, shape (num_tokens,), both non-decreasing.

    Example:
        >>> [extent.tolist() for extent in token_extents(np.array([[0, 2], [3, 5], [6, 6]]))]
        [[0, 2, 5], [2, 5, 6]]
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    before = np.concatenate(([0], ends[:-1]))
    return np.minimum(np.maximum.accumulate(offsets[:, 0]), before), ends


def mask_tokens(text: str, offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens that make up some character spans.

    A token that straddles a span's edge counts only if nothing but whitespace of it lies outside.

    Args:
        text: What was tokenized.
        offsets: Character offsets of its tokens, int, shape (num_tokens, 2).
        spans: Spans to mark, disjoint.

    Returns:
        uint8, shape (num_tokens,).

    Example:
        >>> mask_tokens("ab cd", np.array([[0, 2], [2, 5]]), [(3, 5)]).tolist()
        [0, 1]
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    if not len(offsets):
        return mask
    starts, ends = token_extents(offsets)
    for begin, end in spans:
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(starts, end, side="left"))
        while first < last and text[starts[first] : begin].strip():
            first += 1
        while first < last and text[end : ends[last - 1]].strip():
            last -= 1
        mask[first:last] = 1
    return mask


def split_edges(text: str, offsets: np.ndarray, spans: Sequence[Span]) -> list[int]:
    """Return the edges of spans that lie inside a token whose part outside the span is more than whitespace.

    Such a token cannot be learned in part: the text must be tokenized in two pieces there, as it is when the model
    answers a prompt.

    Args:
        text: What was tokenized.
        offsets: Character offsets of its tokens, int, shape (num_tokens, 2).
        spans: Spans, disjoint.

    Returns:
        Positions in the text, ascending.

    Example:
        >>> split_edges("ab>cd", np.array([[0, 2], [2, 5]]), [(3, 5)])
        [3]
    """
    if not len(offsets):
        return []
    starts, ends = token_extents(offsets)
    edges = set()
    for begin, end in spans:
        first = int(np.searchsorted(ends, begin, side="right"))
        if first < len(starts) and starts[first] < begin and text[starts[first] : begin].strip():
            edges.add(begin)
        last = int(np.searchsorted(starts, end, side="left")) - 1
        if last >= 0 and ends[last] > end and text[end : ends[last]].strip():
            edges.add(end)
    return sorted(edges)
