"""Whether generation tags can be believed: where they stand in the template, and what they mark of a conversation."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from hf_megapack.data.regions import Span
from hf_megapack.errors import ConfigError

# What a template writes in these is put together first and placed later; transformers counts from where they begin.
_PUT_TOGETHER = {
    nodes.Macro: "a macro",
    nodes.AssignBlock: "a {% set %} block",
    nodes.FilterBlock: "a {% filter %} block",
    nodes.CallBlock: "a {% call %} block or another tag",
    nodes.For: "a recursive loop",
}


def check_tags_are_counted(template: str, name: str) -> None:
    """Refuse generation tags inside text that the template puts together before it writes it.

    Args:
        template: The Jinja template.
        name: Tokenizer name for error messages.

    Raises:
        ConfigError: If there are such tags: they would mark other characters than those inside them.
    """
    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return  # It cannot be rendered either, which says more.
    for kind, what in _PUT_TOGETHER.items():
        for outer in tree.find_all(kind):
            is_written_at_once = isinstance(outer, nodes.For) and not outer.recursive
            if not is_written_at_once and any(map(_is_tag, outer.find_all(nodes.CallBlock))):
                raise ConfigError(
                    f"generation tags in the chat template of {name} stand inside {what} (line {outer.lineno}), where "
                    "transformers finds other characters than those between them; write the header before them and "
                    "the tags outside of it, around the text that it gives"
                )


def _is_tag(block: nodes.CallBlock) -> bool:
    function = block.call.node
    return isinstance(function, nodes.ExtensionAttribute) and function.name == "_generation_support"


def spans_hold_their_turns(
    text: str, spans: Sequence[Span], messages: Sequence[Mapping[str, Any]], end_token: re.Pattern[str]
) -> bool:
    """Tell whether each assistant text lies in a span of its own and every other text outside of all, in order.

    Args:
        text: The render.
        spans: Spans of the generation tags, one per assistant turn.
        messages: What was rendered.
        end_token: Matches any control token.

    Returns:
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
