"""The gates of a promotion: a candidate measured anew, beside the champion, and each number held against its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flows.engine import cached_objects
from flows.engine.stages import Outcome
from tasks.artifacts.errors import EckartError
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.task_spec import SPLITS, Task, load_split, load_task
from tasks.config import promotion_limits
from tasks.config.promotion_limits import Gate, Measured, Promotion, short
from tasks.models.model_io import UNLOADABLE, check_length, load
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import Answers, Scored
from tasks.report.results import DENSE, read_rows
from tasks.runtime.stage_runner import StageError, quiet
from tasks.scoring.bootstrap import resampled, standard_error

TEST = SPLITS / "test.parquet"
SMOKED = 8
"""Test rows to which a version must answer as the model that was scored does."""

_LONGEST = 2000  # characters of a running text that a version is asked about
_UNBOUNDED_DIFFERENCE = 1e-3  # from the record, ÷ the record


class Refused(EckartError):
    """Nothing was promoted; the message says which number failed by how much, or what else stands against it."""

    def __init__(self, message: str, gates: Sequence[Gate] = ()) -> None:
        super().__init__(message)
        self.gates = tuple(gates)


@dataclass(frozen=True)
class Terms:
    """What a promotion reads of params.yaml."""

    study: str
    metric: MetricName
    threads: int
    batch_size: int
    wanted: Promotion


@dataclass(frozen=True)
class Recorded:
    """A candidate as the study has recorded it."""

    name: str
    content: str
    """DVC's digest of its folder."""
    test: str
    """DVC's digest of the test rows."""
    metric: float
    """On the test rows."""
    validation: float
    """The same on the validation rows, by which it is chosen."""
    teacher: float
    """The teacher's metric on the test rows."""
    parameters: int
    """Of its targets."""
    keep: float
    """The same ÷ those of the teacher's targets."""
    speedup: float
    outcomes: tuple[Outcome, ...]
    """Of its own stages."""
    inputs: dict[str, str]
    """Of the data and models that it follows from: path → DVC's digest."""


@dataclass(frozen=True)
class Champion:
    """The files of the model that is to be replaced, and what to call it."""

    files: Path
    name: str


def measure(
    files: Path, candidate: Recorded, champion: Champion | None, terms: Terms
) -> tuple[list[Gate], list[Answers]]:
    """Score the candidate and the champion on the test rows, as the stages do.

    Args:
        files: the candidate as the registry has it.

    Returns:
        All gates, and what the candidate answers to `questions`.

    Raises:
        Refused: the files or the test rows are not those that the study measured, or the champion cannot be scored.
    """
    if digest(TEST) != candidate.test:
        raise Refused(f"{TEST} has changed since the study was found up to date: run `eckart run` first")
    task, rows = load_task(), len(load_split("test"))
    gates = [_same_files(files, candidate)]
    if not gates[0].passed:
        raise Refused(gates[0].words, gates)
    with _as_stages(terms.threads):
        model, tokenizer = load(files, kind_of(task).auto)
        ours = _scored(model, tokenizer, task, terms)
        metric = ours.score.metric
        gates.append(as_recorded(metric, candidate.metric, rows, terms))
        gates += promotion_limits.gates(_measured(candidate, ours, task), terms.metric, terms.wanted)
        if champion:
            theirs = _champions(champion, tokenizer, task, terms)
            error = _error(task, ours.rows, theirs.rows)
            gates.append(gain(metric, theirs.score.metric, error, champion, terms))
        return gates, kind_of(task).answers(model, tokenizer, _smoked(task), terms.batch_size)


def _measured(candidate: Recorded, scored: Scored, task: Task) -> Measured:
    """As the candidate was scored anew, on the rows on which the study has scored the teacher."""
    rows = read_rows(Path(), DENSE[0], "dense")
    return Measured(
        metric=scored.score.metric,
        teacher=candidate.teacher,
        standard_error=_error(task, scored.rows, rows[rows.model == DENSE[1]]),
        parameters=candidate.parameters,
        keep=candidate.keep,
        speedup=candidate.speedup,
    )


def _error(task: Task, one: pd.DataFrame, other: pd.DataFrame) -> float:
    """The standard error of the difference of two models, by what the same rows contributed to each."""
    drawn = resampled(task, {"one": one, "other": other})
    return standard_error(drawn["one"] - drawn["other"])


def questions() -> pd.DataFrame:
    """The first test rows without their labels, as a version is asked about them."""
    return _smoked(load_task()).drop(columns="label", errors="ignore")


def _smoked(task: Task) -> pd.DataFrame:
    rows = load_split("test").head(SMOKED)
    return rows.assign(text=rows["text"].str[:_LONGEST]) if kind_of(task).running_text else rows


def _same_files(files: Path, candidate: Recorded) -> Gate:
    found = digest(files) if files.is_dir() else "nothing"
    words = (
        f"the registry has {found} where the study has measured {candidate.content} ({candidate.name}): "
        "delete that version and run `promote` again"
    )
    return Gate("files other than measured", float(found != candidate.content), 0.0, True, words, "too many")


def as_recorded(metric: float, recorded: float, rows: int, terms: Terms) -> Gate:
    """The files are the same to the byte; this shows that what runs them is, too.

    Sums are rounded otherwise on another processor, and on some where memory is aligned otherwise. That may move a row
    whose two likeliest classes are even. A row moves an accuracy by 1 ÷ rows, and an F1 by about twice that. It moves
    an exact match, a ROUGE or an F1 of answers, which are means over the rows, by 1 ÷ rows at most, even where one
    other token changes all that is generated after it; and an accuracy of tokens by less. A correlation has no rows on
    an edge, and moves by far less.

    A perplexity has no rows on an edge and no largest value. It is the exponential of a mean loss, so that what
    rounding adds to the loss multiplies the perplexity: the limit is relative. (choice) A thousandth is far above the
    rounding of single precision, and below what one would call a difference between two candidates.
    """
    difference, allowed = abs(metric - recorded), 2 / rows
    if not METRICS[terms.metric].bounded:
        allowed = _UNBOUNDED_DIFFERENCE * abs(recorded)
    words = f"{_title(terms)} is {short(metric)} here, but the study recorded {short(recorded)}"
    words += f"; a difference of {short(allowed)} is allowed"
    return Gate("difference from the record", difference, allowed, True, words, "too far off")


def gain(metric: float, theirs: float, error: float, champion: Champion, terms: Terms) -> Gate:
    """What the candidate has over the champion, of which `theirs` is the metric on the same rows.

    Args:
        error: the standard error of the difference.
    """
    gained, least = METRICS[terms.metric].worse_by(theirs, metric), terms.wanted.least_gain
    words = f"{_title(terms)} {short(metric)} against {short(theirs)} of the champion ({champion.name}) "
    chance = terms.wanted.chance(error)
    words += f"is a gain of {short(gained)}; {short(least)} is asked for, less {short(chance)} for chance"
    return Gate("gain over the champion", gained, least, False, words, "too low", error, chance)


def _title(terms: Terms) -> str:
    return METRICS[terms.metric].title


def _champions(champion: Champion, ours: PreTrainedTokenizerBase, task: Task, terms: Terms) -> Scored:
    """What the champion reaches on the test rows of this study; it may come from another one.

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
        raise Refused(f"{what} cannot be loaded for these test rows ({error}): {advice}") from error
    if difference := _difference(model, tokenizer, ours, task):
        raise Refused(f"{what} {difference}; they cannot be compared: {advice}")
    return _scored(model, tokenizer, task, terms)


_NUMBER = "a number"


def _difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, task: Task
) -> str:
    """Why the answers of `model` mean something else than this study's, in words; empty where they do not."""
    known = model.config.architectures or ()
    if type(model).__name__ not in known:  # its head was then made up for this task
        return f"is a {', '.join(known) or 'model without a head'}, and this study needs a {type(model).__name__}"
    if kind_of(task).outputs_are_labels:
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
        return _NUMBER
    return ("any of " if problem_type == "multi_label_classification" else "") + ", ".join(map(str, labels))


def _scored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, terms: Terms) -> Scored:
    try:
        return kind_of(task).score(model, tokenizer, load_split("test"), terms.batch_size, "test")
    except StageError as error:
        raise Refused(str(error)) from error


@contextmanager
def _as_stages(threads: int) -> Iterator[None]:
    """Compute as the stages do, whose number of threads decides the last bits; torch is left as it was."""
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    quiet()
    try:
        with torch.random.fork_rng(devices=[]):  # the Trainer sets the seed
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])


def digest(path: Path) -> str:
    """What DVC calls the content of a file or folder."""
    return cached_objects.digest_of(cached_objects.measured(path))
