"""Folders of the user's model and data."""

from __future__ import annotations

from pathlib import Path

RAW = Path("data/raw")
BASE = Path("models/base")
