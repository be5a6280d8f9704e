"""The errors that users of hf_megapack meet.

Every error says what was given, what is allowed and what to change. All derive from `MegaPackError`; each also derives
from the builtin that a caller would expect, so `except ValueError` keeps working.
"""


class MegaPackError(Exception):
    """Base of every error that hf_megapack raises on purpose."""


class ConfigError(MegaPackError, ValueError):
    """An argument, or a combination of arguments, that would train wrongly or cannot run here."""


class DataError(MegaPackError, ValueError):
    """A dataset row, chat template or token sequence that cannot be learned as it stands."""


class BackendError(MegaPackError, RuntimeError):
    """The model or Megatron-Core did not do what training relies on."""


class NonFiniteResultError(MegaPackError, ArithmeticError):
    """A loss, gradient norm or adapter tensor is NaN or infinite; nothing was updated or written because of it."""


class ExportError(MegaPackError, RuntimeError):
    """An adapter or checkpoint that could not be written, read back or verified."""
