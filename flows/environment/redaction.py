"""Remove passwords and tokens from logs, messages and tracebacks."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "AUTH_STRING")
"""An environment variable holds a secret if its name ends with one of these, for example HF_TOKEN."""
_NOTIFIERS = ("apprise", "prefect.server.events", "prefect.server.utilities.messaging")
"""Loggers whose records name addresses of webhooks, which are secrets."""
_SHORTEST = 8  # characters; shorter values are not hidden, because they may be ordinary words


def keep_out() -> None:
    """Remove secrets from everything that this process logs from now on, and from the traceback if it crashes."""
    if not isinstance(make := logging.getLogRecordFactory(), _RedactingFactory):
        logging.setLogRecordFactory(_RedactingFactory(make))
    sys.excepthook = _print_redacted


def redact(text: str) -> str:
    """Return a text, such as a URL or an error message, without the user names, passwords and tokens in it."""
    text = re.sub(r'://[^\s/"<>]*@', "://", text)
    for name, value in os.environ.items():
        if name.endswith(_SECRETS) and len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return text


def _redact_record(text: str, logger: str) -> str:
    if logger.startswith(_NOTIFIERS):
        text = re.sub(r"(://[^\s/?#'\"<>]+)[/?#][^\s'\"<>]*", r"\1/***", text)
    return redact(text)


class _RedactingFactory:
    """A factory of log records that removes secrets, whichever library logs the record."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # the arguments do not fit the message; the handler reports that
            return record
        if (redacted := _redact_record(message, record.name)) != message:
            record.msg, record.args = redacted, None
        if record.exc_info and record.exc_info[1]:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            if (redacted := _redact_record(trace, record.name)) != trace:
                record.exc_text, record.exc_info = redacted, None
        return record


def _print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
