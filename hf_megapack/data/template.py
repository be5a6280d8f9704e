"""Render a conversation with its chat template and find which characters each assistant turn contributed.

The invariant: a span never reaches outside its assistant turn. Spans come from the template's generation tags, checked
against the messages, or from prefix rendering; where neither proves the span, the row is refused.
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from hf_megapack.data.completeness import CompletenessCheck
from hf_megapack.data.formats import Conversation
from hf_megapack.errors import ConfigError, DataError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]


class ChatTemplate:
    """A chat template that says, for each assistant turn, which characters of the render it contributed.

    Args:
        text: The Jinja template.
        special_tokens: Variables such as `bos_token` that templates read.
        end_tokens: Texts of the tokenizer's special tokens; one of them ends a turn.
        name: Tokenizer name for error messages.
    """

    def __init__(self, text: str, *, special_tokens: dict[str, str], end_tokens: Sequence[str], name: str) -> None:
        self.text = text
        self.has_tags = _GENERATION_TAG.search(text) is not None
        self._special_tokens = special_tokens
        self._end_tokens = tuple(sorted(end_tokens))
        self._end_token = re.compile("|".join(map(re.escape, self._end_tokens)) or "(?!)")
        self.name = name

    def render(self, conversation: Conversation, row: int, *, stop: int | None = None, prompt: bool = False) -> str:
        """Render the messages before `stop` (all of them for None), with the generation prompt if `prompt`.

        Args:
            conversation: What to render.
            row: Row for error messages.
            stop: Number of messages to render.
            prompt: Whether to ask for the text that invites an assistant turn.

        Returns:
            The rendered text.

        Raises:
            DataError: If the template raises; names the first turn at which it does.
        """
        return self._render(conversation, row, stop, prompt)[0]

    def conversation_spans(
        self, conversation: Conversation, turns: Sequence[int], row: int
    ) -> tuple[str, dict[int, list[Span]]]:
        """Render a whole conversation and locate what some of its assistant turns contributed.

        Args:
            conversation: What to render.
            turns: Indices of the assistant messages to locate.
            row: Row for error messages.

        Returns:
            The text, and for each of `turns` its character spans, in order.

        Raises:
            DataError: If a span cannot be proved, or the template leaves out part of the conversation.
        """
        if self.has_tags:
            text, spans = self._tagged_spans(conversation, None, row)
        else:
            text = self.render(conversation, row)
            spans = {turn: [self._prefix_span(conversation, text, turn, row)] for turn in turns}
        self._check_every_turn_found(turns, spans, row)
        spans = {turn: spans[turn] for turn in turns}
        CompletenessCheck(template=self, conversation=conversation, text=text, spans=spans, row=row).run(first=0)
        return text, spans

    def turn_spans(self, conversation: Conversation, turn: int, row: int) -> tuple[str, list[Span]]:
        """Render a conversation up to one assistant turn, as the model sees it when that turn is the answer.

        Args:
            conversation: What to render.
            turn: Index of the assistant message that is learned.
            row: Row for error messages.

        Returns:
            The text that ends with the turn, and the turn's spans: nothing before the generation prompt's end.

        Raises:
            DataError: If the span cannot be proved, or the template leaves out part of the conversation.
        """
        context = Conversation(messages=conversation.messages[: turn + 1], tools=conversation.tools, trained_turns=())
        if self.has_tags:
            text, spans = self._tagged_spans(context, turn, row)
            self._check_every_turn_found([turn], spans, row)
            if turn and text.startswith(prompt := self.render(context, row, stop=turn, prompt=True)):
                spans[turn] = [(max(start, len(prompt)), end) for start, end in spans[turn] if end > len(prompt)]
                self._check_every_turn_found([turn], spans, row)
        else:
            text = self.render(context, row)
            spans = {turn: [self._prefix_span(context, text, turn, row)]}
        spans = {turn: spans[turn]}
        previous = [index for index in range(turn) if context.messages[index]["role"] == "assistant"]
        check = CompletenessCheck(template=self, conversation=context, text=text, spans=spans, row=row)
        check.run(first=previous[-1] + 1 if previous else 0)
        return text, spans[turn]

    def verify(self) -> str | None:
        """Try the template on a made-up conversation.

        Returns:
            A remark when no special token ends a learned turn, so that the model may not learn to stop; else None.

        Raises:
            ConfigError: If the template's generation tags reach outside an assistant turn.
        """
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": f"Probe{index}"} for index, role in enumerate(roles)]
        probe = Conversation(messages=messages, tools=None, trained_turns=(1, 3))
        try:
            text, tags = self._render(probe, 0, None, False)
            if self.has_tags:
                bounds = [self._turn_bounds(probe, text, turn, 0) for turn in (1, 3)]
            else:
                bounds = tags = [self._prefix_span(probe, text, 3, 0)]
        except DataError:
            return None  # The template wants other conversations than this one; its rows are checked one by one.
        if not all(any(low <= start and end <= high for low, high in bounds) for start, end in tags):
            raise ConfigError(f"generation tags in the chat template of {self.name} reach outside assistant turns")
        if tags and not self._end_token.search(text[slice(*tags[-1])]):
            return (
                f"no special token of {self.name} ends the assistant turns that its chat template lets the model "
                f"learn, so the model may not learn to stop"
            )
        return None

    def _render(self, conversation: Conversation, row: int, stop: int | None, prompt: bool) -> tuple[str, list[Span]]:
        """Return the text and the spans of its generation tags; an error of the template names row and turn."""
        messages = conversation.messages[:stop]
        try:
            return self._call_template(messages, conversation.tools, prompt)
        except Exception as error:
            turn = self._first_failing_turn(messages, conversation.tools, str(error))
            where = f"row {row}" if turn is None else f"row {row}, turn {turn} ({messages[turn]['role']})"
            raise DataError(
                f"{where}: the chat template of {self.name} cannot render this conversation: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _call_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
    ) -> tuple[str, list[Span]]:
        texts, tags = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.text,
            return_assistant_tokens_mask=self.has_tags,
            add_generation_prompt=prompt,
            **self._special_tokens,
        )
        return texts[0], [(start, end) for start, end in tags[0] if end > start] if self.has_tags else []

    def _first_failing_turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, problem: str
    ) -> int | None:
        """Return the last turn of the shortest prefix that fails in the same words, or None if no prefix does."""

        def fails(stop: int) -> bool:
            try:
                self._call_template(messages[:stop], tools, False)
            except Exception as error:
                return str(error) == problem
            return False

        low, high = 0, len(messages)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        return high - 1 if high and fails(high) else None

    def _tagged_spans(
        self, conversation: Conversation, only_turn: int | None, row: int
    ) -> tuple[str, dict[int, list[Span]]]:
        """Return the render and the tagged spans of each assistant turn, proved to lie inside their turns."""
        text, tags = self._render(conversation, row, None, False)
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(tags) == len(turns) and _spans_hold_their_turns(text, tags, conversation.messages, self._end_token):
            return text, {turn: [tag] for turn, tag in zip(turns, tags, strict=True)}
        spans: dict[int, list[Span]] = {}
        placed = 0
        for turn in turns:
            low, high = self._turn_bounds(conversation, text, turn, row)
            spans[turn] = [tag for tag in tags if low <= tag[0] and tag[1] <= high]
            placed += len(spans[turn])
        if placed != len(tags):
            raise DataError(
                f"row {row}: generation tags in the chat template of {self.name} mark text outside assistant turns; "
                f"{self._advice(only_turn is not None)}"
            )
        return text, spans

    def _turn_bounds(self, conversation: Conversation, text: str, turn: int, row: int) -> Span:
        """Return where a turn begins (its header included) and ends in the render, proved by prefix rendering."""
        start = self._prefix_length(conversation, text, turn, row, turn, prompt=False) if turn else 0
        if turn + 1 == len(conversation.messages):
            return start, len(text)
        return start, self._prefix_length(conversation, text, turn + 1, row, turn, prompt=False)

    def _prefix_span(self, conversation: Conversation, text: str, turn: int, row: int) -> Span:
        """Return what follows the generation prompt, up to and including the turn's end token."""
        if turn == 0:
            raise DataError(
                f"row {row}, turn 0: nothing comes before this assistant turn, so prefix rendering cannot find its "
                f"beginning with the chat template of {self.name}; {self._advice(True)}"
            )
        start = self._prefix_length(conversation, text, turn, row, turn, prompt=True)
        end = len(text)
        if turn + 1 < len(conversation.messages):
            end = self._prefix_length(conversation, text, turn + 1, row, turn, prompt=False)
        body = text[start:end].rstrip()
        if body.endswith(self._end_tokens):
            end = start + len(body)
        return start, end

    def _prefix_length(
        self, conversation: Conversation, text: str, stop: int, row: int, turn: int, *, prompt: bool
    ) -> int:
        """Return the length of the render of the first `stop` messages, which must be a prefix of `text`."""
        prefix = self.render(conversation, row, stop=stop, prompt=prompt)
        if text.startswith(prefix):
            return len(prefix)
        is_last = turn + 1 == len(conversation.messages)
        what = "the generation prompt" if prompt and is_last else "earlier text when messages are added"
        raise DataError(
            f"row {row}, turn {turn}: the chat template of {self.name} changes {what}, so what this turn contributed "
            f"cannot be told from one render; {self._advice(is_last)}"
        )

    def _check_every_turn_found(self, turns: Sequence[int], spans: dict[int, list[Span]], row: int) -> None:
        for turn in turns:
            if not spans.get(turn):
                raise DataError(
                    f"row {row}, turn {turn}: the generation tags in the chat template of {self.name} mark nothing of "
                    f"this assistant turn; mark it train: false or use a template that tags it"
                )

    @staticmethod
    def _advice(is_single_turn: bool) -> str:
        template = "pass chat_template= a training template, one with {% generation %} tags around assistant text"
        return template if is_single_turn else f'use assistant_mask="each", or {template}'


def _spans_hold_their_turns(
    text: str, spans: list[Span], messages: list[dict[str, Any]], end_token: re.Pattern[str]
) -> bool:
    """Tell whether each assistant text lies in a span of its own and every other text outside of all, in order.

    False means only that this quick look cannot tell.
    """
    cursor, used = 0, 0
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant":
            start, end = spans[used]
            found = text.find(content, start, end)
            if start < cursor or end > len(text) or found < 0:
                return False
            head, tail = text[start:found], text[found + len(content) : end]
            heads, tails = list(end_token.finditer(head)), list(end_token.finditer(tail))
            before = head[: heads[0].start()] if heads else ""
            after = tail[tails[-1].end() :] if tails else "" if "tool_calls" in message else tail
            # A second control token, or text beyond the one there is, may be the border of another turn.
            if len(heads) > 1 or len(tails) > 1 or before.strip() or after.strip():
                return False
            cursor, used = end, used + 1
        else:
            limit = spans[used][0] if used < len(spans) else len(text)
            found = text.find(content, cursor, limit)
            if found < 0:
                return False
            cursor = found + len(content)
    return True
