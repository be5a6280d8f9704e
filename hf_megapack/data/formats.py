"""Recognise a dataset's columns and turn a row into one plain form: a conversation, a text pair or ready tokens.

What leaves here is normalised: no null fillers, content is a string, tool arguments are dicts, training flags are
separate from the messages. Nothing here renders a template or tokenises.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from hf_megapack.batch import IGNORE_LABEL
from hf_megapack.data.beside import (
    TRL_MASKS,
    check_columns,
    check_role,
    check_token_columns,
    drop_nulls,
    read_json,
    read_template_kwargs,
)
from hf_megapack.errors import DataError

# Format -> (columns that define it, columns that may accompany it).
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools", "chat_template_kwargs")),
    "prompt/completion": (("prompt", "completion"), ("tools", "chat_template_kwargs", "label")),
    "ShareGPT": (("conversations",), ("tools", "chat_template_kwargs")),
    "text": (("text",), ()),
    "tokens with labels": (("input_ids", "labels"), ("attention_mask", "conversation_id", "turn")),
    "tokens with a loss mask": (("input_ids", "loss_mask"), ("attention_mask", "conversation_id", "turn")),
}

_LARGEST_ID = np.iinfo(np.int32).max
_NOT_SAID = {"role", "name", "train", "weight"}

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One row as messages.

    Attributes:
        messages: Role, string content and whatever else the template may read, in order.
        tools: JSON schemas offered to the assistant, or None.
        trained_turns: Indices of the assistant messages that may be learned, ascending.
        template_kwargs: Variables for the template, of this row.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    trained_turns: tuple[int, ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPair:
    """One row as text without turns: `completion` is learned, `prompt` is not."""

    prompt: str
    completion: str


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ReadyTokens:
    """One row that was tokenized before.

    Attributes:
        input_ids: int32, shape (num_tokens,).
        loss_mask: uint8, shape (num_tokens,), unshifted.
        conversation_id: Conversation that the row came from.
        turn: The only supervised message, or -1.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    conversation_id: int
    turn: int


def recognise_format(columns: Iterable[str]) -> str:
    """Return the key of `FORMATS` that a dataset's columns fit.

    Args:
        columns: Column names of the dataset; columns that belong to no format are ignored.

    Returns:
        A key of `FORMATS`.

    Raises:
        DataError: If no format fits, or more than one does.

    Example:
        >>> recognise_format(["id", "messages", "tools"])
        'messages'
    """
    present = set(columns)
    found = [name for name, (required, _) in FORMATS.items() if present.issuperset(required)]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"{name}: {' + '.join(required)}" for name, (required, _) in FORMATS.items())
    problem = "fit no known format" if not found else f"fit several formats ({', '.join(found)}); keep one of them"
    if not found and "input_ids" in present and (masks := [name for name in TRL_MASKS if name in present]):
        problem += f"; rename {' or '.join(masks)} to loss_mask"
    raise DataError(f"columns {sorted(present)} {problem}. Formats: {known}")


def read_row(format_name: str, row: Mapping[str, Any], row_index: int) -> Conversation | TextPair | ReadyTokens:
    """Return a row in the one form that its format leads to.

    Args:
        format_name: A key of `FORMATS`.
        row: Column name -> value.
        row_index: Position of the row in the dataset, for error messages and as conversation id.

    Returns:
        The normalised row.

    Raises:
        DataError: If the row is malformed; names row and turn.
    """
    if format_name == "messages":
        return _read_conversation(row["messages"], row, row_index)
    if format_name == "ShareGPT":
        return _read_conversation(_from_sharegpt(row["conversations"], row_index), row, row_index)
    if format_name == "prompt/completion":
        return _read_prompt_completion(row, row_index)
    if format_name == "text":
        text = _require_text(row["text"], "text", row_index)
        check_columns(row, [text], row_index)
        return TextPair(prompt="", completion=text)
    return _read_tokens(row, row_index)


def check_unicode(text: str, where: str) -> None:
    """Refuse text that is no Unicode text, such as half of a character from a JSON file that was cut.

    Args:
        text: Any text.
        where: Row and turn.

    Raises:
        DataError: If it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text holds half of a character at position {error.start}, in "
            f"{_brief(text[max(error.start - 20, 0) : error.start + 20])}; repair or remove it"
        ) from error


def _read_conversation(messages: Any, row: Mapping[str, Any], row_index: int, num_context: int = 0) -> Conversation:
    """Return the normalised conversation of a row; its first `num_context` messages are never learned."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"row {row_index}: messages must be a non-empty list of dicts, got {_brief(messages)}")
    clean, trained = [], []
    for turn, raw in enumerate(messages):
        message, is_trained = _read_message(raw, row_index, turn)
        clean.append(message)
        if is_trained and turn >= num_context:
            trained.append(turn)
    check_columns(row, [message["content"] for message in clean], row_index)
    return Conversation(
        messages=clean,
        tools=_read_tools(row.get("tools"), row_index),
        trained_turns=tuple(trained),
        template_kwargs=read_template_kwargs(row.get("chat_template_kwargs"), row_index),
    )


def _read_message(raw: Any, row_index: int, turn: int) -> tuple[dict[str, Any], bool]:
    """Return the message as a template should see it, and whether its text is to be learned."""
    where = f"row {row_index}, turn {turn}"
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: a message must be a dict with role and content, got {_brief(raw)}")
    message = drop_nulls(raw)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        hint = "; from and value are read in a column named conversations" if "from" in message else ""
        raise DataError(f"{where}: a message needs a role (system, user, assistant, tool), got {_brief(role)}{hint}")
    check_role(role, where)
    is_assistant = role == "assistant"
    if is_assistant and "content" not in message and not any(message[key] for key in message.keys() - _NOT_SAID):
        raise DataError(f'{where}: an assistant turn without content; remove it, or write "" for an empty answer')
    message["content"] = _read_content(message.get("content", "" if is_assistant else None), where)
    reasoning = message.get("reasoning_content", "")
    if not isinstance(reasoning, str):
        raise DataError(f"{where}: reasoning_content must be a string, got {_brief(reasoning)}")
    for text in (message["content"], reasoning):
        check_unicode(text, where)
    if "tool_calls" in message:
        calls = message.pop("tool_calls")
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise DataError(f"{where}: tool_calls must be a list of dicts, got {_brief(calls)}")
        calls = [_read_tool_call(call, where) for call in calls]
        if calls:
            message["tool_calls"] = calls
    return message, _pop_training_flag(message, is_assistant, where)


def _read_content(content: Any, where: str) -> str:
    """Return content as one string; a list of text parts is joined, because many templates skip lists in silence."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text" or not isinstance(text, str):
                raise DataError(f"{where}: only text parts can be learned, got a part {_brief(part)}")
            parts.append(text)
        return "".join(parts)
    raise DataError(f"{where}: content must be a string or a list of text parts, got {_brief(content)}")


def _read_tool_call(raw: Any, where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are a dict, in the shape (flat or under `function`) in which it came."""
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: a tool call must be a dict, got {_brief(raw)}")
    call = dict(raw)
    if "function" in call:
        call["function"] = _read_tool_call(call["function"], where)
        return call
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise DataError(f"{where}: a tool call needs a name, got {_brief(raw)}")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        what = f"{where}: the arguments of tool call {call['name']!r}"
        arguments = read_json(arguments, what) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: the arguments of tool call {call['name']!r} must be a dict, got {_brief(arguments)}")
    call["arguments"] = arguments
    return call


def _pop_training_flag(message: dict[str, Any], is_assistant: bool, where: str) -> bool:
    """Take `train` and `weight` out of a message and return whether it is learned."""
    flags = set()
    for key in ("train", "weight"):
        if key in message:
            value = message.pop(key)
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                raise DataError(f"{where}: {key} must be 0 or 1 (false or true), got {_brief(value)}")
            flags.add(bool(value))
    if len(flags) > 1:
        raise DataError(f"{where}: train and weight contradict each other; keep one of them")
    if not is_assistant and True in flags:
        raise DataError(f"{where}: only assistant turns can be learned, but this {message['role']} turn asks for it")
    return is_assistant and False not in flags


def _read_tools(tools: Any, row_index: int) -> list[dict[str, Any]] | None:
    """Return tool schemas from a list of dicts, a list of JSON strings or one JSON string; None when there are none."""
    is_text = isinstance(tools, str)
    if is_text:
        tools = read_json(tools, f"row {row_index}: tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"row {row_index}: tools must be a list of JSON schemas, got {_brief(tools)}")
    # Nulls of JSON text are the tools' own: no columnar store has touched it.
    schemas = tools if is_text else map(drop_nulls, tools)
    schemas = [read_json(tool, f"row {row_index}: tools") if isinstance(tool, str) else tool for tool in schemas]
    for schema in schemas:
        if not isinstance(schema, dict) or not isinstance(schema.get("function", schema), dict):
            raise DataError(f"row {row_index}: a tool must be a JSON schema (a dict), got {_brief(schema)}")
    return schemas


def _from_sharegpt(turns: Any, row_index: int) -> Any:
    """Return `from`/`value` turns as messages; turns that already have role and content pass through."""
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return turns
    messages = []
    for turn, raw in enumerate(turns):
        if not isinstance(raw, Mapping) or raw.get("from") is None:
            messages.append(raw)
            continue
        role = _SHAREGPT_ROLES.get(raw["from"]) if isinstance(raw["from"], str) else None
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise DataError(f"row {row_index}, turn {turn}: unknown speaker {_brief(raw['from'])}; known: {known}")
        rest = {key: value for key, value in raw.items() if key not in ("from", "value")}
        messages.append({**rest, "role": role, "content": raw.get("value")})
    return messages


def _read_prompt_completion(row: Mapping[str, Any], row_index: int) -> Conversation | TextPair:
    prompt, completion, label = row["prompt"], row["completion"], row.get("label")
    if isinstance(label, (bool, np.bool_)):
        raise DataError(
            f"row {row_index}: label is {label}, but preferences (KTO) are not trained, and without them a completion "
            f"is learned whatever its label; keep the rows to learn, and remove the column label"
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        return _read_conversation(prompt + completion, row, row_index, num_context=len(prompt))
    if isinstance(prompt, str) and isinstance(completion, str):
        for column in ("tools", "chat_template_kwargs"):
            if drop_nulls(row.get(column)):
                raise DataError(
                    f"row {row_index}: {column} need prompt and completion to be lists of messages, not text"
                )
        check_columns(row, [prompt, completion], row_index)
        return TextPair(prompt=prompt, completion=_require_text(completion, "completion", row_index))
    kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise DataError(f"row {row_index}: prompt and completion must both be text or both lists of messages, got {kinds}")


def _require_text(value: Any, column: str, row_index: int) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"row {row_index}: {column} must be non-empty text, got {_brief(value)}")
    return value


def _read_tokens(row: Mapping[str, Any], row_index: int) -> ReadyTokens:
    """Return ready tokens without their padding, and labels as a loss mask."""
    ids = _integers(row["input_ids"], "input_ids", row_index)
    column = "labels" if "labels" in row else "loss_mask"
    targets = _integers(row[column], column, row_index)
    attention = row.get("attention_mask")
    attended = np.ones_like(ids) if attention is None else _integers(attention, "attention_mask", row_index)
    if not len(ids) == len(targets) == len(attended):
        raise DataError(f"row {row_index}: input_ids, {column} and attention_mask differ in length")
    length = int(np.count_nonzero(attended))
    if not (attended[:length] == 1).all():
        raise DataError(f"row {row_index}: attention_mask must be a run of ones from index 0 (pad on the right)")
    if length == 0 or ids[:length].min() < 0 or ids[:length].max() > _LARGEST_ID:
        raise DataError(
            f"row {row_index}: input_ids must be one or more token ids, none negative or above {_LARGEST_ID}"
        )
    if column == "labels":
        is_target = targets != IGNORE_LABEL
        wrong = np.flatnonzero(is_target & (targets != ids))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"row {row_index}: label {targets[at]} at index {at} is neither {IGNORE_LABEL} nor the token there "
                f"({ids[at]}); labels are unshifted, one per token"
            )
    else:
        is_target = targets == 1
        if not np.isin(targets, (0, 1)).all():
            raise DataError(f"row {row_index}: loss_mask may hold only 0 and 1")
    if is_target[length:].any():
        raise DataError(f"row {row_index}: {column} asks for padding to be learned, after index {length}")
    loss_mask = is_target[:length].astype(np.uint8)
    check_token_columns(row, loss_mask, row_index)
    return ReadyTokens(
        input_ids=ids[:length].astype(np.int32),
        loss_mask=loss_mask,
        conversation_id=_optional_int(row, "conversation_id", row_index, default=row_index),
        turn=_optional_int(row, "turn", row_index, default=-1),
    )


def _optional_int(row: Mapping[str, Any], column: str, row_index: int, *, default: int) -> int:
    value = row.get(column)
    if value is None:
        return default
    if not isinstance(value, Integral):
        raise DataError(f"row {row_index}: {column} must be a whole number, got {_brief(value)}; leave the column out")
    return int(value)


def _integers(value: Any, column: str, row_index: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"row {row_index}: {column} must be a flat list of integers") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise DataError(f"row {row_index}: {column} must be a flat list of integers, got {_brief(value)}")
    return array.astype(np.int64)


def _brief(value: Any) -> str:
    """Return a value for an error message, cut to a readable length."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
