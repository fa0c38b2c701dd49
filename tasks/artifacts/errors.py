"""Errors that a user sees as a message, without a traceback."""


class EckartError(Exception):
    """Ends a command with its message, which says what is wrong and what to do."""
