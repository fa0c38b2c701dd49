"""Score a model on the test and the validation split and on other texts, in the stages dense, evaluate and export.

Test scores are for reports and for the gates of a promotion; validation scores are for choosing candidates and trials.
Other texts show what a language model lost where it was not calibrated.
"""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.artifacts.errors import StageError
from tasks.artifacts.results_schema import Score, Scores, predictions_file
from tasks.artifacts.task_spec import Split, Task, load_split, load_task, load_texts
from tasks.config.params_file import section
from tasks.config.schema import Evaluate, Model
from tasks.data.loading import with_originals
from tasks.models.device import to_device
from tasks.models.model_io import load
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import Scored
from tasks.runtime.stage_runner import say
from tasks.scoring.generation_samples import continuations
from tasks.scoring.zero_shot import zero_shot

Predictions = Mapping[Split, pd.DataFrame]
"""Split → per-example results (`Scored.predictions`)."""


@dataclass(frozen=True)
class Scorer:
    """Task, settings and examples with which all models of a study are scored.

    Attributes:
        splits: split → its examples.
    """

    task: Task
    settings: Evaluate
    splits: Mapping[Split, pd.DataFrame]

    def load(self, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load a model of the study, and its tokenizer, to score it: on the devices that model.device_map says."""
        model, tokenizer = load(folder, kind_of(self.task).auto, device_map=section("model", Model).device_map)
        to_device(model)
        return model, tokenizer

    def score_on(self, split: Split, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Scored:
        """Score a model on all examples of a split, and print the score with the model's `name`."""
        size = self.settings.batch_size
        scored = kind_of(self.task).score(model, tokenizer, self.splits[split], size, split)
        say(f"{name}: {self.task.metric} {scored.score.metric:.6g} on {scored.score.examples} {split} examples")
        return scored

    def on_texts(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> dict[str, Score]:
        """Score a language model on each text of evaluate.texts, as if it were the test split.

        Raises:
            StageError: a text is shorter than a block, or the tokenizer lacks its separator.
        """
        scores: dict[str, Score] = {}
        for text, rows in load_texts().items() if self.settings.texts else ():
            settings, task = self.settings.texts[text], self.task
            sizes = {**task.sizes, "test": settings.examples}
            kind = kind_of(task.model_copy(update={"sizes": sizes, "separator": settings.separator}))
            try:
                scores[text] = kind.score(model, tokenizer, rows, self.settings.batch_size, "test").score
            except StageError as error:
                raise StageError(f"evaluate.texts.{text}: {error}") from error
            say(f"{name}: {task.metric} {scores[text].metric:.6g} on {scores[text].examples} examples of {text}")
        return scores

    def all_scores(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
    ) -> tuple[Scores, Predictions]:
        """Return all scores of a model that may be promoted, and its per-example results."""
        settings = self.settings
        tasks = zero_shot(model, tokenizer, settings.zero_shot, settings.batch_size)  # first, since it may lack data
        test = self.score_on("test", model, tokenizer, name)
        validation = self.score_on("validation", model, tokenizer, name)
        scores = Scores(
            score=test.score,
            validation=validation.score,
            zero_shot=tasks,
            texts=self.on_texts(model, tokenizer, name),
            continuations=continuations(model, tokenizer, self.task, self.splits["test"], settings.continuation),
        )
        return scores, {"test": test.predictions, "validation": validation.predictions}


def load_scorer(*splits: Split) -> Scorer:
    """Load the task, the settings and these splits of the study in the current folder."""
    task = load_task()
    frames = {split: with_originals(load_split(split), task) for split in splits}
    return Scorer(task, section("evaluate", Evaluate), frames)


def same_weights(before: Path, after: Path) -> bool:
    """Whether two folders have equal weights, as after a training without steps."""
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in (before, after)]
    return names[0] == names[1] and all(filecmp.cmp(before / name, after / name, shallow=False) for name in names[0])


def write_predictions(name: str, models: Mapping[str, Predictions]) -> None:
    """Save the per-example results of several models in one file, with columns `model` and `split`.

    Args:
        name: name of a candidate, or `dense`; it becomes the name of the file.
        models: name of a model in the file, such as `recovered` → its results.
    """
    path = predictions_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        table.assign(model=model, split=split)
        for model, by_split in models.items()
        for split, table in by_split.items()
    ]
    pd.concat(parts, ignore_index=True).to_parquet(path, index=False)
