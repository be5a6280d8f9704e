"""Interrupt code at its n-th change of the file system, as a power cut or a single failure would."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

OPERATIONS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")


class InterruptedHereError(BaseException):
    """Not an Exception, so that nothing handles it by accident."""


class Interruption:
    """Counts file system operations and says which one was interrupted.

    Attributes:
        count: Operations attempted.
        happened: Whether one was interrupted.
    """

    def __init__(self, step: int, is_final: bool):
        self.step, self.is_final = step, is_final
        self.count, self.happened = 0, False

    def guard(self, real):
        """Wrap one function of `os`."""

        def operation(*args, **kwargs):
            self.count += 1
            if self.count - 1 == self.step or (self.is_final and self.happened):
                self.happened = True
                raise InterruptedHereError
            return real(*args, **kwargs)

        return operation


@contextmanager
def interrupted(step: int, *, is_final: bool) -> Iterator[Interruption]:
    """Let the block run until its operation number `step`, counted from 0, which raises instead of running.

    Args:
        step: The operation to interrupt; a block with fewer operations runs to its end.
        is_final: Whether all later operations fail too, so that no clean-up happens: a power cut.

    Yields:
        What was counted.
    """
    state = Interruption(step, is_final)
    patches = {name: state.guard(getattr(os, name)) for name in OPERATIONS}
    with mock.patch.multiple(os, **patches):
        try:
            yield state
        except InterruptedHereError:
            assert state.happened
