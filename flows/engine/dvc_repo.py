"""DVC's repository, which takes nothing of its own that is damaged: its databases, and what its run cache names."""

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
    """DVC's, with what it keeps healed before it is used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage_cache = _WholeEntries(self)

    @cached_property
    def site_cache_dir(self) -> str:
        folder = str(super().site_cache_dir)
        site_cache.heal(Path(folder))
        return folder


class _WholeEntries(StageCache):
    """The run cache. An entry is named by the digest of what it says, and DVC would take what is left of one.

    Cut off between two outputs it is valid, and an output is missing once the stage is restored. Of the objects that an
    entry names DVC reads none: a corrupt one would be taken, and pushed.
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
        if value is None:  # a folder that has lost its last entry, on which DVC fails
            return None
        try:
            found = super()._load_cache(key, value)
            if found is None or _get_cache_hash(found) == value:
                return found
        except PermissionError:  # another user's, in a cache that several share
            return None
        except (DvcException, OSError):
            pass
        log.warning("%s of DVC's run cache is damaged: it is removed", value)
        with suppress(OSError):  # another user's, in a shared cache
            cached_objects.remove(Path(self._get_cache_path(key, value)))
        return None
