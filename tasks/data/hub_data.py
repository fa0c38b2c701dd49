"""Load a data set of the Hugging Face hub: the commit and the configuration that are asked for, also from the cache."""

from __future__ import annotations

from pathlib import Path

import datasets
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.cache.cache import Cache
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, constants
from huggingface_hub.file_download import repo_folder_name

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
    try:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
    except ValueError as error:
        if "in the cache" not in str(error):  # several configurations are, or another than the one that is asked for
            raise
        builder = None
    if builder is None or isinstance(builder, Cache):  # what the library loaded last, of any commit and configuration
        builder = _in_cache(name, config, revision)
    builder.download_and_prepare()
    return dict(builder.as_dataset())


def _in_cache(name: str, config: str | None, revision: str | None) -> Cache:
    """Return what is asked for from the cache of `datasets`, in which the hub's cache names commits and the default."""
    missing = f"the hub does not give {name}"
    hub = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"))
    commit, branch = revision or "", hub / "refs" / (revision or "main")
    if not COMMIT.fullmatch(commit):
        commit = branch.read_text().strip() if branch.is_file() else ""
    if not commit:
        raise StageError(
            f"{missing}, and the cache does not know which commit {revision or 'main'} is: run again when the hub "
            "does, or correct revision"
        )
    config = config or _default_config(hub / "snapshots" / commit / "README.md")
    *owner, own = name.split("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(own)]))
    found = {path.parts[-3]: path.parts[-2] for path in folder.glob(f"*/*/{commit}")}
    if config not in found:
        present = f"has only the configuration {', '.join(sorted(found))} of" if found else "does not have"
        raise StageError(
            f"{missing}, and the cache {present} its commit {commit}: run again when the hub does"
            + (", or name the configuration in config" if found else "")
        )
    say(f"the hub does not give {name}: its commit {commit} is read from the cache")
    return Cache(dataset_name=own, repo_id=name, config_name=config, version=found[config], hash=commit)


def _default_config(card: Path) -> str:
    """Return the default configuration of a data set, which its card may name."""
    if not card.is_file():
        return "default"
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
    return str(configs.get_default_config_name() or "default")
