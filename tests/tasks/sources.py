"""Data sets as files under data/raw, and what the stage extract makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import SPLITS, load_split
from tasks.extract import extract
from tests.workspace import tiny_params, write_params

SPLIT = ("train", "validation", "test")
WHOLE = {"sizes": dict.fromkeys((*SPLIT, "calibration"), 1000)}


def write_jsonl(rows: list[dict[str, Any]], name: str = "rows") -> str:
    file = Path(f"data/raw/{name}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def extracted(source: str, **data: Any) -> dict[str, pd.DataFrame]:
    """Return the splits of `source`; `data` changes that section of the parameters."""
    write_params(Path(), tiny_params(data={"source": source, **data}))
    extract()
    return {name: load_split(name) for name in (*SPLIT, "calibration")}


def refusal(source: str, **data: Any) -> str:
    """Return the message about `source`, which leaves no splits."""
    with pytest.raises(StageError) as caught:
        extracted(source, **data)
    assert not SPLITS.exists()
    return str(caught.value)
