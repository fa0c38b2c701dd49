"""Promotions of a model take turns."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.registry import promotion_lock
from flows.registry.promotion_lock import turn


@pytest.mark.parametrize("address", ["sqlite:///{}/mlflow.db", "http://127.0.0.1:5000"])
def test_a_promotion_waits_for_another_of_the_same_model(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an SQLite file also for one with another TMPDIR, such as that of a service of systemd."""
    order: list[str] = []
    address = address.format(tmp_path)

    def promote() -> None:
        with turn(address, "m"):
            order.append("second")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        with turn(address, "m"):
            if address.startswith("sqlite"):
                (tmp_path / "tmp").mkdir()
                monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
            monkeypatch.setattr(promotion_lock, "_say", lambda name: order.append(f"{name} waits"))
            waits = pool.submit(promote)
            while not order:
                assert not waits.done()
            with turn(address, "another"):
                order.append("first")
        waits.result()
    assert order == ["m waits", "first", "second"]
