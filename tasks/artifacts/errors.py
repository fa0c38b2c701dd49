"""The errors of which a person is told in words alone."""


class EckartError(Exception):
    """Ends a command with its message, which says what is wrong and what to do; never with a traceback."""


class StageError(EckartError):
    """A mistake of the input, said in words that tell what to do; shown without a traceback."""
