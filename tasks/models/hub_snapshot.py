"""Download a model from the Hugging Face hub: one commit, all or nothing."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tasks.artifacts.errors import StageError

_SMALL = (
    *("*.json", "*.txt", "*.jinja", "README.md"),
    *("*.model", "*.spm", "*.bpe", "*.codes", "*.tiktoken", "*.tokenizer"),
)
"""Patterns of all files but the weights, in all folders: configs, tokenizers, the model card."""
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


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
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
        _check_whole(name, folder)
    except GatedRepoError as error:
        advice = f"accept them at https://huggingface.co/{name}, and log in with `hf auth login`"
        raise StageError(f"the hub gives {name} only to users who accept its terms: {advice}") from error
    except RepositoryNotFoundError as error:
        advice = "correct model.base or, if it is private, log in with `hf auth login`"
        raise StageError(f"the hub has no model {name}: {advice}") from error
    except RevisionNotFoundError as error:
        raise StageError(f"the hub has no revision {revision} of {name}: correct model.revision") from error
    except (OSError, HTTPError) as error:
        if getattr(error, "errno", None) in _OF_DISK:
            raise StageError(f"the cache of the hub cannot be written: {error}") from error
        cause = str(error.__cause__ or error).partition("\n")[0]  # the rest is advice on the hub's library
        raise StageError(f"the hub does not give {name}: {cause}. Run again when it answers") from error
    return folder


def _check_whole(name: str, folder: Path) -> None:
    """Raise an error of the hub if `folder` may lack files, since another program made it and the hub does not answer.

    snapshot_download lists the files of a commit beside it in the cache, if that can be written.
    """
    try:
        get_cached_repo_tree(name, revision=folder.name)
    except CachedRepoTreeNotFoundError:
        list(HfApi().list_repo_tree(name, revision=folder.name))
