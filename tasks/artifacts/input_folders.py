"""Folders of the user's model and data, and the formats of data."""

from __future__ import annotations

from pathlib import Path

RAW = Path("data/raw")
BASE = Path("models/base")
FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a file of data → its format."""
