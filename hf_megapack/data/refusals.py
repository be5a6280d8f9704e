"""What to tell people whose chat template does not show where a turn begins and ends."""

from collections.abc import Sequence

from hf_megapack.data.encoding import common_length
from hf_megapack.data.formats import Conversation
from hf_megapack.errors import DataError

_MOST_SHOWN = 40
# Some hundred million tokens of one row.
_MOST_CHARACTERS_OF_EACH = 500_000_000


def set_template(what: str) -> str:
    """Return how to give a chat template to the trainer, to ChatTransform and on a command line.

    Args:
        what: The template to give.
    """
    return (
        f"set tokenizer.chat_template to {what} (or give its text to ChatTransform as chat_template=, its file on a "
        "command line as --chat_template)"
    )


def advice(is_single_turn: bool) -> str:
    """Return what to do about a template.

    Args:
        is_single_turn: Whether each example learns one turn already.
    """
    template = set_template("a training template, one with {% generation %} tags around assistant text")
    return template if is_single_turn else f'use assistant_mask="each", or {template}'


def check_size_of_each(conversation: Conversation, turns: Sequence[int], row: int) -> None:
    """Refuse a conversation so long that one example per turn, each with all that came before, would never end.

    Args:
        conversation: One row.
        turns: Its turns to learn.
        row: Its position.

    Raises:
        DataError: If the examples would be too much text.
    """
    learned, total, so_far = set(turns), 0, 0
    for turn, message in enumerate(conversation.messages):
        so_far += len(message["content"])
        total += so_far if turn in learned else 0
    if total > _MOST_CHARACTERS_OF_EACH:
        raise DataError(
            f'row {row}: assistant_mask="each" would make {len(turns):,} examples of more than {total:,} characters of '
            f'this conversation of {len(conversation.messages):,} messages; split it, or use "all" or "last"'
        )


def changed_text(  # noqa: PLR0913 - four renders, and where they come from
    text: str, *, before: str, prompt: str, alone: str, is_last: bool, where: str, name: str
) -> DataError:
    """Return the error for a turn that a template renders in one way when it ends a conversation and in another here.

    Args:
        text: Render of the whole conversation.
        before: Render of the messages before the turn; "" for the first turn, and `prompt` too.
        prompt: `before` with the generation prompt.
        alone: Render of the conversation that ends with the turn.
        is_last: Whether the turn ends the whole conversation.
        where: Row and turn.
        name: Tokenizer name.
    """
    template = f"the chat template of {name}"
    if text.startswith(prompt):
        was, now = _differences(alone, text)
        when = "when messages are added"
    else:
        was, now = _differences(prompt, text)
        when = "once the answer is there" if is_last else "when messages are added"
        if prompt.startswith(before) and common_length(prompt, text) >= len(before):
            return DataError(
                f"{where}: the generation prompt of {template} ends with {was}, but this turn goes on with {now}, so "
                f"the model would answer after text that it was not trained on; {advice(is_last)}"
            )
    return DataError(
        f"{where}: {template} changes earlier text {when} ({was} becomes {now}), so one render does not show every "
        f"turn as the model will see it; {advice(is_last)}"
    )


def _differences(first: str, second: str) -> tuple[str, str]:
    """Return how two texts go on where they part, shortened, as Python strings."""
    start = common_length(first, second)
    while start and first[start - 1] in "<[|":
        start -= 1
    rests = (first[start:], second[start:])
    return tuple(repr(rest if len(rest) <= _MOST_SHOWN else rest[:_MOST_SHOWN] + "...") for rest in rests)
