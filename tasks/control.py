"""Stage control: fine-tune the original model like a recipe's candidates → models/control and its training curve.

A candidate may be better than the original model only because it was trained for longer. The control had the same
further training, so a comparison with it shows the effect of the compression alone.
"""

from __future__ import annotations

from eckart.recovery import Recovery
from tasks.artifacts.results_schema import CONTROL_CURVE
from tasks.config.schema import section
from tasks.models.model_io import CONTROL, TEACHER
from tasks.runtime.stage_runner import run
from tasks.training.recovery import recover


def control() -> None:
    """Fine-tune the original model like the candidates of `study.control`; zero steps leave it unchanged."""
    recipe = section("study.control", str)
    recover(TEACHER, CONTROL, CONTROL_CURVE, section(f"recipes.{recipe}.recovery", Recovery))


if __name__ == "__main__":
    run("control", control, trains=True, threads="candidate")  # as in the recovery of candidates
