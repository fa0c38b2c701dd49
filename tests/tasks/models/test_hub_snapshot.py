"""A model of the hub: all its files are of one commit, and none that the hub does not give counts as absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download
from transformers import BertModel

from tasks.artifacts.errors import StageError
from tasks.models import hub_snapshot
from tasks.models.base_model import Base, load_base
from tests.flows.hub import Hub, hub
from tests.tasks.models.test_base_model import params
from tests.workspace import a_task, tiny_config, tiny_tokenizer

OLD, NEW = "0" * 40, "1" * 40
POOLING = "1_Pooling/config.json"
EMBEDDING = a_task("embedding", (), "recall_at_10").model_copy(update={"pooling": "cls"})


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub whose branch `main` has moved once, with an embedding model in both commits."""
    monkeypatch.chdir(tmp_path)
    with hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", found.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
        found.newest["models/someone/base"] = NEW
        for commit, layers in ((OLD, 1), (NEW, 2)):
            folder = tmp_path / commit
            BertModel(tiny_config(num_hidden_layers=layers)).save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            own = {POOLING: b'{"pooling_mode_cls_token": true}', "README.md": b"---\nlicense: mit\n---\n"}
            found.commits[f"someone/base@{commit}"] = {**files, **own}
        yield found


def load(revision: str | None = None) -> Base:
    return load_base(params("someone/base").model_copy(update={"revision": revision}), EMBEDDING)


@pytest.mark.parametrize(("revision", "commit", "layers"), [(None, NEW, 2), (OLD, OLD, 1)])
def test_all_files_are_of_one_commit(there: Hub, revision: str | None, commit: str, layers: int) -> None:
    base = load(revision)
    assert base.model.config.num_hidden_layers == layers
    assert json.loads(base.files[POOLING])["pooling_mode_cls_token"]
    assert set(there.asked) == {commit}


@pytest.mark.parametrize("status", [0, 403, 503])
@pytest.mark.parametrize("name", [POOLING, "README.md", "tokenizer_config.json", "model.safetensors"])
def test_a_file_that_the_hub_does_not_give_is_not_taken_for_absent(there: Hub, name: str, status: int) -> None:
    """Or the model would lose its pooling or its license, or would be called one without safetensors."""
    there.failing[name] = status
    with pytest.raises(StageError, match="the hub does not give someone/base"):
        load()
    there.failing.clear()
    assert load().files


def test_without_the_hub_the_cache_answers_if_it_has_all(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have put only some of the files there."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        hf_hub_download("someone/base", name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StageError, match="the hub does not give"):
        load()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    online = load()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load().files == online.files


def test_a_cache_that_takes_no_list_of_files_is_used_while_the_hub_answers(
    there: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub._snapshot_download.write_tree_cache", lambda *given: None)
    assert load().model


def test_a_name_or_revision_that_the_hub_does_not_have_is_named(there: Hub) -> None:
    for name, revision, message in (("other", None, "no model someone/other"), ("base", "v2", "no revision v2")):
        with pytest.raises(StageError, match=message):
            hub_snapshot.snapshot(f"someone/{name}", revision)


def test_a_model_of_the_hub_names_no_place_on_this_machine(there: Hub, tmp_path: Path) -> None:
    load().model.save_pretrained("saved")
    assert str(tmp_path) not in Path("saved/config.json").read_text()
