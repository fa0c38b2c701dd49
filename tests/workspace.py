"""A workspace that is valid and tiny: sixty reviews, a BERT of two layers, two recipes at one keep."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from ruamel.yaml import YAML
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Task
from tasks.config.resolved import resolve
from tasks.config.schema import read
from tasks.nlp_tasks import TaskName
from tasks.nlp_tasks._prediction import Collate

REPOSITORY = Path(__file__).parents[1]
REVIEWS = "data/raw/reviews.csv"
BASE = "models/base/tiny"

SUBJECTS = ("plot", "acting", "music", "ending", "script", "cast")
WORDS = {
    "positive": ("brilliant", "moving", "clever", "fresh", "warm"),
    "negative": ("dull", "flat", "weak", "silly", "stale"),
}
_CHANGES: dict[str, Any] = {
    "study": {"name": "tiny", "recipes": ["svd", "kfac"], "keeps": [0.5]},
    "threads": {"shared": 1, "candidate": 1},
    "data": {
        "source": REVIEWS,
        "config": None,
        "revision": None,
        "splits": {"train": "train", "validation": None, "test": None},
        "shares": {"validation": 0.15, "test": 0.25},
        "columns": {"text": "text", "text_pair": None, "label": "label"},
        "task": "classification",
        "metric": "accuracy",
        "sizes": {"train": 32, "validation": 8, "test": 12, "calibration": 16},
        "max_length": 16,
        "seed": 0,
    },
    "model": {"base": BASE, "revision": None},
    "teacher": {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3},
    "importance": {"batch_size": 8},
    "recipes": {
        "svd": {"recovery": {"steps": 2, "batch_size": 8}},
        "kfac": {"recovery": {"steps": 2, "batch_size": 8}, "ranks": {"multiple": 1}},  # its maps are small
    },
    "evaluate": {"batch_size": 8},
    "export": {"recipes": []},
    "benchmark": {"shapes": [[2, 8]], "repetitions": 6},
}


def tiny_workspace(root: Path, **changes: Any) -> Path:
    """Fill `root` with params.yaml, data/raw and models/base; `changes` are merged into the parameters.

    `tiny_workspace(root, data={"seed": 1})` changes the seed of the split and nothing else of `data`.
    """
    write_params(root, tiny_params(**changes))
    write_reviews(root / REVIEWS)
    write_base(root / BASE)
    (root / "data/reference").mkdir(parents=True, exist_ok=True)
    (root / "data/reference/.gitkeep").touch()
    return root


def tiny_params(**changes: Any) -> dict[str, Any]:
    """The repository's own parameters, cut down to seconds, and with `changes`."""
    params = resolve(merged(repository_params(), _CHANGES))
    params["recipes"] = {name: params["recipes"][name] for name in ("svd", "kfac")}
    return merged(params, changes)


def repository_params() -> dict[str, Any]:
    """The default study with all defaults."""
    return plain(resolve(read(REPOSITORY / "params.yaml")))


def write_params(root: Path, params: dict[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    YAML().dump(params, root / "params.yaml")


def plain(content: Any) -> Any:
    """`content` with no part shared, as YAML's anchors would have it."""
    return json.loads(json.dumps(content))


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`, mappings merged key by key."""
    result = copy.deepcopy(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def reviews() -> pd.DataFrame:
    """Sixty sentences, all different, half of them positive; every second word tells which."""
    rows = [
        {"text": f"the {subject} is {first} and {second}", "label": label}
        for label, words in WORDS.items()
        for subject, (first, second) in itertools.product(SUBJECTS, itertools.pairwise((*words, words[0])))
    ]
    return pd.DataFrame(rows)


def write_reviews(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    reviews().to_csv(file, index=False)


def a_task(kind: TaskName, labels: Sequence[str], metric: MetricName, max_length: int = 16) -> Task:
    """What the extract stage writes down of a data set."""
    sizes = {"train": 32, "validation": 8, "test": 12, "calibration": 16}
    return Task(
        kind=kind,
        labels=tuple(labels),
        metric=metric,
        max_length=max_length,
        target_length=None,
        prefix=None,
        stride=None,
        sizes=sizes,
        seed=0,
    )


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """WordPiece over the words of the reviews."""
    words = ["the", "is", "and", *SUBJECTS, *itertools.chain(*WORDS.values())]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertTokenizer(vocab={token: position for position, token in enumerate(tokens)})


def collate() -> Collate:
    """Rows of `rows` → a padded batch."""
    return DataCollatorWithPadding(tiny_tokenizer())


def tiny_config(**changes: Any) -> BertConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertConfig(**{"vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 64, **sizes, **changes})


def bert(**changes: Any) -> PreTrainedModel:
    """A classifier, the same every time, and in eval mode, as `from_pretrained` gives it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(tiny_config(**changes)).eval()


def rows() -> Dataset:
    """The reviews as model inputs, unpadded."""
    frame = reviews()
    labels = (frame["label"] == "positive").astype(int).tolist()
    return Dataset.from_dict({**tiny_tokenizer()(frame["text"].tolist()), "labels": labels})


def write_base(folder: Path) -> None:
    """A BERT without a head, the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(tiny_config()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def run_stage(name: str, recipe: str | None = None, keep: str | None = None) -> None:
    """What `python -m tasks.NAME --recipe RECIPE --keep KEEP` does, in this process and its working directory."""
    candidate = ["--recipe", recipe, "--keep", keep] if recipe and keep else []
    before = sys.argv, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    sys.argv = [name, *candidate]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that the module was imported before
            runpy.run_module(f"tasks.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before[0]
        torch.set_num_threads(before[1])
        torch.use_deterministic_algorithms(before[2])


def run_study(*recipes: str, exported: bool = False) -> None:
    """Run all stages of a study of these recipes at keep 0.5, in this process."""
    shared = ["extract", "check", "teacher", "control", "dense", *["export_dense"] * exported, "importance"]
    for stage in shared:
        run_stage(stage)
    for recipe in recipes:
        for stage in ["search", "factorize", "finetune", "evaluate", *["export"] * exported]:
            run_stage(stage, recipe, "0.5")
    run_stage("benchmark")
    run_stage("compare")


def digests(folder: Path) -> dict[str, str]:
    """File → digest of its bytes, for every file under `folder`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
