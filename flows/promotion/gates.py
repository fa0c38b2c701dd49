"""The gates of a promotion: score candidate and champion again on test examples, and compare scores with limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flows.engine import cached_objects
from flows.engine.stages import Outcome
from tasks.artifacts.errors import EckartError, StageError
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.task_spec import SPLITS, Task, load_split
from tasks.config.schema import Promotion
from tasks.data.loading import with_originals
from tasks.models import task_head
from tasks.models.model_io import UNLOADABLE, check_length, load
from tasks.nlp_tasks import TASK_NAMES, kind_of, task_class
from tasks.nlp_tasks.nlp_task import Answers, NlpTask, Scored
from tasks.report import choose_candidate
from tasks.report.choose_candidate import Gate, Measured, short
from tasks.report.result_files import read_predictions
from tasks.report.results import DENSE
from tasks.runtime.stage_runner import set_up_torch
from tasks.scoring.bootstrap import resampled, standard_error

TEST = SPLITS / "test.parquet"
SMOKED = 8
"""Number of test examples on which the served version must give the same answers as the scored model."""

_LONGEST = 2000  # largest number of characters of a running text that are sent to a served version
_FLIPPED = 2  # answers that may differ from the recorded ones
_UNBOUNDED_DIFFERENCE = 1e-3  # allowed difference from the recorded metric ÷ the recorded metric


class Refused(EckartError):
    """A promotion was refused. The message names the measurements beyond their limits, or another reason."""

    def __init__(self, message: str, gates: Sequence[Gate] = ()) -> None:
        super().__init__(message)
        self.gates = tuple(gates)


@dataclass(frozen=True)
class Terms:
    """Settings of a promotion."""

    study: str
    metric: MetricName
    threads: int
    batch_size: int
    wanted: Promotion


@dataclass(frozen=True)
class Recorded:
    """A candidate of the study, with the recorded results of its stages."""

    name: str
    content: str
    """DVC's digest of the candidate's folder."""
    task: Task
    pairs: bool
    """Whether each input of the served model is a pair of texts."""
    test: str
    """DVC's digest of the test examples."""
    metric: float
    """The candidate's metric on the test examples."""
    dense: float
    """The original model's metric on the test examples."""
    validation: Measured
    """Measurements for the limits of params.yaml, with the metric on the validation examples."""
    outcomes: tuple[Outcome, ...]
    """Results of the candidate's own stages."""
    inputs: dict[str, str]
    """Data and models that the candidate was made from: path → DVC's digest."""


@dataclass(frozen=True)
class Champion:
    """The present champion: its files, and its name in messages."""

    files: Path
    name: str


def measure(
    files: Path, candidate: Recorded, champion: Champion | None, terms: Terms
) -> tuple[list[Gate], list[Answers]]:
    """Score the candidate and the champion on the test examples, in the same way as the stages score models.

    Args:
        files: folder of the candidate's model, downloaded from the registry.
        candidate: the results that the study recorded.
        champion: the champion; None if the registry has none.

    Returns:
        All gates, and the candidate's answers to `questions`.

    Raises:
        Refused: the files or the test examples differ from the study's, or the champion cannot be scored.
    """
    if digest(TEST) != candidate.test:
        raise Refused(f"{TEST} has changed since the study was found up to date: run `eckart run` first")
    task, examples = candidate.task, len(load_split("test"))
    gates = [_same_files(files, candidate)]
    if not gates[0].passed:
        raise Refused(gates[0].words, gates)
    set_up_torch(terms.threads)  # as the stages do, because it decides the last bits of a sum
    model, tokenizer = load(files, kind_of(task).auto)
    ours = _scored(model, tokenizer, task, terms)
    metric = ours.score.metric
    gates.append(as_recorded(metric, candidate.metric, examples, terms, _differing(candidate.name, ours)))
    gates += choose_candidate.gates(_measured(candidate, ours, task), terms.metric, terms.wanted)
    if champion:
        scored = _champions(champion, tokenizer, task, terms)
        error = _error(task, ours.predictions, scored.predictions)
        gates.append(gain(metric, scored.score.metric, error, champion, terms))
    return gates, kind_of(task).answers(model, tokenizer, _smoked(task), terms.batch_size)


def _measured(candidate: Recorded, scored: Scored, task: Task) -> Measured:
    """Return the candidate's measurements, with metrics and standard error replaced by those on the test examples."""
    predictions = read_predictions(Path(), DENSE[0], "dense")
    return replace(
        candidate.validation,
        metric=scored.score.metric,
        dense=candidate.dense,
        standard_error=_error(task, scored.predictions, predictions[predictions.model == DENSE[1]]),
    )


def _error(task: Task, ours: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """Return the standard error of the difference of two models' metrics, given their per-example results."""
    drawn = resampled(task, {"ours": ours, "theirs": theirs})
    return standard_error(drawn["ours"] - drawn["theirs"])


def questions(task: Task) -> pd.DataFrame:
    """Return the input for a served version: the first test examples, without labels."""
    return _smoked(task).drop(columns="label", errors="ignore")


def _smoked(task: Task) -> pd.DataFrame:
    rows = load_split("test").head(SMOKED)
    return rows.assign(text=rows["text"].str[:_LONGEST]) if kind_of(task).running_text else rows


def _same_files(files: Path, candidate: Recorded) -> Gate:
    content = digest(files) if files.is_dir() else "nothing"
    words = f"the registry has {content}, but the study measured {candidate.content} ({candidate.name}): "
    if content == "nothing":
        words += "if the store of its files is away, bring it back; else "
    words += "delete that version and run `promote` again"
    return Gate("files other than measured", float(content != candidate.content), 0.0, True, words, "too many")


def as_recorded(metric: float, recorded: float, examples: int, terms: Terms, differing: int | None = None) -> Gate:
    """Return the gate that compares the candidate's results with those that the study recorded.

    The files are the same, so this gate checks that the code computes the same here as in the study. (choice) The
    metric may differ by 2 ÷ examples. Another processor, or another alignment of memory, rounds sums differently, and
    that may change the answer to an example with two equally likely classes. One such example changes an accuracy by
    1 ÷ examples. Exact match, ROUGE and the F1 of answers are means over the examples. They change by 1 ÷ examples at
    most, even if another token changes all later tokens. A correlation of numbers changes by far less, because there is
    no border between classes. An answer in a rare class may change an F1 or a Matthews correlation by far more, so two
    answers may differ whatever they change.

    A perplexity is the exponential of a mean loss: rounding of the loss multiplies the perplexity, so its limit is
    relative. (choice) A thousandth is far above the rounding of single precision, and below a notable difference
    between two candidates.

    Args:
        differing: number of examples whose answers differ from the recorded ones; None if answers are no classes.
    """
    difference, allowed = abs(metric - recorded), _FLIPPED / examples
    if not METRICS[terms.metric].bounded:
        allowed = _UNBOUNDED_DIFFERENCE * abs(recorded)
    words = f"{METRICS[terms.metric].title} is {short(metric)} here, but the study recorded {short(recorded)}"
    if differing is not None and differing <= _FLIPPED:
        allowed = max(allowed, difference)
    words += f"; a difference of at most {short(allowed)} is allowed"
    return Gate("difference from the record", difference, allowed, True, words, "too far off")


def _differing(name: str, scored: Scored) -> int | None:
    """Return how many answers differ from those that the study recorded for the candidate; None if not of classes."""
    if "guess" not in scored.predictions:
        return None
    recorded = read_predictions(Path(), name, "evaluate")
    pairs = zip(scored.predictions["guess"], recorded[recorded.model == "recovered"]["guess"], strict=True)
    return sum(not np.array_equal(ours, theirs) for ours, theirs in pairs)


def gain(metric: float, theirs: float, error: float, champion: Champion, terms: Terms) -> Gate:
    """Return the gate that compares the candidate's metric with the champion's.

    Args:
        metric, theirs: the metrics of the candidate and of the champion.
        error: standard error of their difference.
    """
    gained, least = METRICS[terms.metric].worse_by(theirs, metric), terms.wanted.least_gain
    words = f"{METRICS[terms.metric].title} {short(metric)} against {short(theirs)} of the champion ({champion.name}) "
    chance = terms.wanted.chance(error)
    words += f"is a gain of {short(gained)}; at least {short(least)} is required, minus {short(chance)} for chance"
    return Gate("gain over the champion", gained, least, False, words, "too low", error, chance)


def _champions(champion: Champion, ours: PreTrainedTokenizerBase, task: Task, terms: Terms) -> Scored:
    """Score the champion, which may be a model of another study, on the test examples of this study.

    Raises:
        Refused: the champion cannot be loaded, or its answers cannot be compared with the candidate's.
    """
    name = f"the champion ({champion.name})"
    advice = "name another model in promotion.model, or remove the alias champion"
    if not champion.files.is_dir():
        raise Refused(f"{name} has no files that `promote` registered, and cannot be compared with: {advice}")
    try:
        model, tokenizer = load(champion.files, kind_of(task).auto)
        check_length(model, task.max_length, "data.max_length")
        check_length(model, task.target_length or 0, "data.target_length")
    except (StageError, *UNLOADABLE) as error:
        raise Refused(f"{name} cannot be loaded for these test examples ({error}): {advice}") from error
    if difference := _difference(model, tokenizer, ours, task):
        raise Refused(f"{name} {difference}; they cannot be compared: {advice}")
    return _scored(model, tokenizer, task, terms)


def _difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, task: Task
) -> str:
    """Return in words why the answers of `model` have another meaning than this study's; empty if they do not."""
    architectures = model.config.architectures or ()
    if type(model).__name__ not in architectures:  # transformers has then given the model a new, untrained head
        return (
            f"is a {', '.join(architectures) or 'model without a head'}, and this study needs a {type(model).__name__}"
        )
    if kind_of(task).problem_type:
        config = model.config
        theirs = _meaning(config.problem_type, task_head.outputs(config))
        wanted = kind_of(task).meaning(task.labels)
        return f"answers {theirs}, and this study {wanted}" if theirs != wanted else ""
    if kind_of(task).running_text and tokenizer.get_vocab() != ours.get_vocab():
        return "has another vocabulary, so that its perplexity is that of other tokens"
    return ""


def _meaning(problem_type: str | None, labels: Sequence[object]) -> str:
    """Return in words what a head answers: its labels, or a number."""
    kinds = (task_class(name) for name in TASK_NAMES)
    return next((kind for kind in kinds if kind.problem_type == problem_type), NlpTask).meaning(labels)


def _scored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, terms: Terms) -> Scored:
    try:
        test = with_originals(load_split("test"), task)
        return kind_of(task).score(model, tokenizer, test, terms.batch_size, "test")
    except StageError as error:
        raise Refused(str(error)) from error


def digest(path: Path) -> str:
    """Return DVC's digest of a file or folder."""
    return cached_objects.digest_of(cached_objects.measured(path))
