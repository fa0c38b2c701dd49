"""DVC's repository with repairs: damaged databases, entries of the run cache and objects are removed before use."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage.cache import StageCache, _get_cache_hash

from flows.engine import cached_objects, site_cache

log = logging.getLogger(__name__)


class WholeRepo(Repo):
    """DVC's `Repo` that repairs its databases and its run cache before it uses them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage_cache = _WholeEntries(self)

    @cached_property
    def site_cache_dir(self) -> str:
        folder = str(super().site_cache_dir)
        site_cache.heal(Path(folder))
        return folder


class _WholeEntries(StageCache):
    """The run cache without damaged entries and without entries that name corrupt objects.

    An entry is named by the digest of its content. DVC does not check that: an entry that was cut off between two
    outputs is valid YAML, and the restored stage would lack an output. Nor does DVC read the objects that an entry
    names, so it would restore and push corrupt ones.
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
        if value is None:  # a folder without entries, on which DVC fails
            return None
        try:
            entry = super()._load_cache(key, value)
            if entry is None or _get_cache_hash(entry) == value:
                return entry
        except PermissionError:  # another user's, in a cache that several share
            return None
        except (DvcException, OSError):
            pass
        log.warning("%s of DVC's run cache is damaged: it is removed", value)
        with suppress(OSError):  # another user's, in a shared cache
            cached_objects.remove(Path(self._get_cache_path(key, value)))
        return None
