"""Character spans to token masks.

A loss mask is unshifted: 1 marks a token that is learned. Nothing here knows messages or templates.
"""

from collections.abc import Sequence

import numpy as np

from hf_megapack.data.template import Span

# Where each token's text begins and ends, as `token_extents` returns it.
Extents = tuple[np.ndarray, np.ndarray]


def token_extents(text: str, offsets: np.ndarray) -> Extents:
    """Return where each token's text begins and ends.

    Offsets leave out whitespace, which goes to the next token, and what a normaliser put together with the character
    before it (an accent of its own), which stays with the token before.

    Args:
        text: What was tokenized.
        offsets: Character offsets as a fast tokenizer reports them, some with leading whitespace trimmed. int,
            shape (num_tokens, 2).

    Returns:
        Begin and end of each token, both int64, shape (num_tokens,), both non-decreasing.

    Example:
        >>> [extent.tolist() for extent in token_extents("ab cd ", np.array([[0, 2], [3, 5], [6, 6]]))]
        [[0, 2, 5], [2, 5, 6]]
        >>> [extent.tolist() for extent in token_extents("e\u0301x", np.array([[0, 1], [2, 3]]))]
        [[0, 2], [2, 3]]
    """
    begins = np.maximum.accumulate(offsets[:, 0])
    ends = np.maximum.accumulate(offsets[:, 1])
    gaps = np.flatnonzero(ends[:-1] < begins[1:])
    left_out = zip(ends[gaps].tolist(), begins[gaps + 1].tolist(), strict=True)
    ends[gaps] += np.array([len(text[end:begin].rstrip()) for end, begin in left_out], dtype=np.int64)
    before = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    return np.minimum(begins, before), ends


def mask_tokens(text: str, extents: Extents, spans: Sequence[Span]) -> np.ndarray:
    """Mark the tokens that make up some character spans.

    A token that straddles a span's edge counts only if nothing but whitespace of it lies outside.

    Args:
        text: What was tokenized.
        extents: Extents of its tokens.
        spans: Spans to mark, disjoint.

    Returns:
        uint8, shape (num_tokens,).

    Example:
        >>> mask_tokens("ab cd", token_extents("ab cd", np.array([[0, 2], [2, 5]])), [(3, 5)]).tolist()
        [0, 1]
    """
    starts, ends = extents
    mask = np.zeros(len(starts), dtype=np.uint8)
    for begin, end in spans:
        first = int(ends.searchsorted(begin, "right"))
        last = int(starts.searchsorted(end, "left"))
        while first < last and text[starts[first] : begin].strip():
            first += 1
        while first < last and text[end : ends[last - 1]].strip():
            last -= 1
        mask[first:last] = 1
    return mask


def split_edges(text: str, extents: Extents, spans: Sequence[Span], *, is_strict: bool) -> list[int]:
    """Return the edges of spans that lie inside a token, where text outside the span must not be learned.

    Such a token cannot be learned in part: the text must be tokenized in two pieces there, as it is when the model
    answers a prompt. Whitespace at the end of a prompt is part of it too, but not every tokenizer can write the answer
    behind it as a piece of its own.

    Args:
        text: What was tokenized.
        extents: Extents of its tokens.
        spans: Spans, disjoint.
        is_strict: Whether whitespace before a span is text like any other; whitespace behind one never is.

    Returns:
        Positions in the text, ascending.

    Example:
        >>> split_edges("ab>cd", token_extents("ab>cd", np.array([[0, 2], [2, 5]])), [(3, 5)], is_strict=False)
        [3]
        >>> extents = token_extents("ab cd", np.array([[0, 2], [2, 5]]))
        >>> [split_edges("ab cd", extents, [(3, 5)], is_strict=is_strict) for is_strict in (True, False)]
        [[3], []]
    """
    starts, ends = extents
    edges = set()
    for begin, end in spans:
        first = int(ends.searchsorted(begin, "right"))
        if first < len(starts) and starts[first] < begin and (is_strict or text[starts[first] : begin].strip()):
            edges.add(begin)
        last = int(starts.searchsorted(end, "left")) - 1
        if last >= 0 and ends[last] > end and text[end : ends[last]].strip():
            edges.add(end)
    return sorted(edges)
