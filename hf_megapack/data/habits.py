"""What a chat template does with every conversation, learned from a made-up one."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from hf_megapack.data.formats import Conversation
from hf_megapack.data.rendering import TemplateRenderer
from hf_megapack.errors import DataError

_ROLES = ("user", "assistant", "user", "assistant")
PROBE = Conversation(
    messages=[{"role": role, "content": f"Probe{index}"} for index, role in enumerate(_ROLES)],
    tools=None,
    trained_turns=(1, 3),
)


class TemplateHabits:
    """What a template writes around turns.

    Args:
        renderer: The template.
    """

    def __init__(self, renderer: TemplateRenderer) -> None:
        self._renderer = renderer

    @cached_property
    def text(self) -> str:
        """The render of the made-up conversation; empty if the template wants other ones."""
        try:
            return self._renderer.render(PROBE, 0)
        except DataError:
            return ""

    @cached_property
    def headers(self) -> list[str]:
        """What the generation prompt adds to a conversation, for each way to ask for it; without those not found."""
        headers = []
        for invitation in self._renderer.invitations:
            try:
                headers.append(self.header(PROBE, 3, 0, invitation))
            except DataError:
                continue
        return [header for header in headers if header is not None]

    def first_prompt(self, before: str) -> str:
        """Return the text before a turn that opens a conversation, as the generation prompt would leave it.

        Args:
            before: What the template wrote before it, with or without the header.
        """
        header = self.headers[0]
        return before if before.endswith(header) else before + header

    def header(self, conversation: Conversation, turn: int, row: int, invitation: Mapping[str, Any]) -> str | None:
        """Return what the generation prompt before a turn adds to what earlier messages wrote.

        Args:
            conversation: The messages before the turn, and more.
            turn: Position of the turn, at least 1.
            row: Row for error messages.
            invitation: How the template is asked for the prompt.

        Returns:
            The header, or None if that cannot be told.
        """
        before = self._renderer.render(conversation, row, stop=turn, invitation=invitation)
        prompt = self._renderer.render(conversation, row, stop=turn, prompt=True, invitation=invitation)
        if prompt.startswith(before):
            return prompt[len(before) :]
        # The template ends a conversation with text of its own, in whose place the prompt stands.
        region = self._renderer.regions(conversation, row, before, stop=turn).get(turn - 1)
        if region is not None and before[: region[1]] == prompt[: region[1]]:
            return prompt[region[1] :]
        return None

    @cached_property
    def writes_behind_last_turn(self) -> bool:
        """Whether the template ends a conversation with text that belongs to no turn."""
        region = self._renderer.regions(PROBE, 0, self.text).get(3) if self.text else None
        return region is not None and region[1] < len(self.text)
