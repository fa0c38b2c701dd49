"""DVC's `Repo` with repairs: damaged databases and corrupt objects are removed before DVC uses them."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from dvc.stage.cache import StageCache

from flows.engine import cached_objects, site_cache


class RepairingRepo(Repo):
    """A `Repo` of DVC that repairs its databases, and the objects of its run cache, before it uses them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage_cache = _WholeObjects(self)

    @cached_property
    def site_cache_dir(self) -> str:
        folder = str(super().site_cache_dir)
        site_cache.heal(Path(folder))
        return folder


class _WholeObjects(StageCache):
    """A run cache of DVC that removes the corrupt objects that an entry names before use.

    An entry holds the inputs and outputs of one run of a stage. DVC does not read the objects that it names, so it
    would restore and push corrupt ones.
    """

    def __init__(self, repo: Repo) -> None:
        super().__init__(repo)
        self._checked: set[str] = set()

    def _create_stage(self, cache: Any, wdir: str | None = None) -> Any:
        digests = {str(out["md5"]) for out in cache["outs"] if "md5" in out} - self._checked
        cached_objects.discard_corrupt(Path(self.repo.cache.local_cache_dir), digests)
        self._checked |= digests
        return super()._create_stage(cache, wdir)

    def _load_cache(self, key: str, value: str | None) -> Any:
        if not value:  # the folder has no entries; DVC's own code fails on this
            return None
        with suppress(PermissionError):  # in a shared cache, the entry may belong to another user
            if not value.endswith(".tmp"):
                return super()._load_cache(key, value)
            Path(self._get_cache_path(key, value)).unlink()  # DVC left it when it was killed or the disk was full
        return None
