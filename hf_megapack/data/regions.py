"""Find which characters of a render each message wrote, by marking the steps of the template's own loops.

The invariant: a region is what the template wrote while its loop stood at that message. The marked render must equal
the plain one once its marks are taken out; where it does not, or a message is written in two places, there is none.
Templates run in the sandbox that transformers runs them in.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from jinja2 import Template, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

Span = tuple[int, int]

_MARK_CALL, _CLOSE_CALL = "hf_megapack_mark", "hf_megapack_close"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FREE_STEPS, _STEPS_PER_MESSAGE = 200_000, 1_000
# Characters that nobody assigned a meaning to; one that the text does not hold becomes the sign of a mark.
_SIGNS = [chr(code) for code in range(0xE000, 0xE100)]


class EndlessTemplateError(Exception):
    """A template's loops ran for more steps than any conversation of this length needs."""


class MarkedTemplate:
    """A chat template whose loops say at which message they stand.

    Args:
        text: The Jinja template.

    Raises:
        jinja2.TemplateSyntaxError: If the text is no template.
    """

    def __init__(self, text: str) -> None:
        environment = _compile_jinja_template(text).environment
        tree = environment.parse(text)
        self._num_loops = 0
        self._mark_loops(tree)
        tree.set_environment(environment)
        self._template: Template = environment.from_string(tree)

    def regions(
        self, messages: Sequence[Mapping[str, Any]], text: str, variables: Mapping[str, Any]
    ) -> dict[int, Span]:
        """Return the characters that each message wrote; messages that wrote nothing, or in two places, are left out.

        Args:
            messages: What was rendered.
            text: The plain render.
            variables: What else the template was given.

        Returns:
            Position of a message -> its region; empty if the marks changed the text, or regions overlap.

        Raises:
            EndlessTemplateError: If the template loops on and on.
        """
        sign = next((sign for sign in _SIGNS if sign not in text), None)
        if sign is None:
            return {}
        # Under the names that transformers, from 5.24 on, gives to a message's reasoning.
        shown = []
        for message in messages:
            reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
            alias = {} if reasoning is None else {"reasoning_content": reasoning}
            shown.append({**({"thinking": reasoning} if alias else {}), **message, **alias})
        marks = _Marks(shown, sign)
        calls = {_MARK_CALL: marks.mark, _CLOSE_CALL: marks.close}
        marked = self._template.render(messages=shown, **variables, **calls)
        plain, spans = _read_marks(marked, sign)
        if plain != text:
            return {}
        ordered = sorted(span for of_turn in spans.values() for span in of_turn)
        if any(before[1] > after[0] for before, after in pairwise(ordered)):
            return {}
        return {turn: of_turn[0] for turn, of_turn in spans.items() if len(of_turn) == 1}

    def _mark_loops(self, node: nodes.Node) -> None:
        """Put a mark at the beginning of every loop's body and one behind the loop."""
        for field in node.fields:
            children = getattr(node, field, None)
            if not isinstance(children, list):
                children = [children]
            marked = []
            for child in children:
                marked.append(child)
                if isinstance(child, nodes.Node):
                    self._mark_loops(child)
                if isinstance(child, nodes.For):
                    self._num_loops += 1
                    loop = nodes.Const(self._num_loops)
                    is_name = isinstance(child.target, nodes.Name)
                    item = nodes.Name(child.target.name, "load") if is_name else nodes.Const(None)
                    child.body.insert(0, _output(_MARK_CALL, [loop, item], child.lineno))
                    marked.append(_output(_CLOSE_CALL, [loop], child.lineno))
            if isinstance(getattr(node, field, None), list):
                setattr(node, field, marked)


def _output(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Output:
    call = nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)
    return nodes.Output([call]).set_lineno(lineno)


class _Marks:
    """What the marked loops call: text to write at a step, and a count of the steps."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], sign: str) -> None:
        self._turns = {id(message): turn for turn, message in enumerate(messages)}
        self._sign = sign
        self._open: set[int] = set()
        self._steps_left = _FREE_STEPS + _STEPS_PER_MESSAGE * len(messages)

    def mark(self, loop: int, item: Any) -> str:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise EndlessTemplateError("its loops run on and on")
        turn = self._turns.get(id(item))
        if turn is None:
            return self.close(loop)
        self._open.add(loop)
        return f"{self._sign}{loop}:{turn}{self._sign}"

    def close(self, loop: int) -> str:
        if loop not in self._open:
            return ""
        self._open.remove(loop)
        return f"{self._sign}{loop}:{self._sign}"


def _read_marks(marked: str, sign: str) -> tuple[str, dict[int, list[Span]]]:
    """Return the text without its marks, and what was written at each message, in order."""
    pieces = re.split(f"{sign}(\\d+):(\\d*){sign}", marked)
    spans: dict[int, list[Span]] = {}
    open_at: dict[str, tuple[int, int]] = {}
    position = len(pieces[0])
    for loop, turn, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        if loop in open_at:
            at_turn, start = open_at.pop(loop)
            if position > start:
                spans.setdefault(at_turn, []).append((start, position))
        if turn:
            open_at[loop] = (int(turn), position)
        position += len(piece)
    return "".join(pieces[::3]), spans
