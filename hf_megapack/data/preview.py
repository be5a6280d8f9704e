"""Show an example as text, with what will be learned in colour: in a terminal, or in a notebook.

What is shown is what the tokens decode to, never the messages that they came from, so it is what the model gets.
Control characters in the data are spelled out; they could otherwise write over the screen.
"""

import html
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.formats import recognise_format
from hf_megapack.data.lengths import Outcome
from hf_megapack.errors import DataError

_COLOUR, _PLAIN = "\033[30;42m", "\033[0m"
_NEWLINE = "\u21b5\n"
_SMALL_SHARE = 0.002
_UNPRINTABLE = re.compile(r"[^\S \n\t]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring tokens that are all learned, or all not.

    Attributes:
        text: What they decode to; the middle of long text left out.
        is_learned: Whether they are learned.
    """

    text: str
    is_learned: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamplePreview:
    """One example as text.

    Attributes:
        title: Where it comes from.
        runs: Its text, in order.
        num_tokens: Tokens in all.
        num_learned: Tokens that are learned.
        warnings: What looks wrong.
    """

    title: str
    runs: tuple[Run, ...]
    num_tokens: int
    num_learned: int
    warnings: tuple[str, ...]

    @property
    def headline(self) -> str:
        """Title and counts in one line."""
        share = self.num_learned / self.num_tokens if self.num_tokens else 0.0
        return f"{self.title}: {self.num_tokens:,} tokens, {self.num_learned:,} learned ({share:.1%})"


@dataclass(frozen=True, slots=True)
class Preview:
    """Examples as text; shows itself in colour at the end of a notebook cell and when printed.

    Attributes:
        examples: One per training example.
    """

    examples: tuple[ExamplePreview, ...]

    def text(self, *, colour: bool) -> str:
        """Return the examples for a terminal.

        Args:
            colour: Whether to mark what is learned by colour; else by [[ and ]].
        """
        return "\n".join(_terminal_text(example, colour) for example in self.examples)

    def __str__(self) -> str:
        return self.text(colour="NO_COLOR" not in os.environ)

    def _repr_html_(self) -> str:
        return "".join(_html_text(example) for example in self.examples)


def preview(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_characters: int | None = 1500,
    row_index: int = 0,
    **options: Any,
) -> Preview:
    """Show what will be learned of one row of a dataset.

    Args:
        row: A row in any known format, or a tokenized example.
        tokenizer: The tokenizer, with its chat template.
        max_characters: Most characters of text between two changes of colour; the middle of longer text is left out.
            None shows everything.
        row_index: Its position in the dataset.
        **options: Those of `ChatTransform`, such as `assistant_mask` and `max_length`.

    Returns:
        An object that shows itself in a notebook and when printed.

    Raises:
        DataError: If it is no row, or one that cannot be learned, as in training.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"preview shows one row, a dict; got {type(row).__name__}. Pass one, such as dataset[0].")
    transform = ChatTransform(tokenizer, **options)
    examples = transform.tokenize([row], [row_index], format_name=recognise_format(row.keys()))
    return Preview(
        tuple(
            show_example(
                {"input_ids": example.input_ids, "loss_mask": example.loss_mask},
                tokenizer,
                title=f"row {example.conversation_id}" + (f", turn {example.turn}" if example.turn >= 0 else ""),
                outcome=example.outcome,
                max_characters=max_characters,
            )
            for example in examples
        )
    )


def show_example(
    example: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str,
    outcome: Outcome = Outcome.WHOLE,
    max_characters: int | None = 1500,
) -> ExamplePreview:
    """Return a tokenized example as text.

    Args:
        example: `input_ids` and `loss_mask`.
        tokenizer: What decodes it.
        title: Where it comes from.
        outcome: What the length policy did to it.
        max_characters: See `preview`.
    """
    ids = np.asarray(example["input_ids"])
    mask = np.asarray(example["loss_mask"]).astype(bool)
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1), len(ids)] if len(ids) else [0]
    runs = [
        Run(text=_shorten(tokenizer.decode(ids[start:end].tolist()), max_characters), is_learned=bool(mask[start]))
        for start, end in pairwise(edges)
    ]
    return ExamplePreview(
        title=title,
        runs=tuple(runs),
        num_tokens=len(ids),
        num_learned=int(mask.sum()),
        warnings=tuple(_warnings(ids, mask, tokenizer, outcome)),
    )


def _warnings(ids: np.ndarray, mask: np.ndarray, tokenizer: PreTrainedTokenizerBase, outcome: Outcome) -> list[str]:
    if outcome >= Outcome.DROPPED:
        return ["too long: this example is left out"]
    found = ["too long: this example was cut"] if outcome == Outcome.TRUNCATED else []
    is_control = np.isin(ids, _control_ids(tokenizer))
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
    starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
    open_runs = sum(not is_control[start : end + 1].any() for start, end in zip(starts, ends, strict=True))
    if open_runs:
        found.append(
            f"{open_runs} of {len(ends)} learned passages hold no control token, so the model may not learn to stop"
        )
    if mask.mean() < _SMALL_SHARE:
        found.append(f"only {mask.mean():.2%} of the tokens are learned")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        found.append("the text begins with two begin-of-text tokens")
    return found


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]


def _shorten(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]}\n[... {len(text) - most:,} characters ...]\n{text[len(text) - (most - head) :]}"


def _spell_out(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _terminal_text(example: ExamplePreview, colour: bool) -> str:
    before, after = (_COLOUR, _PLAIN) if colour else ("[[", "]]")
    parts = []
    for run in example.runs:
        text = _spell_out(run.text)
        if run.is_learned:
            text = before + text.replace("\n", f"{_NEWLINE[0]}{after}\n{before}" if colour else _NEWLINE) + after
        parts.append(text)
    warnings = "".join(f"warning: {warning}\n" for warning in example.warnings)
    return f"--- {example.headline} ---\n{warnings}{''.join(parts)}\n"


def _html_text(example: ExamplePreview) -> str:
    parts = []
    for run in example.runs:
        text = html.escape(_spell_out(run.text))
        if run.is_learned:
            text = '<mark style="background:#a6e9b5;color:#000">' + text.replace("\n", _NEWLINE) + "</mark>"
        parts.append(text)
    warnings = "".join(f'<p style="color:#b00020">Warning: {html.escape(warning)}</p>' for warning in example.warnings)
    return (
        f"<p><b>{html.escape(example.headline)}</b></p>{warnings}"
        f'<pre style="white-space:pre-wrap;border:1px solid #ccc;padding:0.5em">{"".join(parts)}</pre>'
    )
