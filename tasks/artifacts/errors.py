"""The errors of which a person is told in words alone."""


class EckartError(Exception):
    """Ends a command with its message, which says what is wrong and what to do; never with a traceback."""
