"""Stage control: give the original model the fine-tuning of a recipe → models/control and its training curve.

A candidate may be better than the original model only because it was trained for longer. The control has had the same
further training as a candidate, so a comparison of the two shows the effect of the compression alone.
"""

from __future__ import annotations

from eckart.recovery import Recovery
from tasks.artifacts.results_schema import CONTROL_CURVE
from tasks.config.schema import section
from tasks.models.model_io import CONTROL, TEACHER
from tasks.runtime.stage_runner import run
from tasks.training.recovery import recover


def control() -> None:
    """Fine-tune the original model as the recipe `study.control` fine-tunes its candidates.

    If that recipe has zero steps, the model stays unchanged.
    """
    recipe = section("study.control", str)
    recover(TEACHER, CONTROL, CONTROL_CURVE, section(f"recipes.{recipe}.recovery", Recovery))


if __name__ == "__main__":
    run("control", control, trains=True, threads="candidate")  # as for the fine-tuning of candidates
