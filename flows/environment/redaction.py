"""Secrets, which stay out of logs, messages and tracebacks: what holds one, and text without it."""

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
"""How the name of an environment variable ends that holds a secret: AWS_SECRET_ACCESS_KEY, HF_TOKEN."""
_LEAST = 8  # characters of a secret; what is shorter would hide innocent words


def keep_out() -> None:
    """Keep secrets out of all that this process logs, and of the traceback that ends it."""
    if not isinstance(make := logging.getLogRecordFactory(), _Discreet):
        logging.setLogRecordFactory(_Discreet(make))
    sys.excepthook = _say_end


def shown(text: str) -> str:
    """An address, or any text, without the user names, passwords and tokens that it may hold."""
    text = re.sub(r'://[^\s/"<>]*@', "://", text)
    for name, value in os.environ.items():
        if name.endswith(_SECRETS) and len(value) >= _LEAST:
            text = text.replace(value, "***")
    return text


class _Discreet:
    """Makes log records that hold no secret, whichever library writes them and whatever handles them."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit, in whatever way: the handler says so
            return record
        if (said := shown(message)) != message:
            record.msg, record.args = said, None
        if record.exc_info and record.exc_info[1]:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            if (said := shown(trace)) != trace:
                record.exc_text, record.exc_info = said, None
        return record


def _say_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(shown("".join(traceback.format_exception(kind, error, trace))))
