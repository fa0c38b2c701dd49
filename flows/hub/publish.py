"""Publish a candidate on the Hugging Face hub: the model, its card, and the ONNX files if it was exported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from flows.engine import nothing_to_do
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import stage_name
from tasks.artifacts.paths import CARDS, FINETUNED, ONNX

_WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|onnx/(model|int8|model_quantized)\.onnx"
)  # names of ours


@dataclass(frozen=True)
class Published:
    """Result of `publish`: the files of a candidate in a repository of the hub."""

    files: dict[str, Path]
    """Path in the repository → local file."""
    url: str | None
    """URL of the commit; None after a dry run."""
    removed: tuple[str, ...] = ()
    """Paths in the repository of weights that this candidate does not have, which the commit removed."""


def publish(candidate: str, repository: str, private: bool = False, dry_run: bool = False) -> Published:
    """Upload a candidate to a repository of the hub as one commit. Create the repository if it does not exist.

    Weights that an earlier commit put there under other names are removed: tools would load them in place of these.

    Args:
        repository: USER/NAME.
        private: whether a new repository is private.
        dry_run: whether only to return the files that would be uploaded.

    Raises:
        EckartError: the candidate does not exist or is not up to date, or the hub refuses it.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise EckartError(f"{repository} is not the name of a repository: write USER/NAME ({error})") from error
    files = _files(candidate)
    if dry_run:
        return Published(files, None)
    api = HfApi()
    added = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        removed = [path for path in api.list_repo_files(repository) if _WEIGHTS.fullmatch(path) and path not in files]
        deleted = [CommitOperationDelete(path, is_folder=False) for path in removed]
        commit = api.create_commit(repository, [*added, *deleted], commit_message=f"{candidate}, by Eckart")
    except Exception as error:  # errors of the HTTP client have no base class in huggingface_hub
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise EckartError("the hub does not know you: run `hf auth login`, or set HF_TOKEN") from error
        raise EckartError(f"the hub does not take {repository}: {error}") from error
    return Published(files, str(commit.commit_url), tuple(removed))


def _files(candidate: str) -> dict[str, Path]:
    exported = stage_name("export", candidate)
    planned = nothing_to_do.plan_with(candidate, exported, "compare")
    folders = {"": FINETUNED / candidate} | ({"onnx/": ONNX / candidate} if exported in planned else {})
    files = {
        f"{prefix}{file.relative_to(folder)}": file
        for prefix, folder in folders.items()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return files | {"README.md": CARDS / f"{candidate}.md"}
