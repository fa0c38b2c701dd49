"""The gates of a promotion: score the candidate and the champion again, and hold each number against its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flows.engine import cached_objects
from flows.engine.stages import Outcome
from tasks.artifacts.errors import EckartError
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.task_spec import SPLITS, Task, load_split, load_task
from tasks.models.model_io import UNLOADABLE, check_length, load
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import Answers, Scored
from tasks.report import choose_candidate
from tasks.report.choose_candidate import Gate, Measured, Promotion, short
from tasks.report.results import DENSE, read_rows
from tasks.runtime.stage_runner import StageError, quiet
from tasks.scoring.bootstrap import resampled, standard_error

TEST = SPLITS / "test.parquet"
SMOKED = 8
"""Number of test examples to which a version must give the scored model's answers."""

_LONGEST = 2000  # characters of a running text that a version is asked about
_UNBOUNDED_DIFFERENCE = 1e-3  # from the record, ÷ the record


class Refused(EckartError):
    """Nothing was promoted; the message says which number failed by how much, or the other reason."""

    def __init__(self, message: str, gates: Sequence[Gate] = ()) -> None:
        super().__init__(message)
        self.gates = tuple(gates)


@dataclass(frozen=True)
class Terms:
    """The parameters of a promotion."""

    study: str
    metric: MetricName
    threads: int
    batch_size: int
    wanted: Promotion


@dataclass(frozen=True)
class Recorded:
    """A candidate as the study recorded it."""

    name: str
    content: str
    """DVC's digest of its folder."""
    test: str
    """DVC's digest of the test examples."""
    metric: float
    """On the test examples."""
    teacher: float
    """The original model's metric on the test examples."""
    validation: Measured
    """What was measured with the metric on the validation examples, which choose."""
    outcomes: tuple[Outcome, ...]
    """The results of its own stages."""
    inputs: dict[str, str]
    """The data and models that it was made from: path → DVC's digest."""


@dataclass(frozen=True)
class Champion:
    """The files and the name of the model to replace."""

    files: Path
    name: str


def measure(
    files: Path, candidate: Recorded, champion: Champion | None, terms: Terms
) -> tuple[list[Gate], list[Answers]]:
    """Score the candidate and the champion on the test examples, as the stages do.

    Args:
        files: the candidate's files in the registry.

    Returns:
        All gates, and the candidate's answers to `questions`.

    Raises:
        Refused: the files or the test examples are not those of the study, or the champion cannot be scored.
    """
    if digest(TEST) != candidate.test:
        raise Refused(f"{TEST} has changed since the study was found up to date: run `eckart run` first")
    task, rows = load_task(), len(load_split("test"))
    gates = [_same_files(files, candidate)]
    if not gates[0].passed:
        raise Refused(gates[0].words, gates)
    # As the stages compute, whose number of threads decides the last bits.
    torch.set_num_threads(terms.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    quiet()
    model, tokenizer = load(files, kind_of(task).auto)
    ours = _scored(model, tokenizer, task, terms)
    metric = ours.score.metric
    gates.append(as_recorded(metric, candidate.metric, rows, terms))
    gates += choose_candidate.gates(_measured(candidate, ours, task), terms.metric, terms.wanted)
    if champion:
        theirs = _champions(champion, tokenizer, task, terms)
        error = _error(task, ours.rows, theirs.rows)
        gates.append(gain(metric, theirs.score.metric, error, champion, terms))
    return gates, kind_of(task).answers(model, tokenizer, _smoked(task), terms.batch_size)


def _measured(candidate: Recorded, scored: Scored, task: Task) -> Measured:
    """Return the candidate's new score, on the examples on which the study scored the original model."""
    rows = read_rows(Path(), DENSE[0], "dense")
    return replace(
        candidate.validation,
        metric=scored.score.metric,
        teacher=candidate.teacher,
        standard_error=_error(task, scored.rows, rows[rows.model == DENSE[1]]),
    )


def _error(task: Task, ours: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """Return the standard error of the difference of two models, from their results on the same examples."""
    drawn = resampled(task, {"ours": ours, "theirs": theirs})
    return standard_error(drawn["ours"] - drawn["theirs"])


def questions() -> pd.DataFrame:
    """Return the first test examples without their labels, as a version's input."""
    return _smoked(load_task()).drop(columns="label", errors="ignore")


def _smoked(task: Task) -> pd.DataFrame:
    rows = load_split("test").head(SMOKED)
    return rows.assign(text=rows["text"].str[:_LONGEST]) if kind_of(task).running_text else rows


def _same_files(files: Path, candidate: Recorded) -> Gate:
    content = digest(files) if files.is_dir() else "nothing"
    words = (
        f"the registry has {content}, but the study measured {candidate.content} ({candidate.name}): "
        "delete that version and run `promote` again"
    )
    return Gate("files other than measured", float(content != candidate.content), 0.0, True, words, "too many")


def as_recorded(metric: float, recorded: float, rows: int, terms: Terms) -> Gate:
    """Compare the metric with the record: the files are equal, and this gate shows that so is the code that runs them.

    Another processor rounds sums differently, and some do so with another alignment of memory. That may flip an example
    whose two likeliest classes are even. An example moves an accuracy by 1 ÷ examples, and an F1 by about twice that.
    It moves an exact match, a ROUGE or an F1 of answers, which are means over the examples, by 1 ÷ examples at most,
    even where one other token changes all that follow; and an accuracy of tokens by less. A correlation moves by far
    less, because no example is on an edge.

    A perplexity is the exponential of a mean loss, so that rounding in the loss multiplies it: its limit is relative.
    (choice) A thousandth is far above the rounding of single precision, and below a notable difference between two
    candidates.
    """
    difference, allowed = abs(metric - recorded), 2 / rows
    if not METRICS[terms.metric].bounded:
        allowed = _UNBOUNDED_DIFFERENCE * abs(recorded)
    words = f"{_title(terms)} is {short(metric)} here, but the study recorded {short(recorded)}"
    words += f"; a difference of at most {short(allowed)} is allowed"
    return Gate("difference from the record", difference, allowed, True, words, "too far off")


def gain(metric: float, theirs: float, error: float, champion: Champion, terms: Terms) -> Gate:
    """Return the gate of the gain over the champion, whose metric on the same examples is `theirs`.

    Args:
        error: the standard error of the difference.
    """
    gained, least = METRICS[terms.metric].worse_by(theirs, metric), terms.wanted.least_gain
    words = f"{_title(terms)} {short(metric)} against {short(theirs)} of the champion ({champion.name}) "
    chance = terms.wanted.chance(error)
    words += f"is a gain of {short(gained)}; at least {short(least)} is required, minus {short(chance)} for chance"
    return Gate("gain over the champion", gained, least, False, words, "too low", error, chance)


def _title(terms: Terms) -> str:
    return METRICS[terms.metric].title


def _champions(champion: Champion, ours: PreTrainedTokenizerBase, task: Task, terms: Terms) -> Scored:
    """Score the champion, which may come from another study, on the test examples of this one.

    Args:
        ours: the candidate's tokenizer.
    """
    what = f"the champion ({champion.name})"
    advice = "name another model in promotion.model, or remove the alias champion"
    if not champion.files.is_dir():
        raise Refused(f"{what} was not registered by `promote` and cannot be compared with: {advice}")
    try:
        model, tokenizer = load(champion.files, kind_of(task).auto)
        check_length(model, task.max_length, "data.max_length")
        check_length(model, task.target_length or 0, "data.target_length")
    except (StageError, *UNLOADABLE) as error:
        raise Refused(f"{what} cannot be loaded for these test examples ({error}): {advice}") from error
    if difference := _difference(model, tokenizer, ours, task):
        raise Refused(f"{what} {difference}; they cannot be compared: {advice}")
    return _scored(model, tokenizer, task, terms)


def _difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, task: Task
) -> str:
    """Say why the answers of `model` mean something else than this study's; empty where they do not."""
    known = model.config.architectures or ()
    if type(model).__name__ not in known:  # its head is then a new one for this task
        return f"is a {', '.join(known) or 'model without a head'}, and this study needs a {type(model).__name__}"
    if kind_of(task).problem_type:
        config = model.config
        theirs = _meaning(config.problem_type, list((config.id2label or {}).values()))
        wanted = _meaning(kind_of(task).problem_type, task.labels)
        return f"answers {theirs}, and this study {wanted}" if theirs != wanted else ""
    if kind_of(task).running_text and tokenizer.get_vocab() != ours.get_vocab():
        return "has another vocabulary, so that its perplexity is that of other tokens"
    return ""


def _meaning(problem_type: str | None, labels: Sequence[object]) -> str:
    """Say what the outputs of a head with labels, or of a regression, stand for."""
    if problem_type == "regression":
        return "a number"
    return ("any of " if problem_type == "multi_label_classification" else "") + ", ".join(map(str, labels))


def _scored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, terms: Terms) -> Scored:
    try:
        return kind_of(task).score(model, tokenizer, load_split("test"), terms.batch_size, "test")
    except StageError as error:
        raise Refused(str(error)) from error


def digest(path: Path) -> str:
    """Return DVC's digest of a file or folder."""
    return cached_objects.digest_of(cached_objects.measured(path))
