"""Refuse templates that leave out, in silence, part of what they were given: tools, tool calls, reasoning, whole turns.

A cheap look for the text comes first. Whatever it does not find is changed, each part by a mark of its own, and the
conversation is rendered once more: a mark that shows up proves its part. For a mark that does not, that part alone is
changed; a template that then writes the same text did not use it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_megapack.data.beside import CALL_KEYS, MESSAGE_KEYS, REASONING_KEYS, holds_something
from hf_megapack.data.formats import Conversation
from hf_megapack.data.refusals import set_template
from hf_megapack.errors import DataError

_MARK = "Zq7x"
# Longer texts do not turn up by chance in what a template writes of its own.
_MOST_CHANCE_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class _Suspect:
    """A part of a turn that the render does not show at first sight."""

    turn: int
    what: str
    # Returns the message with this part changed by a mark.
    change: Callable[[dict[str, Any], str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletenessCheck:
    """One render, to be checked against the conversation that it was made from.

    Attributes:
        render: Gives the text of a conversation as `text` was made; may raise DataError.
        name: Tokenizer name for error messages.
        conversation: What was rendered.
        text: The render.
        spans: Character spans of the assistant turns that are learned.
        row: Row for error messages.
        habits: What the template writes around a conversation of other words.
    """

    render: Callable[[Conversation], str]
    name: str
    conversation: Conversation
    text: str
    spans: Mapping[int, Sequence[tuple[int, int]]]
    row: int
    habits: str

    def run(self, *, first: int) -> None:
        """Check the tools, each turn's text, tool calls and keys that hold such, and the reasoning of learned turns.

        Args:
            first: First message to check; earlier ones were checked in a shorter render.

        Raises:
            DataError: If the template left something out; names it, with row and turn.
        """
        tools = self.conversation.tools
        if tools and not any(_as_json(tool) in self.text for tool in tools):
            self._refuse_if_unused(replace(self.conversation, tools=None), None, "every one of the given tools")
        suspects = []
        said = "\n".join(message["content"] for message in self.conversation.messages)
        beside = self._beside()
        for turn, message in enumerate(self.conversation.messages[first:], first):
            if self._is_hidden(message, said, beside):
                suspects.append(_Suspect(turn=turn, what="the text of this turn", change=_change_content))
            suspects += self._suspect_reasoning(turn, message)
            suspects += self._suspect_keys(turn, message)
            for position in range(len(message.get("tool_calls", ()))):
                suspects += self._suspect_call(turn, message, position)
        if suspects:
            self._judge(suspects)

    def _beside(self) -> str:
        """Return what the render may hold beside the texts of the turns."""
        keys = [{**message, "content": ""} for message in self.conversation.messages]
        given = [part for part in (self.conversation.tools, *keys) if part]
        return "\n".join([self.habits, *map(str, given), *_texts(keys)])

    def _is_hidden(self, message: dict[str, Any], said: str, beside: str) -> bool:
        """Tell whether a turn's text is not in the render as often as it was said, in other turns' text included.

        A text that may stand there for another reason, in a header or in the arguments of a call, counts as hidden.
        """
        content = message["content"].strip()
        if not content:
            return message["role"] != "assistant"
        return content in beside or self.text.count(content) < said.count(content)

    def _suspect_reasoning(self, turn: int, message: dict[str, Any]) -> list[_Suspect]:
        if turn not in self.spans:
            return []
        content, reasoning = message["content"], message.get("reasoning_content")
        if isinstance(reasoning, str):
            change, answer = _change_reasoning, content
        elif "</think>" in content:
            thought, answer = content.split("</think>", 1)
            reasoning, change = thought.split("<think>")[-1], _change_inline_reasoning
        else:
            return []
        reasoning = reasoning.strip()
        if not reasoning or (
            len(reasoning) > _MOST_CHANCE_CHARACTERS and self._shows_reasoning(turn, reasoning, answer)
        ):
            return []
        return [_Suspect(turn=turn, what="the reasoning of this turn", change=change)]

    def _shows_reasoning(self, turn: int, reasoning: str, answer: str) -> bool:
        """Tell whether a learned turn shows its reasoning, beside every time that answer and calls repeat it."""
        calls = "\n".join(_texts(self.conversation.messages[turn].get("tool_calls", [])))
        return self._shown(turn).count(reasoning) > answer.count(reasoning) + calls.count(reasoning)

    def _suspect_keys(self, turn: int, message: dict[str, Any]) -> list[_Suspect]:
        suspects = []
        for key in MESSAGE_KEYS:
            value = message.get(key)
            if not holds_something(value) or (key in REASONING_KEYS and turn not in self.spans):
                continue
            if not isinstance(value, str) or not self._is_repeated(turn, key, value.strip()):
                what = f"the key {key!r} of this turn ({MESSAGE_KEYS[key]})"
                suspects.append(_Suspect(turn=turn, what=what, change=_change_key(key)))
        return suspects

    def _is_repeated(self, turn: int, key: str, value: str) -> bool:
        """Tell whether a key repeats the turn's text, so that it is not lost; reasoning is no part of the answer."""
        content = self.conversation.messages[turn]["content"]
        if turn not in self.spans:
            return value in content
        return self._shows_reasoning(turn, value, content) if key in REASONING_KEYS else value in self._shown(turn)

    def _suspect_call(self, turn: int, message: dict[str, Any], position: int) -> list[_Suspect]:
        call = message["tool_calls"][position]
        function = call.get("function", call)
        name, arguments = function["name"], function["arguments"]
        # What is not learned may stand anywhere, and so may its text: every tool's name is in the list of tools.
        shown = self._shown(turn) if turn in self.spans else ""
        parts = [("name", name not in shown), ("arguments", _as_json(arguments) not in shown)]
        suspects = [
            _Suspect(turn=turn, what=f"the {part} of tool call {name!r}", change=_change_call(position, part))
            for part, is_suspect in parts
            if is_suspect
        ]
        for key in CALL_KEYS:
            # Under `function`, or beside it.
            for is_inside in (True, False) if "function" in call else (False,):
                value = (function if is_inside else call).get(key)
                if holds_something(value) and value != arguments:
                    what = f"the key {key!r} of tool call {name!r} (templates look for {CALL_KEYS[key]})"
                    suspects.append(_Suspect(turn=turn, what=what, change=_drop_from_call(position, key, is_inside)))
        return suspects

    def _shown(self, turn: int) -> str:
        """Return the part of the render in which a learned turn should be: its spans."""
        return "".join(self.text[start:end] for start, end in self.spans[turn]) or self.text

    def _judge(self, suspects: Sequence[_Suspect]) -> None:
        marks = [f"{_MARK}{index}e" for index in range(len(suspects))]
        messages = list(self.conversation.messages)
        for suspect, mark in zip(suspects, marks, strict=True):
            messages[suspect.turn] = suspect.change(messages[suspect.turn], mark)
        try:
            marked = self.render(replace(self.conversation, messages=messages))
        except DataError:
            marked = ""  # One of the changes is refused; each is tried alone.
        for suspect, mark in zip(suspects, marks, strict=True):
            if mark not in marked:
                messages = list(self.conversation.messages)
                messages[suspect.turn] = suspect.change(messages[suspect.turn], _MARK)
                self._refuse_if_unused(replace(self.conversation, messages=messages), suspect.turn, suspect.what)

    def _refuse_if_unused(self, changed: Conversation, turn: int | None, what: str) -> None:
        """Raise if a conversation that differs in one part renders to the same text."""
        try:
            is_unused = self.render(changed) == self.text
        except DataError:
            return  # The template looked at the part closely enough to refuse the changed one.
        if is_unused:
            if turn in self.spans and self._is_used_at_the_end(changed, turn):
                what += ' (try assistant_mask="each", which shows this turn as it is when it comes last)'
            role = "" if turn is None else f", turn {turn} ({self.conversation.messages[turn]['role']})"
            raise DataError(
                f"row {self.row}{role}: the chat template of {self.name} leaves out {what}, so it would be "
                f"missing from training; {set_template('a template that renders it')}, or remove it from the data"
            )

    def _is_used_at_the_end(self, changed: Conversation, turn: int) -> bool:
        """Tell whether two conversations differ once they are cut behind a turn that is not their last."""
        if turn + 1 == len(changed.messages):
            return False
        try:
            texts = {
                self.render(replace(each, messages=each.messages[: turn + 1])) for each in (self.conversation, changed)
            }
        except DataError:
            return False
        return len(texts) > 1


def _change_content(message: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**message, "content": f"{message['content']} {mark}"}


def _change_reasoning(message: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**message, "reasoning_content": message["reasoning_content"] + mark}


def _change_inline_reasoning(message: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**message, "content": message["content"].replace("</think>", f"{mark}</think>", 1)}


def _change_key(key: str) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """Return a change of a key's text; anything but text is taken away."""

    def change(message: dict[str, Any], mark: str) -> dict[str, Any]:
        if isinstance(message[key], str):
            return {**message, key: message[key] + mark}
        return _without(message, key)

    return change


def _change_call(position: int, part: str) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """Return a change of one part, name or arguments, of one tool call."""

    def change(message: dict[str, Any], mark: str) -> dict[str, Any]:
        calls = list(message["tool_calls"])
        call = calls[position]
        function = dict(call.get("function", call))
        function[part] = function[part] + mark if part == "name" else {**function[part], mark: mark}
        calls[position] = {**call, "function": function} if "function" in call else function
        return {**message, "tool_calls": calls}

    return change


def _drop_from_call(position: int, key: str, is_inside: bool) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """Return a change that takes a key out of a tool call, or out of its `function`."""

    def change(message: dict[str, Any], mark: str) -> dict[str, Any]:
        calls = list(message["tool_calls"])
        call = calls[position]
        if is_inside:
            calls[position] = {**call, "function": _without(call["function"], key)}
        else:
            calls[position] = _without(call, key)
        return {**message, "tool_calls": calls}

    return change


def _without(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != key}


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a nesting of dicts and lists, as it stands there."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _as_json(value: Any) -> str:
    """Return the JSON form that most templates write."""
    return json.dumps(value, ensure_ascii=False)
