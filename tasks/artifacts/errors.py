"""Errors that a user sees as a message, without a traceback."""


class EckartError(Exception):
    """Ends a command with its message, which says what is wrong and what to do."""


class StageError(EckartError):
    """A mistake in the input; the message says what to do and is shown without a traceback."""
