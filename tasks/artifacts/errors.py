"""Errors that a user sees as a message without a traceback."""


class EckartError(Exception):
    """Error that ends a command; its message says what is wrong and what to do."""


class StageError(EckartError):
    """Mistake in the input of a stage, such as its data or parameters."""
