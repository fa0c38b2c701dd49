"""Detect a stage that has printed nothing for a long time and may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

_PATIENCE = 600.0  # seconds


@contextmanager
def noticed(tell: Callable[[float], None], patience: float = _PATIENCE) -> Iterator[Callable[[], None]]:
    """Yield a function that must be called whenever the stage prints.

    Another thread calls `tell` with the seconds since the stage last printed: when they reach `patience`, and each time
    that they have doubled.
    """
    heard: SimpleQueue[bool] = SimpleQueue()

    def listen() -> None:
        silent = 0.0
        while True:
            wait = max(silent, patience)
            try:
                if not heard.get(timeout=wait):
                    return
                silent = 0.0
            except Empty:
                silent += wait
                tell(silent)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield lambda: heard.put(True)
    finally:
        heard.put(False)
        thread.join()
