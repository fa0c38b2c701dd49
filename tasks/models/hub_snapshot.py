"""Download a model from the Hugging Face hub: one commit, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tasks.artifacts.errors import StageError

_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.spm", "*.bpe", "*.tiktoken", "*.tokenizer", "README.md")
"""Patterns of all files but the weights: configs, tokenizers, the model card, and files of other libraries."""


def snapshot(name: str, revision: str | None, files: Sequence[str] = _SMALL) -> Path:
    """Download files of a model, and return the folder in the hub's cache that has them. It is named by the commit.

    transformers asks the hub for each file when it needs it. So the branch may move between two files, and a file that
    the hub does not give, such as that of a prompt, counts as absent. If the hub does not answer, the commit that was
    downloaded last is returned, if it is whole.

    Args:
        name: id of the model.
        revision: commit, branch or tag; None: the newest commit.
        files: patterns of file names. By default, all files but the weights.

    Raises:
        StageError: there is no such model or revision, or the hub does not give a file and the cache does not have it.
    """
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(files))
        get_cached_repo_tree(name, revision=Path(folder).name)
    except RepositoryNotFoundError as error:
        advice = "correct model.base or, if it is private, log in with `hf auth login`"
        raise StageError(f"the hub has no model {name}: {advice}") from error
    except RevisionNotFoundError as error:
        raise StageError(f"the hub has no revision {revision} of {name}: correct model.revision") from error
    except CachedRepoTreeNotFoundError as error:  # another program has put some files there
        raise StageError(f"the cache of the hub may lack files of {name}: run again when the hub answers") from error
    except (OSError, HTTPError) as error:
        cause = str(error.__cause__ or error).partition("\n")[0]  # the rest is advice on the hub's library
        raise StageError(f"the hub does not give {name}: {cause}. Run again when it answers") from error
    return Path(folder)
