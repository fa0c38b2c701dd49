"""Files beside the weights of an embedding model, with which `SentenceTransformer(folder)` reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from tasks.artifacts.errors import StageError
from tasks.artifacts.pooling import Pooling
from tasks.artifacts.task_spec import Task

_KINDS = ["Transformer", "Pooling", "Normalize"]
_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_PROMPTS = "config_sentence_transformers.json"
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_FILES = (_MODULES, _POOLING, _PROMPTS, *(f"sentence_{family}_config.json" for family in _FAMILIES))
_FLAGS: Mapping[Pooling, str] = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "max": "max_tokens",
    "lasttoken": "lasttoken",
}
"""Name of a pooling → end of its key `pooling_mode_…`, which all versions of sentence-transformers read."""


def of_base(source: str, revision: str | None, config: PreTrainedConfig, task: Task) -> dict[str, str]:
    """Return the files of the base model for `task`, name → content; those that it lacks are made, if they are needed.

    Args:
        source: a folder, or the id of a model on the hub.

    Raises:
        StageError: the base model pools otherwise than data.pooling says, has a module that is not supported, or puts a
            prompt before each text of which data.prefix says nothing.
    """
    if task.kind != "embedding":
        return {}
    if config.is_encoder_decoder:
        raise StageError(f"model.base is a {config.model_type} with a decoder: embeddings need a model without one")
    files = {name: content for name in _FILES if (content := _content(source, name, revision)) is not None}
    if _MODULES in files:
        _check_modules(json.loads(files[_MODULES]))
    pooling = task.pooling or "mean"
    if _POOLING in files:
        _check_pooling(json.loads(files[_POOLING]), pooling, task.prefix)
    if _PROMPTS in files:
        _check_prompt(json.loads(files[_PROMPTS]), task.prefix)
    width = config.get_text_config().hidden_size
    flags = {f"pooling_mode_{end}": name == pooling for name, end in _FLAGS.items()}
    made = {
        _MODULES: [_module(0, ""), _module(1, "1_Pooling"), _module(2, "2_Normalize")],
        _POOLING: {"word_embedding_dimension": width, **flags},
    }
    return {name: json.dumps(content, indent=2) for name, content in made.items()} | files


def pooling_of(source: str | Path) -> Pooling | None:
    """Return the pooling of an embedding model; None if `source` is none, or embeds in another way.

    Args:
        source: the model's folder.
    """
    content, modules = (_content(source, name, None) for name in (_POOLING, _MODULES))
    known = modules is None or _are_known(json.loads(modules))
    stated = _pooling(json.loads(content)) if content and known else None
    return next((name for name in _FLAGS if name == stated), None)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files that `of_base` returned."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)


def copy(source: Path, folder: Path) -> None:
    """Copy the files from one folder of a model to another, with further modules; a model of another kind has none."""
    write(folder, {name: (source / name).read_text() for name in _FILES if (source / name).exists()})
    for module in json.loads((source / _MODULES).read_text()) if (source / _MODULES).exists() else ():
        name = Path(module["path"]).name
        if name not in ("", "..") and (source / name).is_dir():  # so that no path leads out of `folder`
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)


def _content(source: str | Path, name: str, revision: str | None) -> str | None:
    file = cached_file(str(source), name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file).read_text()


def _check_modules(modules: list[dict[str, Any]]) -> None:
    if not _are_known(modules):
        raise StageError(
            f"model.base has the modules {', '.join(_kinds(modules))}, and data.task embedding knows Transformer, "
            "Pooling and Normalize, with the transformer's files at the top of the folder and Pooling's in 1_Pooling: "
            "compress its transformer in Python, with eckart.compress and eckart.embedding_loss"
        )


def _are_known(modules: list[dict[str, Any]]) -> bool:
    paths = [module["path"] for module in modules[:2]]
    return _kinds(modules) in (_KINDS, _KINDS[:2]) and paths == ["", Path(_POOLING).parent.name]


def _kinds(modules: list[dict[str, Any]]) -> list[str]:
    return [str(module["type"]).rpartition(".")[2] for module in modules]


def _check_pooling(config: Mapping[str, Any], pooling: Pooling, prefix: str | None) -> None:
    if (own := _pooling(config)) != pooling:
        advice = f"write {own} for data.pooling" if own in _FLAGS else f"Eckart knows {', '.join(_FLAGS)}"
        raise StageError(f"model.base pools by {own}, and data.pooling by {pooling}: {advice}")
    if prefix and not config.get("include_prompt", True):
        raise StageError("model.base does not pool the tokens of a prompt, but those of data.prefix are: write null")


def _check_prompt(config: Mapping[str, Any], prefix: str | None) -> None:
    prompt = (config.get("prompts") or {}).get(config.get("default_prompt_name"))
    if prompt and prefix is None:
        raise StageError(f"model.base puts {prompt!r} before each text: set data.prefix to it, or to '' to omit it")


def _pooling(config: Mapping[str, Any]) -> str:
    """Return the name of the pooling in a config of sentence-transformers, or several names."""
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [name.removeprefix("pooling_mode_") for name, on in config.items() if "pooling_mode_" in name and on]
        stated = [next((own for own, end in _FLAGS.items() if end == name), name) for name in stated]
    return stated if isinstance(stated, str) else " and ".join(stated) or "mean"


def _module(place: int, folder: str) -> dict[str, Any]:
    kind = folder.partition("_")[2] or "Transformer"
    return {"idx": place, "name": str(place), "path": folder, "type": f"sentence_transformers.models.{kind}"}
