"""A candidate on the Hugging Face hub: its folder, its card, and its files for onnxruntime where it is exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from flows.engine import nothing_to_do
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import stage_name
from tasks.artifacts.paths import CARDS, FINETUNED, ONNX


class CannotPublish(EckartError):
    """What is to be published is not there, or the hub does not take it; the message says what to do."""


@dataclass(frozen=True)
class Published:
    """What went, or would go, to a repository of the hub."""

    files: dict[str, Path]
    """Path there → file here."""
    url: str | None
    """Of the commit; None where nothing was sent."""

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def publish(candidate: str, repository: str, private: bool = False, dry_run: bool = False) -> Published:
    """Bring a candidate to the hub, as one commit; the repository is made if there is none.

    Args:
        repository: USER/NAME.

    Raises:
        CannotPublish: there is no such candidate, its stages are not up to date, or the hub refuses.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise CannotPublish(f"{repository} is no repository of the hub: write USER/NAME ({error})") from error
    files = _files(candidate)
    if dry_run:
        return Published(files, None)
    api = HfApi()
    operations = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message=f"{candidate}, by Eckart")
    except Exception as error:  # those of its HTTP client have no class that is huggingface_hub's
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise CannotPublish("the hub does not know you: `hf auth login`, or set HF_TOKEN") from error
        raise CannotPublish(f"the hub does not take {repository}: {error}") from error
    return Published(files, str(commit.commit_url))


def _files(candidate: str) -> dict[str, Path]:
    planned = {one.name: one for one in nothing_to_do.plan()}
    made, exported = stage_name("finetune", candidate), stage_name("export", candidate)
    if made not in planned:
        known = [name.partition("@")[2] for name in planned if name.startswith(stage_name("finetune", ""))]
        raise CannotPublish(f"there is no candidate {candidate}: write one of {', '.join(known)}")
    if stale := [name for name in (made, exported, "compare") if name in planned and not planned[name].cached]:
        raise CannotPublish(f"{', '.join(stale)} is not up to date: run `eckart run` first")
    folders = {"": FINETUNED / candidate} | ({"onnx/": ONNX / candidate} if exported in planned else {})
    files = {f"{prefix}{file.name}": file for prefix, folder in folders.items() for file in sorted(folder.iterdir())}
    return files | {"README.md": CARDS / f"{candidate}.md"}
