"""Files beside the weights of an embedding model, with which `SentenceTransformer(folder)` reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tasks.artifacts.errors import StageError
from tasks.artifacts.pooling import Pooling
from tasks.artifacts.task_spec import Task

_KINDS = ["Transformer", "Pooling", "Normalize"]
_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_PROMPTS = "config_sentence_transformers.json"
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TEXTS = tuple(f"sentence_{family}_config.json" for family in _FAMILIES)
"""Files of which a model has one. It says how texts are made ready for the tokenizer."""
_FILES = (_MODULES, _POOLING, _PROMPTS, *_TEXTS)
_TOKENIZER = "tokenizer_config.json"
_WORDS = 1000  # that tell whether a tokenizer changes letters to lower case
_FLAGS: Mapping[Pooling, str] = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "max": "max_tokens",
    "lasttoken": "lasttoken",
}
"""Name of a pooling → end of its key `pooling_mode_…`, which all versions of sentence-transformers read."""


class Settings(NamedTuple):
    """Settings that the files of an embedding model have; None for each that they do not state."""

    pooling: Pooling | None
    prompt: str | None
    """Text before each text, by default."""
    prompt_is_pooled: bool
    max_length: int | None
    """Largest number of tokens of a text."""


def settings_of(folder: Path) -> Settings:
    """Read the settings of an embedding model in `folder`.

    Raises:
        StageError: the model has a module or a pooling that is not supported.
    """
    return _settings(folder, _read(folder))


def of_base(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> dict[str, str]:
    """Return the files of the base model for `task`, name → content; those that it lacks are made, if they are needed.

    Raises:
        StageError: the base model pools otherwise than data.pooling says, has a module that is not supported, puts a
            prompt before each text of which data.prefix says nothing, cuts texts to fewer tokens than data.max_length,
            or changes their letters to lower case, which its tokenizer does not.
    """
    if task.kind != "embedding":
        return {}
    if config.is_encoder_decoder:
        raise StageError(f"model.base is a {config.model_type} with a decoder: embeddings need a model without one")
    files = _read(folder)
    own, pooling = _settings(folder, files), task.pooling or "mean"
    if own.pooling not in (None, pooling):
        raise StageError(f"model.base pools by {own.pooling}, and data.pooling by {pooling}: write {own.pooling} there")
    if own.prompt and task.prefix is None:
        raise StageError(f"model.base puts {own.prompt!r} before each text: set data.prefix to it, or to '' to omit it")
    if task.prefix and not own.prompt_is_pooled:
        raise StageError("model.base does not pool the tokens of a prompt, but those of data.prefix are: write ''")
    if own.max_length and task.max_length > own.max_length:
        raise StageError(
            f"model.base reads {own.max_length} tokens of a text: write {own.max_length} for data.max_length"
        )
    _check_lower_case(files, tokenizer)
    flags = {f"pooling_mode_{end}": name == pooling for name, end in _FLAGS.items()}
    made = {
        _MODULES: [_module(0, ""), _module(1, "1_Pooling"), _module(2, "2_Normalize")],
        _POOLING: {"word_embedding_dimension": config.get_text_config().hidden_size, **flags},
    }
    return {name: json.dumps(content, indent=2) for name, content in made.items()} | files


def pooling_of(folder: Path) -> Pooling | None:
    """Return the pooling of an embedding model in `folder`; None if it is none, or embeds in another way."""
    try:
        return settings_of(folder).pooling
    except StageError:
        return None


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files that `of_base` returned."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)


def copy(source: Path, folder: Path) -> None:
    """Copy the files from one folder of a model to another, with further modules; a model of another kind has none."""
    write(folder, _read(source))
    for module in json.loads((source / _MODULES).read_text()) if (source / _MODULES).exists() else ():
        name = Path(module["path"]).name
        if name not in ("", "..") and (source / name).is_dir():  # so that no path leads out of `folder`
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)


def _read(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in _FILES if (folder / name).exists()}


def _parsed(files: Mapping[str, str], name: str) -> Mapping[str, Any]:
    return json.loads(files[name]) if name in files else {}


def _settings(folder: Path, files: Mapping[str, str]) -> Settings:
    if _MODULES in files and not _are_known(modules := json.loads(files[_MODULES])):
        raise StageError(
            f"model.base has the modules {', '.join(_kinds(modules))}, and data.task embedding knows Transformer, "
            "Pooling and Normalize, with the transformer's files at the top of the folder and Pooling's in 1_Pooling: "
            "compress its transformer in Python, with eckart.compress and eckart.embedding_loss"
        )
    config, prompts = _parsed(files, _POOLING), _parsed(files, _PROMPTS)
    stated = _pooling(config) if config else None
    if stated and stated not in _FLAGS:
        raise StageError(f"model.base pools by {stated}: data.task embedding knows {', '.join(_FLAGS)}")
    return Settings(
        pooling=next((name for name in _FLAGS if name == stated), None),
        prompt=(prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or None,
        prompt_is_pooled=config.get("include_prompt", True),
        max_length=_max_length(folder, files),
    )


def _max_length(folder: Path, files: Mapping[str, str]) -> int | None:
    lengths = [_parsed(files, name).get("max_seq_length") for name in _TEXTS]
    if (tokenizer := folder / _TOKENIZER).exists():  # where sentence-transformers looks if no file of its own says it
        lengths.append(json.loads(tokenizer.read_text()).get("model_max_length"))
    return next(filter(None, lengths), None)


def _check_lower_case(files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())[:_WORDS]
    if any(_parsed(files, name).get("do_lower_case") for name in _TEXTS) and any(
        tokenizer(word.lower())["input_ids"] != tokenizer(word.upper())["input_ids"]
        for word in (*ascii_lowercase, *words)
    ):
        raise StageError(
            "model.base changes texts to lower case, and its tokenizer does not: let the tokenizer do it, as by "
            "AutoTokenizer.from_pretrained(FOLDER, do_lower_case=True).save_pretrained(FOLDER)"
        )


def _are_known(modules: list[dict[str, Any]]) -> bool:
    paths = [module["path"] for module in modules[:2]]
    return _kinds(modules) in (_KINDS, _KINDS[:2]) and paths == ["", Path(_POOLING).parent.name]


def _kinds(modules: list[dict[str, Any]]) -> list[str]:
    return [str(module["type"]).rpartition(".")[2] for module in modules]


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
