"""Turn raw rows into tokenized examples with a loss mask: the `Dataset.map` transform of the package.

The invariant: every example that leaves here has at least one token to learn, and no token of a user, system or tool
turn is one. Nothing is dropped or cut without being counted. Labels are not shifted here.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from datasets import List, Value
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from hf_megapack.data.beside import COLUMNS as COLUMNS_BESIDE
from hf_megapack.data.beside import TOKEN_COLUMNS
from hf_megapack.data.encoding import TextEncoder
from hf_megapack.data.formats import (
    FORMATS,
    Conversation,
    ReadyTokens,
    TextPair,
    check_unicode,
    read_row,
    recognise_format,
)
from hf_megapack.data.lengths import LengthPolicy, Outcome, log_outcomes
from hf_megapack.data.masks import mask_tokens, split_edges, token_extents
from hf_megapack.data.refusals import check_size_of_each, set_template
from hf_megapack.data.rendering import TemplateRenderer
from hf_megapack.data.tags import check_tags_are_counted
from hf_megapack.data.template import ChatTemplate, Span
from hf_megapack.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

ASSISTANT_MASKS = ("all", "last", "each")
COLUMNS = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("uint8")),
    "conversation_id": Value("int64"),
    "turn": Value("int32"),
}

# Bump when the same row would give other tokens, another mask or an error, so that cached maps are not reused.
_TRANSFORM_VERSION = 7
_CHARACTERS_PER_CALL = 2_000_000
# Templates with variables of their own that are kept; rows usually have a few settings, such as thinking or not.
_MOST_TEMPLATES = 64


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class TokenizedExample:
    """One training example.

    Attributes:
        input_ids: int32, shape (num_tokens,); empty when the example was dropped.
        loss_mask: uint8, shape (num_tokens,), unshifted; index 0 is 0, because nothing predicts it.
        conversation_id: Row that the example came from.
        turn: The only supervised message, or -1 when the example is not one turn of several.
        outcome: What the length policy did.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    conversation_id: int
    turn: int
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """Rendered text waiting to be tokenized; `is_chat` when it came from a template, which writes its own specials."""

    text: str
    spans: Sequence[Span]
    row: int
    turn: int
    is_chat: bool
    has_other_turns: bool


class ChatTransform:
    """Tokenize conversations and mark what is learned; pass it to `Dataset.map` with `batched` and `with_indices`.

    It keeps its own copy of the tokenizer's tables, so pickles and map fingerprints depend on the template's text, the
    tokenizer and the options alone.

    Args:
        tokenizer: A fast tokenizer.
        assistant_mask: "all" learns every assistant turn of a row, "last" the last one, "each" makes one example per
            assistant turn, rendered as the model sees it when that turn is the answer.
        max_length: Most tokens that an example may have, or None.
        overlong: What happens to longer examples: "error", "drop", "truncate_left" (the end is kept) or
            "truncate_right".
        chat_template: Template text to use in place of the tokenizer's own.
        limit_name: What sets `max_length`, for messages.
        vocab_size: Tokens that the model knows; None if that is not known.

    Attributes:
        limit_name: As given.

    Raises:
        ConfigError: If an argument has a value that is not allowed, or the template's generation tags are wrong.
    """

    def __init__(  # noqa: PLR0913 - each is an option of its own
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        assistant_mask: str = "all",
        max_length: int | None = None,
        overlong: str = "error",
        chat_template: str | None = None,
        limit_name: str = "max_length",
        vocab_size: int | None = None,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"a fast tokenizer (one that reports character offsets) is needed, got {type(tokenizer).__name__}"
            )
        if assistant_mask not in ASSISTANT_MASKS:
            raise ConfigError(f"assistant_mask must be one of {ASSISTANT_MASKS}, got {assistant_mask!r}")
        template = chat_template if chat_template is not None else tokenizer.chat_template
        if isinstance(template, dict):
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has several chat templates ({', '.join(template)}); "
                f"{set_template('the text of one')}"
            )
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if template is not None:
            check_tags_are_counted(template, repr(name))
        specials = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        self.__setstate__(
            {
                "version": _TRANSFORM_VERSION,
                "tokenizer": backend.to_str(),
                "tokenizer_name": name,
                "special_tokens": specials,
                "chat_template": template,
                "assistant_mask": assistant_mask,
                "max_length": max_length,
                "overlong": overlong,
                "limit_name": limit_name,
                "vocab_size": vocab_size,
            }
        )
        if self._template is not None and (remark := self._template.verify()):
            logger.warning(remark)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options = {key: value for key, value in state.items() if key != "tokenizer"}
        self._encoder = TextEncoder(state["tokenizer"])
        self._name = repr(state["tokenizer_name"])
        self._assistant_mask = state["assistant_mask"]
        self.limit_name = state["limit_name"]
        self._vocab_size = state["vocab_size"]
        self._lengths = LengthPolicy(**{key: state[key] for key in ("max_length", "overlong", "limit_name")})
        eos = state["special_tokens"].get("eos_token")
        self._eos_id = None if eos is None else self._encoder.backend.token_to_id(eos)
        self._template = None if state["chat_template"] is None else self._make_template({})
        self._templates: dict[str, ChatTemplate] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self._options, "tokenizer": self._encoder.backend.to_str()}

    def __call__(
        self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int], *, report_outcomes: bool = False
    ) -> dict[str, list[Any]]:
        """Transform a batch of rows; "each" gives more rows than it takes, "drop" fewer.

        Args:
            batch: Column name -> values.
            indices: Position of each row in the dataset.
            report_outcomes: Whether to add a column `outcome` and keep dropped examples, with no tokens, so that the
                caller can count them. Otherwise the counts are logged.

        Returns:
            The columns `input_ids`, `loss_mask`, `conversation_id`, `turn`.

        Raises:
            DataError: If a row cannot be learned as it stands; names row and turn.
        """
        format_name = recognise_format(batch.keys())
        names = [
            name for group in (*FORMATS[format_name], COLUMNS_BESIDE, TOKEN_COLUMNS) for name in group if name in batch
        ]
        columns = [batch[name] for name in names]
        rows = (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        examples = list(self.tokenize(rows, indices, format_name=format_name))
        if not report_outcomes:
            log_outcomes([example.outcome for example in examples])
            examples = [example for example in examples if example.outcome < Outcome.DROPPED]
        result: dict[str, list[Any]] = {name: [getattr(example, name) for example in examples] for name in COLUMNS}
        if report_outcomes:
            result["outcome"] = [int(example.outcome) for example in examples]
        return result

    def tokenize(
        self, rows: Iterable[Mapping[str, Any]], indices: Iterable[int], *, format_name: str
    ) -> Iterator[TokenizedExample]:
        """Yield the examples of some rows, in order; dropped ones without tokens.

        Args:
            rows: Rows as dicts.
            indices: Position of each row in the dataset.
            format_name: A key of `FORMATS`.

        Yields:
            One example per row, or per assistant turn.

        Raises:
            DataError: If a row cannot be learned as it stands; names row and turn.
        """
        waiting: list[_Draft] = []
        num_characters = 0
        for row, index in zip(rows, indices, strict=True):
            parsed = read_row(format_name, row, index)
            if isinstance(parsed, ReadyTokens):
                yield self._finish(
                    parsed.input_ids, parsed.loss_mask, parsed.conversation_id, parsed.turn, f"row {index}"
                )
                continue
            for draft in self._drafts(parsed, index):
                check_unicode(draft.text, f"row {index}")
                waiting.append(draft)
                num_characters += len(draft.text)
                if num_characters > _CHARACTERS_PER_CALL:
                    yield from self._tokenize_drafts(waiting)
                    waiting, num_characters = [], 0
        yield from self._tokenize_drafts(waiting)

    def _drafts(self, parsed: Conversation | TextPair, row: int) -> Iterator[_Draft]:
        """Yield the rendered examples of one row."""
        if isinstance(parsed, TextPair):
            if self._eos_id is None:
                raise ConfigError(
                    f"text, and prompt and completion as text, end with a learned end-of-text token, but tokenizer "
                    f"{self._name} has no eos_token; set tokenizer.eos_token to the token that ends a text, or give "
                    f"input_ids and loss_mask"
                )
            text = parsed.prompt + parsed.completion
            span = (len(parsed.prompt), len(text))
            yield _Draft(text=text, spans=[span], row=row, turn=-1, is_chat=False, has_other_turns=bool(parsed.prompt))
            return
        if self._template is None:
            raise ConfigError(f"tokenizer {self._name} has no chat template; {set_template('one')}")
        template = self._template_of(parsed)
        turns = self._learned_turns(parsed, row)
        has_other_turns = any(message["role"] != "assistant" for message in parsed.messages)
        if self._assistant_mask == "each":
            check_size_of_each(parsed, turns, row)
            for turn in turns:
                text, spans = template.turn_spans(parsed, turn, row)
                yield _Draft(text=text, spans=spans, row=row, turn=turn, is_chat=True, has_other_turns=turn > 0)
        else:
            text, by_turn = template.conversation_spans(parsed, turns, row)
            spans = [span for turn in turns for span in by_turn[turn]]
            yield _Draft(text=text, spans=spans, row=row, turn=-1, is_chat=True, has_other_turns=has_other_turns)

    def _make_template(self, variables: Mapping[str, Any]) -> ChatTemplate:
        renderer = TemplateRenderer(
            self._options["chat_template"],
            special_tokens=self._options["special_tokens"],
            name=self._name,
            variables=variables,
        )
        return ChatTemplate(renderer, end_tokens=self._encoder.special_tokens)

    def _template_of(self, parsed: Conversation) -> ChatTemplate:
        """Return the template with the variables of a row."""
        variables = parsed.template_kwargs
        if not variables:
            return self._template
        key = repr(sorted(variables.items(), key=itemgetter(0)))
        if key not in self._templates:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[key] = self._make_template(variables)
        return self._templates[key]

    def _learned_turns(self, conversation: Conversation, row: int) -> Sequence[int]:
        turns = conversation.trained_turns
        if self._assistant_mask == "last":
            assistants = [
                index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"
            ]
            turns = tuple(turn for turn in turns if turn == assistants[-1])
        if not turns:
            roles = {message["role"] for message in conversation.messages}
            raise DataError(
                f"row {row}: no assistant turn is left to learn (assistant_mask={self._assistant_mask!r}, and turns "
                f"with train: false or weight: 0 are not learned; roles here: {', '.join(sorted(roles))}); remove the "
                f"row or change its flags"
            )
        return turns

    def _tokenize_drafts(self, drafts: Sequence[_Draft]) -> Iterator[TokenizedExample]:
        if not drafts:
            return
        # One dataset has one format, so drafts of one call all come from a template or all from plain text.
        texts = [draft.text for draft in drafts]
        encoded = self._encoder.encode(texts, add_special_tokens=not drafts[0].is_chat)
        for draft, (ids, offsets) in zip(drafts, encoded, strict=True):
            where = f"row {draft.row}" if draft.turn < 0 else f"row {draft.row}, turn {draft.turn}"
            ids, offsets = self._take_apart(draft, ids, offsets, where)
            mask = mask_tokens(draft.text, token_extents(draft.text, offsets), draft.spans)
            if not draft.is_chat:
                ids, mask = self._end_text(ids, mask)
            if draft.has_other_turns and mask.all():
                raise DataError(f"{where}: every token would be learned although there are other turns; check the tags")
            yield self._finish(ids, mask, draft.row, draft.turn, where)

    def _take_apart(
        self, draft: _Draft, ids: np.ndarray, offsets: np.ndarray, where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize what is learned apart from the rest, where one token would hold text of both."""
        extents = token_extents(draft.text, offsets)
        for is_strict in (True, False):
            edges = split_edges(draft.text, extents, draft.spans, is_strict=is_strict)
            if not edges:
                return ids, offsets
            pieces = self._encoder.encode_pieces(draft.text, edges, add_special_tokens=not draft.is_chat)
            if pieces is not None:
                return pieces
        at = edges[0]
        raise DataError(
            f"{where}: a token of {self._name} holds both text to learn and other text, around "
            f"{draft.text[max(at - 20, 0) : at + 20]!r}; put a control token between them in the template"
        )

    def _end_text(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make plain text end with a learned end-of-text token."""
        if not len(ids) or ids[-1] != self._eos_id:
            ids = np.append(ids, np.int32(self._eos_id))
            mask = np.append(mask, np.uint8(0))
        mask[-1] = 1
        return ids, mask

    def _finish(
        self, ids: np.ndarray, mask: np.ndarray, conversation_id: int, turn: int, where: str
    ) -> TokenizedExample:
        if self._vocab_size is not None and len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            token = self._encoder.backend.id_to_token(largest)
            raise DataError(
                f"{where}: token id {largest}{'' if token is None else f' ({token!r})'} is none of the model's, which "
                f"knows {self._vocab_size} tokens, ids 0 to {self._vocab_size - 1}. Use the model's own tokenizer, and "
                "add no tokens to it that the model has no embeddings for."
            )
        ids, mask, outcome = self._lengths.apply(ids, mask, where)
        return TokenizedExample(
            input_ids=ids, loss_mask=mask, conversation_id=conversation_id, turn=turn, outcome=outcome
        )
