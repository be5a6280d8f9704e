"""Run a chat template over a conversation; whatever goes wrong is an error that names row and turn.

Nothing here decides what is learned. Templates run in transformers' sandbox and nowhere else.
"""

import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import meta
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from hf_megapack.data.formats import Conversation
from hf_megapack.data.refusals import set_template
from hf_megapack.data.regions import EndlessTemplateError, MarkedTemplate, Span
from hf_megapack.errors import DataError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A template may say much about little (tool manuals), but not without bound.
_FREE_CHARACTERS, _CHARACTERS_PER_CHARACTER = 1_000_000, 20


# Made once for all renderers of a text: rows may differ in their variables.
_marked = lru_cache(maxsize=8)(MarkedTemplate)


class TemplateRenderer:
    """A chat template with the variables that the tokenizer gives to it.

    Args:
        text: The Jinja template.
        special_tokens: Variables such as `bos_token` that templates read.
        name: Tokenizer name for error messages.
        variables: What else the template reads; goes before everything that is decided here.
    """

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Mapping[str, str],
        name: str,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.text = text
        self.name = name
        self.has_tags = _GENERATION_TAG.search(text) is not None
        self._row_variables = variables or {}
        # As transformers has it: a variable overrides the special token of its name.
        self._variables = {**special_tokens, **self._row_variables}
        self.begin_token = special_tokens.get("bos_token", "")
        # How the chat template is asked for the text that invites an answer: as it is, or without thinking.
        self.invitations: list[dict[str, Any]] = [{}]
        if "enable_thinking" in text:
            self.invitations.append({"enable_thinking": False})

    def render(
        self,
        conversation: Conversation,
        row: int,
        *,
        stop: int | None = None,
        prompt: bool = False,
        invitation: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the messages before `stop` (all of them for None), with the generation prompt if `prompt`.

        Args:
            conversation: What to render.
            row: Row for error messages.
            stop: Number of messages to render.
            prompt: Whether to ask for the text that invites an assistant turn.
            invitation: One of `invitations`; None for the first.

        Returns:
            The rendered text.

        Raises:
            DataError: If the template raises; names the first turn at which it does.
        """
        return self._render(conversation, row, stop, {"add_generation_prompt": prompt, **(invitation or {})})[0]

    def render_tagged(self, conversation: Conversation, row: int) -> tuple[str, list[Span]]:
        """Render a conversation.

        Args:
            conversation: What to render.
            row: Row for error messages.

        Returns:
            The text, and the spans of its generation tags that hold any.

        Raises:
            DataError: If the template raises; names the first turn at which it does.
        """
        return self._render(conversation, row, None, {"add_generation_prompt": False})

    def regions(self, conversation: Conversation, row: int, text: str, *, stop: int | None = None) -> dict[int, Span]:
        """Return the characters that each message wrote, where that can be told.

        Args:
            conversation: What was rendered.
            row: Row for error messages.
            text: The render of the messages before `stop`, without generation prompt.
            stop: Number of messages that were rendered.

        Returns:
            Turn -> region; see `MarkedTemplate.regions`.

        Raises:
            DataError: If the template loops on and on.
        """
        variables = {"tools": conversation.tools, "documents": None, "add_generation_prompt": False}
        try:
            return _marked(self.text).regions(conversation.messages[:stop], text, {**variables, **self._variables})
        except EndlessTemplateError as error:
            raise DataError(f"row {row}: the chat template of {self.name} cannot render this: {error}") from error
        except Exception:  # The marks disturbed it; it rendered without them.
            return {}

    @cached_property
    def _ignored(self) -> list[str]:
        """The variables that say something and that the template never reads."""
        read = meta.find_undeclared_variables(_compile_jinja_template(self.text).environment.parse(self.text))
        return [name for name, value in self._row_variables.items() if value and name not in read]

    def _render(
        self, conversation: Conversation, row: int, stop: int | None, options: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the text and the spans of its generation tags; an error of the template names row and turn."""
        messages = conversation.messages[:stop]
        try:
            text, tags = self._call(messages, conversation.tools, options)
        except Exception as error:
            turn = self._first_failing_turn(messages, conversation.tools, str(error))
            where = f"row {row}" if turn is None else f"row {row}, turn {turn} ({messages[turn]['role']})"
            raise DataError(
                f"{where}: the chat template of {self.name} cannot render this conversation: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._row_variables and self._ignored:
            raise DataError(
                f"row {row}: chat_template_kwargs has {', '.join(self._ignored)}, which the chat template of "
                f"{self.name} does not read, so it would be ignored; remove it, or "
                f"{set_template('one that does')}"
            )
        if len(text) > _FREE_CHARACTERS:
            given = (messages, conversation.tools, self._variables, self.text)
            size = sum(len(str(part)) for part in given)
            if len(text) > _FREE_CHARACTERS + _CHARACTERS_PER_CHARACTER * size:
                raise DataError(
                    f"row {row}: the chat template of {self.name} makes {len(text):,} characters of a conversation of "
                    f"{size:,}; {set_template('another one')}"
                )
        return text, tags

    def _call(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        texts, tags = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.text,
            return_assistant_tokens_mask=self.has_tags,
            **{**options, **self._variables},
        )
        return texts[0], [(start, end) for start, end in tags[0] if end > start] if self.has_tags else []

    def _first_failing_turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, problem: str
    ) -> int | None:
        """Return the last turn of the shortest prefix that fails in the same words, or None if no prefix does."""

        def fails(stop: int) -> bool:
            try:
                self._call(messages[:stop], tools, {"add_generation_prompt": False})
            except Exception as error:
                return str(error) == problem
            return False

        low, high = 0, len(messages)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        return high - 1 if high and fails(high) else None
