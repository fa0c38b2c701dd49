"""How long stages took when they were executed: DVC forgets it, so it is kept beside its cache, and shared like it."""

from __future__ import annotations

from pathlib import Path


def keep(cache_dir: Path, key: str, seconds: float | None) -> None:
    """Keep what the computation `key` took; nothing if that is not known.

    Args:
        cache_dir: as `dvc cache dir` names it.
    """
    if seconds is None:
        return
    path = _path(cache_dir, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(repr(seconds))


def known(cache_dir: Path, key: str) -> float | None:
    """The seconds that were kept of a computation; None if there are none, or a full disk cut them off."""
    try:
        return float(_path(cache_dir, key).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _path(cache_dir: Path, key: str) -> Path:
    return cache_dir / "seconds" / key
