"""Control: the original model with the candidates' recovery fine-tuning → models/control and its training curve.

A candidate may be better than the original model because of the further training alone; compared with the control it
cannot be.
"""

from __future__ import annotations

from eckart.recovery import Recovery
from tasks.artifacts.results_schema import CONTROL_CURVE
from tasks.config.schema import section
from tasks.models.model_io import CONTROL, TEACHER
from tasks.runtime.stage_runner import run
from tasks.training.recovery import recover


def control() -> None:
    """Train the original model on, as the recipe `study.control` recovers (zero steps take it as it is)."""
    recipe = section("study.control", str)
    recover(TEACHER, CONTROL, CONTROL_CURVE, section(f"recipes.{recipe}.recovery", Recovery))


if __name__ == "__main__":
    run("control", control, trains=True, threads="candidate")  # as candidates recover
