"""Refuse templates that leave out, in silence, part of what they were given: tools, tool calls, reasoning, whole turns.

A cheap look for the text comes first. Where it finds nothing, the conversation is rendered once more with that part
changed; a template that then writes the same text did not use the part.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hf_megapack.data.formats import Conversation
from hf_megapack.errors import DataError

_MARK = "Zq7x"


class Renderer(Protocol):
    """What can render a conversation; `ChatTemplate` does."""

    name: str

    def render(self, conversation: Conversation, row: int) -> str:
        """Return the rendered text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletenessCheck:
    """One render, to be checked against the conversation that it was made from.

    Attributes:
        template: What rendered the text.
        conversation: What was rendered.
        text: The render.
        spans: Character spans of the assistant turns that are learned.
        row: Row for error messages.
    """

    template: Renderer
    conversation: Conversation
    text: str
    spans: Mapping[int, Sequence[tuple[int, int]]]
    row: int

    def run(self, *, first: int) -> None:
        """Check the tools, each turn's text and tool calls, and the reasoning of learned turns.

        Args:
            first: First message to check; earlier ones were checked in a shorter render.

        Raises:
            DataError: If the template left something out; names it, with row and turn.
        """
        tools = self.conversation.tools
        if tools and not any(_as_json(tool) in self.text for tool in tools):
            self._refuse_if_unused(replace(self.conversation, tools=None), None, "every one of the given tools")
        for turn, message in enumerate(self.conversation.messages[first:], first):
            content = message["content"]
            if content.strip() not in self.text:
                self._refuse_if_unchanged(turn, {"content": f"{content} {_MARK}"}, "the text of this turn")
            self._check_reasoning(turn, message)
            for position in range(len(message.get("tool_calls", ()))):
                self._check_call(turn, message, position)

    def _check_reasoning(self, turn: int, message: dict[str, Any]) -> None:
        if turn not in self.spans:
            return
        content, reasoning, changes = message["content"], message.get("reasoning_content"), {}
        if isinstance(reasoning, str):
            changes = {"reasoning_content": reasoning + _MARK}
        elif "</think>" in content:
            reasoning = content.split("</think>")[0].split("<think>")[-1]
            changes = {"content": content.replace("</think>", f"{_MARK}</think>", 1)}
        if changes and reasoning.strip() not in self._shown(turn):
            self._refuse_if_unchanged(turn, changes, 'the reasoning of this turn (try assistant_mask="each")')

    def _check_call(self, turn: int, message: dict[str, Any], position: int) -> None:
        calls = message["tool_calls"]
        call = calls[position]
        function = call.get("function", call)
        name, arguments = function["name"], function["arguments"]
        shown = self._shown(turn)
        altered = {}
        if name not in shown:
            altered["name"] = {"name": name + _MARK}
        if _as_json(arguments) not in shown:
            altered["arguments"] = {"arguments": {**arguments, _MARK: _MARK}}
        for part, change in altered.items():
            changed = {**function, **change}
            changed_call = {**call, "function": changed} if "function" in call else changed
            changes = {"tool_calls": [*calls[:position], changed_call, *calls[position + 1 :]]}
            self._refuse_if_unchanged(turn, changes, f"the {part} of tool call {name!r}")

    def _shown(self, turn: int) -> str:
        """Return the part of the render in which a turn should be: its spans if it is learned, else all of it."""
        return "".join(self.text[start:end] for start, end in self.spans.get(turn, ())) or self.text

    def _refuse_if_unchanged(self, turn: int, changes: dict[str, Any], what: str) -> None:
        messages = list(self.conversation.messages)
        messages[turn] = {**messages[turn], **changes}
        self._refuse_if_unused(replace(self.conversation, messages=messages), turn, what)

    def _refuse_if_unused(self, changed: Conversation, turn: int | None, what: str) -> None:
        """Raise if a conversation that differs in one part renders to the same text."""
        try:
            is_unused = self.template.render(changed, self.row) == self.text
        except DataError:
            return  # The template looked at the part closely enough to refuse the changed one.
        if is_unused:
            role = "" if turn is None else f", turn {turn} ({self.conversation.messages[turn]['role']})"
            raise DataError(
                f"row {self.row}{role}: the chat template of {self.template.name} leaves out {what}, so it would be "
                f"missing from training; pass chat_template= a template that renders it, or remove it from the data"
            )


def _as_json(value: Any) -> str:
    """Return the JSON form that most templates write."""
    return json.dumps(value, ensure_ascii=False)
