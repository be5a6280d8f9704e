"""A quick look at whether generation tags mark the assistant turns of a conversation and nothing else."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_megapack.data.regions import Span


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
