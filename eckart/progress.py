"""Progress bars of long computations.

The functions that take minutes take a `Progress` for their loops. Its default, `silent`, shows nothing: the stages of
the pipeline print progress of their own. `eckart.compress` gives `bar`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Protocol, TypeVar

from transformers.utils import logging

Item = TypeVar("Item")


class Progress(Protocol):
    """Function that returns `items`, and shows how far a loop over them has come.

    Its other arguments are a description of the loop and what one item is called.
    """

    def __call__(self, items: Iterable[Item], description: str, unit: str) -> Iterable[Item]: ...


def silent(items: Iterable[Item], description: str, unit: str) -> Iterable[Item]:
    """Return `items` and show nothing."""
    return items


def bar(items: Iterable[Item], description: str, unit: str) -> Iterable[Item]:
    """Return `items` with the progress bar that transformers shows while it loads a model, on stderr.

    `transformers.utils.logging.disable_progress_bar()` and the environment variable HF_HUB_DISABLE_PROGRESS_BARS=1
    switch these bars off, too.
    """
    total = len(items) if isinstance(items, Sized) else None
    bars: Iterable[Item] = logging.tqdm(items, desc=description, unit=unit, total=total)
    return bars
