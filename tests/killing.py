"""A rule that ends a training at a step, as if its process was killed."""

from __future__ import annotations

from eckart.training.rules import Rule


class Killed(Exception):
    pass


class Kill(Rule):
    """Die after a step, if one is given."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def after_update(self, step: int) -> None:
        if step == self.step:
            raise Killed
