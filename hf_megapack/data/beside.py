"""What rows and messages say beside what is read of them: template variables, and names under which text would vanish.

Lists of names, because a column or key may hold anything; those listed hold what the model sees or says. Whether a
template renders a key of a message is asked elsewhere.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hf_megapack.errors import DataError

_IN_MESSAGES = "put it into the conversation, as a message of its own"
_ONLY_TEXT = "only text can be learned; take these rows out"
# Column of a row -> what to do when it holds text that no message holds, or anything but text.
COLUMNS = {
    "system": 'put it into the conversation as its first message, with role "system"',
    "system_prompt": 'put it into the conversation as its first message, with role "system"',
    "history": _IN_MESSAGES,
    "instruction": _IN_MESSAGES,
    "input": _IN_MESSAGES,
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _ONLY_TEXT),
}

# What TRL calls a loss mask.
TRL_MASKS = ("completion_mask", "assistant_masks")
# Columns beside ready tokens that say how they are to be learned.
TOKEN_COLUMNS = ("position_ids", "seq_lengths", *TRL_MASKS)

_CALLS, _REASONING, _TEXT = (f"templates look for {key}" for key in ("tool_calls", "reasoning_content", "content"))
# Reasoning matters in turns that are learned; templates leave out that of earlier turns.
REASONING_KEYS = ("thinking", "reasoning", "thought", "thoughts")
# Key of a message that holds what the model says or sees -> what such a thing is called otherwise.
MESSAGE_KEYS = {
    **dict.fromkeys(("function_call", "function_calls", "tool_call"), _CALLS),
    **dict.fromkeys(REASONING_KEYS, _REASONING),
    **dict.fromkeys(("text", "value", "parts", "refusal"), _TEXT),
    **dict.fromkeys(("tools", "functions"), "templates look for the column tools"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text can be learned"),
}

# Key of a tool call under which arguments or a result would vanish -> where templates look for such a thing.
_ARGUMENTS = ("arguments", "parameters", "params", "args", "kwargs", "input", "inputs")
CALL_KEYS = {
    **dict.fromkeys(_ARGUMENTS, "arguments"),
    **dict.fromkeys(("result", "results", "response", "output", "outputs"), 'a message with role "tool"'),
}

_ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
_LIKELY_ROLES = {**{role: role for role in _ROLES}, "human": "user", "gpt": "assistant"}

# What the template is called with by other means than chat_template_kwargs.
_TAKEN = {
    **dict.fromkeys(("messages", "conversation", "conversations"), "the column messages says that"),
    "tools": "the column tools says that",
    "chat_template": "one template serves all rows",
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), "it depends on the turn that is learned"),
    **dict.fromkeys(
        (
            *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "sanitize_control_tokens"),
            *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
        ),
        "it is no variable of a template",
    ),
}


def drop_nulls(value: Any) -> Any:
    """Remove null-valued dict keys at every depth; columnar stores add them to give all rows the same keys.

    Args:
        value: Any nesting of dicts and lists; nulls inside lists stay.

    Returns:
        A copy without those keys.

    Example:
        >>> drop_nulls({"a": None, "b": [{"c": None, "d": 1}, None]})
        {'b': [{'d': 1}, None]}
    """
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [drop_nulls(item) for item in value]
    return value


def read_json(text: str, what: str) -> Any:
    """Return what a JSON text says.

    Args:
        text: The text.
        what: Row, and what the text is, in the plural.

    Raises:
        DataError: If it is broken, or says two things under one key, of which only the last would be kept.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise DataError(f"{what} have the key {twice[0]!r} more than once in one JSON object; keep one of them")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{what} are broken JSON: {error}") from error


def holds_something(value: Any) -> bool:
    """Tell whether a column or key holds something to read: flags, numbers, nulls and empty texts do not.

    Args:
        value: Any value of a column or of a message's key.

    Example:
        >>> holds_something([{"path": None}, ""]), holds_something({"name": "f"}), holds_something(True)
        (False, True, False)
    """
    return not isinstance(value, (bool, int, float)) and not _is_empty(value)


def _is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_empty, value))
    return value is None or (isinstance(value, str) and not value.strip())


def check_columns(row: Mapping[str, Any], texts: Iterable[str], row_index: int) -> None:
    """Refuse columns beside a conversation that hold what the model should see.

    Args:
        row: Column name -> value.
        texts: The texts of the conversation; what one of them holds too is not lost.
        row_index: Position of the row, for error messages.

    Raises:
        DataError: If one would be ignored; names it and says what to do.
    """
    for name in COLUMNS:
        value = row.get(name)
        if not holds_something(value) or (isinstance(value, str) and any(value.strip() in text for text in texts)):
            continue
        raise DataError(
            f"row {row_index}: the column {name} is not read and holds what no message does, so it would be missing "
            f"from training; {COLUMNS[name]}, or remove the column"
        )


def check_token_columns(row: Mapping[str, Any], loss_mask: np.ndarray, row_index: int) -> None:
    """Refuse columns beside ready tokens that say they are several examples, or that fewer of them are learned.

    Args:
        row: Column name -> value.
        loss_mask: What is learned of the row, without its padding. uint8, shape (num_tokens,).
        row_index: Position of the row, for error messages.

    Raises:
        DataError: If one would be ignored; names it and says what to do.
    """
    length = len(loss_mask)
    given = {name: np.asarray(row[name]) for name in TOKEN_COLUMNS if row.get(name) is not None}
    is_packed = {
        "position_ids": lambda value: not np.array_equal(value[:length], np.arange(length)),
        "seq_lengths": lambda value: value.size > 1,
    }
    for name, value in given.items():
        if name in is_packed:
            if value.ndim != 1 or is_packed[name](value):
                raise DataError(
                    f"row {row_index}: {name} says that this row was packed before or begins elsewhere than at "
                    "position 0, but it would be learned as one example; give each example as a row of its own, "
                    f"without {name}"
                )
        elif value.shape[:1] < (length,) or not value[1:length][loss_mask[1:] == 1].all():
            raise DataError(
                f"row {row_index}: {name} leaves out tokens that labels or loss_mask ask to be learned; keep the one "
                "that is meant, as loss_mask"
            )


def check_role(role: str, where: str) -> None:
    """Refuse a role that is a slip for one that templates know: its turn would be rendered, and not be learned.

    Args:
        role: Role of a message.
        where: Row and turn.

    Raises:
        DataError: If it is one of them but for case and space, or a speaker of ShareGPT; names the likely role.
    """
    likely = _LIKELY_ROLES.get(role.strip().lower(), role)
    if likely != role:
        known = ", ".join(_ROLES)
        raise DataError(f"{where}: unknown role {role!r}; known are {known}. Write {likely!r} in its place")


def read_template_kwargs(value: Any, row_index: int) -> dict[str, Any]:
    """Return a row's variables for the template.

    Args:
        value: The column `chat_template_kwargs`.
        row_index: Position of the row, for error messages.

    Raises:
        DataError: If it is no dict, or holds what the template is given by other means.
    """
    value = {} if value is None else drop_nulls(value)
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise DataError(
            f"row {row_index}: chat_template_kwargs must be a dict of variables for the template, such as "
            f'{{"enable_thinking": false}}, got {type(value).__name__} {str(value)[:80]!r}'
        )
    for name in value:
        if name in _TAKEN:
            raise DataError(f"row {row_index}: chat_template_kwargs may not hold {name} ({_TAKEN[name]}); remove it")
    return value
