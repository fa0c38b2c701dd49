"""DVC's `Repo` with repairs: damaged databases, run cache entries and objects are removed before DVC uses them."""

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


class RepairingRepo(Repo):
    """A `Repo` of DVC that repairs its databases and its run cache before it uses them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage_cache = _WholeEntries(self)

    @cached_property
    def site_cache_dir(self) -> str:
        folder = str(super().site_cache_dir)
        site_cache.heal(Path(folder))
        return folder


class _WholeEntries(StageCache):
    """A run cache of DVC that removes damaged entries, and the corrupt objects that an entry names, before use.

    An entry holds the inputs and outputs of one run of a stage, and is named by the digest of its content. DVC does
    not check this digest: an entry that was cut off between two outputs is valid YAML, and the restored stage would
    lack an output. DVC does not read the objects that an entry names either, so it would restore and push corrupt ones.
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
        if value is None:  # the folder has no entries; DVC's own code fails on this
            return None
        try:
            entry = super()._load_cache(key, value)
            if entry is None or _get_cache_hash(entry) == value:
                return entry
        except PermissionError:  # in a shared cache, the entry may belong to another user
            return None
        except (DvcException, OSError):
            pass
        log.warning("%s of DVC's run cache is damaged: it is removed", value)
        with suppress(OSError):  # the entry may belong to another user
            cached_objects.remove(Path(self._get_cache_path(key, value)))
        return None
