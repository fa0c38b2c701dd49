"""Notice a stage that prints nothing for long and may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

_PATIENCE = 600.0  # seconds


@contextmanager
def noticed(tell: Callable[[float], None], patience: float = _PATIENCE) -> Iterator[Callable[[], None]]:
    """Yield a function to call whenever the stage prints.

    `tell` is called with the seconds of silence, in a thread, when they reach `patience` and each time they double.
    """
    heard: SimpleQueue[bool] = SimpleQueue()
    thread = threading.Thread(target=_listen, args=(heard, tell, patience), daemon=True)
    thread.start()
    try:
        yield lambda: heard.put(True)
    finally:
        heard.put(False)
        thread.join()


def _listen(heard: SimpleQueue[bool], tell: Callable[[float], None], patience: float) -> None:
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
