"""How the stages dense and evaluate score a model: on test rows, which reports and gates read, and on validation rows,
by which candidates and trials are chosen."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.artifacts.results_schema import Scores, rows_file
from tasks.artifacts.task_spec import Split, load_split, load_task
from tasks.config.schema import Evaluate, section
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import Scored
from tasks.runtime.stage_runner import say
from tasks.scoring.generation_samples import continuations
from tasks.scoring.zero_shot import zero_shot

Rows = Mapping[Split, pd.DataFrame]
"""What each row of some splits contributed to a score."""


def score_on(split: Split, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Scored:
    """Score all rows of a split, and say so of the model under this `name`."""
    task = load_task()
    size = section("evaluate", Evaluate).batch_size
    found = kind_of(task).score(model, tokenizer, load_split(split), size, split)
    say(f"{name}: {task.metric} {found.score.metric:.4f} on {found.score.rows} {split} rows")
    return found


def all_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, known: Scored | None = None
) -> tuple[Scores, Rows]:
    """All that is asked of a model that could be shipped, and what each row contributed.

    Args:
        known: its score on the test split, where that is known already.
    """
    test, settings = known or score_on("test", model, tokenizer, name), section("evaluate", Evaluate)
    validation = score_on("validation", model, tokenizer, name)
    scores = Scores(
        score=test.score,
        validation=validation.score,
        zero_shot=zero_shot(model, tokenizer, settings.zero_shot, settings.batch_size),
        continuations=continuations(model, tokenizer, settings.continuation),
    )
    return scores, {"test": test.rows, "validation": validation.rows}


def same_weights(one: Path, other: Path) -> bool:
    """Whether training took no step from one folder to the other, so that there is nothing new to score."""
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


def write_rows(name: str, models: Mapping[str, Rows]) -> None:
    """Write what each row contributed to the scores of some models; columns `model` and `split` say which these are."""
    path = rows_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [rows.assign(model=model, split=split) for model, some in models.items() for split, rows in some.items()]
    pd.concat(parts, ignore_index=True).to_parquet(path, index=False)
