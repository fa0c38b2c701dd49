"""Load a data set of the Hugging Face hub: the commit and the configuration that are asked for, also from the cache."""

from __future__ import annotations

from pathlib import Path

import datasets
from datasets.packaged_modules.cache.cache import Cache
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, try_to_load_from_cache

from tasks.artifacts.errors import StageError
from tasks.data.hub_ids import COMMIT
from tasks.runtime.stage_runner import say


def load_from_hub(name: str, config: str | None, revision: str | None) -> dict[str, datasets.Dataset]:
    """Return split → rows of a data set of the hub or, if the hub does not give it, of its cache.

    Args:
        name: id of the data set.
        config: configuration; None: the default one.
        revision: commit, branch or tag; None: the newest commit or, from the cache, the newest that the cache knows.

    Raises:
        StageError: the hub does not give it, and the cache does not have it.
        Exception: one of many types, of `datasets` and the hub client, if the cache has nothing of this data set.
    """
    builder = datasets.load_dataset_builder(name, config, revision=revision)
    if isinstance(builder, Cache):
        builder = _in_cache(builder, name, config, revision)
    builder.download_and_prepare()
    return dict(builder.as_dataset())


def _in_cache(newest: Cache, name: str, config: str | None, revision: str | None) -> Cache:
    """Return what is asked for in place of `newest`: what the library loaded last, of any commit and configuration."""
    missing = f"the hub does not give {name}"
    card = try_to_load_from_cache(name, "README.md", revision=revision, repo_type="dataset")
    commit = Path(card).parent.name if isinstance(card, str) else revision
    if commit is None or not COMMIT.fullmatch(commit):
        raise StageError(
            f"{missing}, and the cache does not know which commit {revision or 'main'} is: run again when the hub "
            "does, or set revision to a commit"
        )
    found = {path.parts[-3]: path.parts[-2] for path in Path(newest.cache_dir).parents[2].glob(f"*/*/{commit}")}
    config = config or (_default_config(card) if isinstance(card, str) else None) or "default"
    if config not in found:
        present = f"has only the configuration {', '.join(found)} of" if found else "does not have"
        raise StageError(
            f"{missing}, and the cache {present} its commit {commit}: run again when the hub does"
            + (", or name the configuration in config" if found else "")
        )
    say(f"the hub does not give {name}: its commit {commit} is read from the cache")
    version = found[config]
    return Cache(dataset_name=newest.dataset_name, repo_id=name, config_name=config, version=version, hash=commit)


def _default_config(card: str) -> str | None:
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
    return str(name) if (name := configs.get_default_config_name()) else None
