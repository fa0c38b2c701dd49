"""Stage calibration: tokenize the calibration examples → data/calibration.parquet.

All later stages read this file, so long texts are tokenized once, and the original model writes once.
"""

from __future__ import annotations

from pyarrow import parquet

from tasks.artifacts.paths import CALIBRATION
from tasks.data.calibration_examples import calibration_examples
from tasks.runtime.stage_runner import run, say


def calibration() -> None:
    """Tokenize the calibration examples. Let the original model write those that `data.written` asks for."""
    examples = calibration_examples()
    partial = CALIBRATION.with_suffix(".partial")
    parquet.write_table(examples.with_format("arrow")[:], partial)
    partial.replace(CALIBRATION)
    say(f"{len(examples)} calibration examples")


if __name__ == "__main__":
    run("calibration", calibration)
