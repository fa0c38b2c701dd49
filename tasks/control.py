"""Control: the dense model with the recovery that candidates get → models/control and its training curve.

What a candidate has over the dense model may be the recovery's alone; over the control it is not.
"""

from __future__ import annotations

from eckart.recovery import Recovery
from tasks.models import CONTROL, TEACHER
from tasks.params import section
from tasks.records import CONTROL_CURVE
from tasks.recovering import recover
from tasks.stage import run


def control() -> None:
    """Train the teacher on as the recipe `study.control` recovers (zero steps take it as it is)."""
    recipe = section("study.control", str)
    recover(TEACHER, CONTROL, CONTROL_CURVE, section(f"recipes.{recipe}.recovery", Recovery))


if __name__ == "__main__":
    run("control", control, trains=True, threads="candidate")  # as candidates recover
