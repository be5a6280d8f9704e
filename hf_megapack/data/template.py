"""Render a conversation with its chat template and find which characters each assistant turn contributed.

The invariant: a span never reaches outside its assistant turn. Spans come from the template's generation tags, checked
against the messages, or from prefix rendering; where neither proves the span, the row is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

from hf_megapack.data.completeness import CompletenessCheck
from hf_megapack.data.encoding import common_length
from hf_megapack.data.formats import Conversation
from hf_megapack.data.habits import PROBE, TemplateHabits
from hf_megapack.data.refusals import advice, changed_text
from hf_megapack.data.regions import Span
from hf_megapack.data.rendering import TemplateRenderer
from hf_megapack.data.tags import spans_hold_their_turns
from hf_megapack.errors import ConfigError, DataError

# Turns x messages of a conversation in which every learned turn is rendered as a prefix of its own.
_MAX_PREFIX_WORK = 40_000
_PREFIXES_OF_LONG_CONVERSATION = 32


class ChatTemplate:
    """A chat template that says, for each assistant turn, which characters of the render it contributed.

    Args:
        renderer: The template.
        end_tokens: Texts of the tokenizer's special tokens; one of them ends a turn.
    """

    def __init__(self, renderer: TemplateRenderer, *, end_tokens: Sequence[str]) -> None:
        self._renderer = renderer
        self._habits = TemplateHabits(self._renderer)
        self._end_tokens = tuple(sorted(end_tokens))
        self._end_token = re.compile("|".join(map(re.escape, self._end_tokens)) or "(?!)")
        self.name = renderer.name

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
        if self._renderer.has_tags:
            text, spans = self._tagged_spans(conversation, row, is_single_turn=False)
            self._check_every_turn_found(turns, spans, row)
            if self._tags_hold_prompt:
                spans = self._after_prompts(conversation, text, spans, turns, row)
        else:
            text = self._renderer.render(conversation, row)
            spans = {turn: [span] for turn, span in self._prefix_spans(conversation, text, turns, row).items()}
        self._check_every_turn_found(turns, spans, row)
        spans = {turn: spans[turn] for turn in turns}
        self._check_complete(conversation, text, spans, row)
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
        context = replace(conversation, messages=conversation.messages[: turn + 1], trained_turns=())
        text, spans = self._answer(context, row)
        # Only learned turns have had a shorter render of their own.
        first = max((before + 1 for before in conversation.trained_turns if before < turn), default=0)
        self._check_complete(context, text, {turn: spans}, row, first=first)
        return text, spans

    def verify(self) -> str | None:
        """Try the template on a made-up conversation.

        Returns:
            A remark when no special token ends a learned turn, so that the model may not learn to stop; else None.

        Raises:
            ConfigError: If the template's generation tags reach outside an assistant turn, or its loops do not end.
        """
        try:
            self._renderer.regions(PROBE, 0, "")
        except DataError as error:
            raise ConfigError(f"the chat template of {self.name} cannot be used: {error}") from error
        try:
            text, tags = self._renderer.render_tagged(PROBE, 0)
            if self._renderer.has_tags:
                bounds = [self._turn_bounds(PROBE, text, turn, 0, {}) for turn in (1, 3)]
            else:
                bounds = tags = [self._prefix_span(PROBE, text, 3, 0)]
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

    # Generation tags.

    @cached_property
    def _tags_hold_prompt(self) -> bool:
        """Whether the generation tags include control tokens that the generation prompt has written already."""
        try:
            text, tags = self._renderer.render_tagged(PROBE, 0)
            return bool(tags) and self._after_prompt(PROBE, text, tags[-1:], 3, 0, is_exact=False) != tags[-1:]
        except DataError:
            return False

    def _tagged_spans(
        self, conversation: Conversation, row: int, *, is_single_turn: bool
    ) -> tuple[str, dict[int, list[Span]]]:
        """Return the render and the tagged spans of each assistant turn, proved to lie inside their turns."""
        text, tags = self._renderer.render_tagged(conversation, row)
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(tags) == len(turns) and spans_hold_their_turns(text, tags, conversation.messages, self._end_token):
            return text, {turn: [tag] for turn, tag in zip(turns, tags, strict=True)}
        regions = self._renderer.regions(conversation, row, text)
        spans: dict[int, list[Span]] = {}
        placed = 0
        for turn in turns:
            low, high = self._turn_bounds(conversation, text, turn, row, regions)
            if turn + 1 == len(conversation.messages) and not self._end_token.sub("", text[high:]).strip():
                high = len(text)  # Control tokens that close the conversation belong to the turn that ends it.
            spans[turn] = [tag for tag in tags if low <= tag[0] and tag[1] <= high]
            placed += len(spans[turn])
        if placed != len(tags):
            raise DataError(
                f"row {row}: generation tags in the chat template of {self.name} mark text outside assistant turns; "
                f"{advice(is_single_turn)}"
            )
        return text, spans

    def _turn_bounds(
        self, conversation: Conversation, text: str, turn: int, row: int, regions: Mapping[int, Span]
    ) -> Span:
        """Return where a turn begins (its header included) and ends: its region, else proved by prefix rendering."""
        if turn in regions:
            return regions[turn]
        start = self._prefix_length(conversation, text, turn, row, turn) if turn else 0
        if turn + 1 == len(conversation.messages):
            return start, len(text)
        return start, self._prefix_length(conversation, text, turn + 1, row, turn)

    def _after_prompt(
        self, conversation: Conversation, text: str, spans: list[Span], turn: int, row: int, *, is_exact: bool = True
    ) -> list[Span]:
        """Take what the generation prompt writes out of a turn's tagged spans.

        Where the prompt and the conversation part, only the control tokens before that point are the prompt's; not
        `is_exact` asks for those alone.
        """
        if not spans or (turn == 0 and not self._habits.headers):
            return spans
        start = cut = spans[0][0]
        if turn:
            prompt = self._renderer.render(conversation, row, stop=turn, prompt=True)
        else:
            prompt = self._habits.first_prompt(text[:start])
        shared = common_length(text, prompt)
        if is_exact and shared == len(prompt):
            cut = shared
        while match := self._end_token.match(text, cut):
            if match.end() > shared:
                break
            cut = match.end()
        return [(max(begin, cut), end) for begin, end in spans if end > cut] if cut > start else spans

    def _after_prompts(
        self, conversation: Conversation, text: str, spans: dict[int, list[Span]], turns: Sequence[int], row: int
    ) -> dict[int, list[Span]]:
        """Take the generation prompt out of each turn's tagged spans, in long conversations by example."""
        is_long = len(turns) * len(conversation.messages) > _MAX_PREFIX_WORK
        cut: dict[str, str] = {}
        result = {}
        for turn in turns:
            before = conversation.messages[turn - 1]["role"] if turn else ""
            start = spans[turn][0][0]
            if is_long and before in cut and text.startswith(cut[before], start):
                first = start + len(cut[before])
                result[turn] = [(max(begin, first), end) for begin, end in spans[turn] if end > first]
            else:
                result[turn] = self._after_prompt(conversation, text, spans[turn], turn, row)
                cut[before] = text[start : result[turn][0][0]] if result[turn] else ""
        return result

    # Prefix rendering.

    def _prefix_spans(self, conversation: Conversation, text: str, turns: Sequence[int], row: int) -> dict[int, Span]:
        """Return what each turn contributed to the render of a whole conversation."""
        messages = conversation.messages
        if len(turns) * len(messages) <= _MAX_PREFIX_WORK:
            return {turn: self._prefix_span(conversation, text, turn, row) for turn in turns}
        # Rendering every prefix takes time that grows with the square of the length. The text of every turn is
        # located all the same; that adding messages changes nothing is tried on some of the turns.
        after = {turn: messages[turn - 1]["role"] if turn else "" for turn in turns}
        some = {role: turn for turn, role in reversed(after.items())}
        tried = {*some.values(), *turns[:: -(-len(turns) // _PREFIXES_OF_LONG_CONVERSATION)], turns[-1]}
        regions = self._renderer.regions(conversation, row, text)
        spans, headers = {}, {}
        for turn in sorted(tried):
            spans[turn] = self._prefix_span(conversation, text, turn, row)
            headers[after[turn]] = text[regions[turn][0] : spans[turn][0]] if turn in regions else None
        for turn in turns:
            if turn not in spans:
                header = headers[after[turn]]
                if turn not in regions or header is None or not text.startswith(header, regions[turn][0]):
                    raise DataError(
                        f"row {row}, turn {turn}: {len(messages):,} messages are too many to find this turn with the "
                        f"chat template of {self.name}; {advice(True)}, or split the conversation"
                    )
                spans[turn] = self._trim(text, regions[turn][0] + len(header), regions[turn][1])
        return spans

    def _prefix_span(self, conversation: Conversation, text: str, turn: int, row: int) -> Span:
        """Return what follows the generation prompt, up to and including the turn's end token."""
        start = self._answer_start(conversation, text, turn, row)
        if start is None:
            self._refuse_changed_text(conversation, text, turn, row)
        return self._answer_span(conversation, text, turn, row, start)

    def _answer_span(self, conversation: Conversation, text: str, turn: int, row: int, start: int) -> Span:
        """Return the span of an answer that begins at `start`."""
        end = len(text)
        if turn + 1 < len(conversation.messages):
            end = self._turn_end(conversation, text, turn, row)
        elif self._habits.writes_behind_last_turn:
            end = self._renderer.regions(conversation, row, text).get(turn, (0, end))[1]
        start, end = self._trim(text, start, end)
        self._check_ends_once(conversation, text[start:end], turn, row)
        return start, end

    def _answer_start(self, conversation: Conversation, text: str, turn: int, row: int) -> int | None:
        """Return where the generation prompt before a turn ends in the render, None if that is no prefix of it."""
        if turn == 0:
            # No generation prompt can be rendered before the first message: find the one that all turns have.
            for start in self._first_turn_starts(conversation, text, row):
                for header in self._habits.headers:
                    if text.startswith(header, start):
                        return start + len(header)
            raise DataError(
                f"row {row}, turn 0: nothing comes before this assistant turn, and where it begins cannot be told from "
                f"the chat template of {self.name}; mark it train: false, or {advice(True)}"
            )
        for invitation in self._renderer.invitations:
            prompt = self._renderer.render(conversation, row, stop=turn, prompt=True, invitation=invitation)
            if text.startswith(prompt):
                return len(prompt)
        return None

    def _first_turn_starts(self, conversation: Conversation, text: str, row: int) -> list[int]:
        """Return where the first turn's header may begin: with its region, or behind a begin-of-text token there."""
        region = self._renderer.regions(conversation, row, text).get(0)
        begin = self._renderer.begin_token
        if region is None:
            return []
        behind = [region[0] + len(begin)] if begin and text.startswith(begin, region[0]) else []
        return [region[0], *behind]

    def _turn_end(self, conversation: Conversation, text: str, turn: int, row: int) -> int:
        """Return where a turn ends in the render, which must show it as if it were the last."""
        alone = self._renderer.render(conversation, row, stop=turn + 1)
        if text.startswith(alone):
            return len(alone)
        here = self._renderer.regions(conversation, row, text).get(turn)
        there = self._renderer.regions(conversation, row, alone, stop=turn + 1).get(turn)
        if here is None or here != there or text[: here[1]] != alone[: here[1]]:
            self._refuse_changed_text(conversation, text, turn, row)
        return here[1]

    def _trim(self, text: str, start: int, end: int) -> Span:
        """Leave out what follows the end token, if that is only whitespace."""
        body = text[start:end].rstrip()
        return (start, start + len(body)) if body.endswith(self._end_tokens) else (start, end)

    def _prefix_length(self, conversation: Conversation, text: str, stop: int, row: int, turn: int) -> int:
        """Return the length of the render of the first `stop` messages, which must be a prefix of `text`."""
        prefix = self._renderer.render(conversation, row, stop=stop)
        if not text.startswith(prefix):
            self._refuse_changed_text(conversation, text, turn, row)
        return len(prefix)

    # One turn as the answer.

    def _answer(self, context: Conversation, row: int) -> tuple[str, list[Span]]:
        """Return the text in which the last message is the answer to all others, and what it contributed."""
        turn = len(context.messages) - 1
        if self._renderer.has_tags:
            text, spans = self._tagged_spans(context, row, is_single_turn=True)
            self._check_every_turn_found([turn], spans, row)
            cropped = {turn: self._after_prompt(context, text, spans[turn], turn, row)}
            self._check_every_turn_found([turn], cropped, row)
            return text, cropped[turn]
        text = self._renderer.render(context, row)
        start = self._answer_start(context, text, turn, row)
        if start is None:
            return self._join_prompt_and_answer(context, text, row)
        return text, [self._answer_span(context, text, turn, row, start)]

    def _join_prompt_and_answer(self, context: Conversation, text: str, row: int) -> tuple[str, list[Span]]:
        """Put the answer behind the generation prompt, for templates that change earlier text once the answer is there.

        Between them stands the header: the prompt's last part, with which the turn's region begins too.
        """
        turn = len(context.messages) - 1
        region = self._renderer.regions(context, row, text).get(turn)
        if region is not None and self._is_independent(context, text[slice(*region)], row):
            for invitation in self._renderer.invitations:
                header = self._habits.header(context, turn, row, invitation)
                if header is not None and text.startswith(header, region[0]):
                    prompt = self._renderer.render(context, row, stop=turn, prompt=True, invitation=invitation)
                    joined = prompt + text[region[0] + len(header) : region[1]]
                    span = self._trim(joined, len(prompt), len(joined))
                    self._check_ends_once(context, joined[slice(*span)], turn, row)
                    return joined, [span]
        return self._refuse_changed_text(context, text, turn, row)

    def _is_independent(self, context: Conversation, answer: str, row: int) -> bool:
        """Tell whether the last turn's region stays the same when every other message says something else."""
        others = [{**message, "content": f"{message['content']} {answer[:1]}?"} for message in context.messages[:-1]]
        changed = replace(context, messages=[*others, context.messages[-1]])
        try:
            text = self._renderer.render(changed, row)
        except DataError:
            return False
        region = self._renderer.regions(changed, row, text).get(len(others))
        return region is not None and text[slice(*region)] == answer

    # Refusals.

    def _refuse_changed_text(self, conversation: Conversation, text: str, turn: int, row: int) -> NoReturn:
        """Say how the template changes text between a conversation that ends at a turn and a longer one."""
        render = self._renderer.render
        raise changed_text(
            text,
            before=render(conversation, row, stop=turn) if turn else "",
            prompt=render(conversation, row, stop=turn, prompt=True) if turn else "",
            alone=render(conversation, row, stop=turn + 1),
            is_last=turn + 1 == len(conversation.messages),
            where=f"row {row}, turn {turn}",
            name=self.name,
        )

    def _check_ends_once(self, conversation: Conversation, body: str, turn: int, row: int) -> None:
        """Refuse a turn that holds its end token more often than its message does."""
        end = next((token for token in self._end_tokens if token and body.endswith(token)), None)
        if end is not None and body.count(end) > 1 + str(conversation.messages[turn]).count(end):
            raise DataError(
                f"row {row}, turn {turn}: the chat template of {self.name} ends this turn with {end} more than once, "
                f"and the model would stop at the first; {advice(True)}, or split the turn in two"
            )

    def _check_complete(
        self, conversation: Conversation, text: str, spans: dict[int, list[Span]], row: int, first: int | None = None
    ) -> None:
        def render(changed: Conversation) -> str:
            return self._renderer.render(changed, row) if first is None else self._answer(changed, row)[0]

        check = CompletenessCheck(
            render=render,
            name=self.name,
            conversation=conversation,
            text=text,
            spans=spans,
            row=row,
            habits=self._habits.text,
        )
        check.run(first=first or 0)

    def _check_every_turn_found(self, turns: Sequence[int], spans: dict[int, list[Span]], row: int) -> None:
        for turn in turns:
            if not spans.get(turn):
                raise DataError(
                    f"row {row}, turn {turn}: the generation tags in the chat template of {self.name} mark nothing of "
                    f"this assistant turn; mark it train: false or use a template that tags it"
                )
