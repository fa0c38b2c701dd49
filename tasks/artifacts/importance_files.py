"""What the importance stage leaves for the stages of a candidate."""

from __future__ import annotations

from pathlib import Path

from eckart.model.targets import Targets

IMPORTANCE = Path("data/importance")
TARGETS = IMPORTANCE / "targets.json"


def load_targets() -> Targets:
    return Targets.model_validate_json(TARGETS.read_text())
