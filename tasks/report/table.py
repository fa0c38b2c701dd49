"""The comparison as a table: for machines as CSV, for people with readable and relative numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tasks.artifacts.results_schema import CONTROL_NAME, TRIVIAL_NAME
from tasks.nlp_tasks import kind_of
from tasks.report.goals import goal_rows
from tasks.report.numbers import between, count, percent, rank, score, size, times, times_between
from tasks.report.results import CONTROL, DENSE, TRIVIAL, CandidateResults, Results, ScoredModel
from tasks.report.runtimes import TITLES, runtimes_table, ways
from tasks.scoring.bootstrap import LEVEL, RESAMPLES

COLUMNS = (
    "recipe",
    "keep",
    "metric",
    "dense",
    "factorized",
    "recovered",
    "target_parameters",
    "model_parameters",
    "macs_per_token",
    "bytes",
    "speedup",
    "speedup_low",
    "speedup_high",
    "search_steps",
    "average_rank",
    "shaped",
    "control",
    "from_dense_low",
    "from_dense_high",
    "from_control_low",
    "from_control_high",
)


ZERO_SHOT = "zero_shot."
"""Begins the columns that come after these: TASK.METRIC of lm-eval."""


@dataclass(frozen=True)
class Relative:
    """A number of a candidate and its share of the dense model's."""

    value: str
    share: str


@dataclass(frozen=True)
class Compared:
    """A metric beside that of a reference: what it retains of it, and the interval of the difference."""

    retained: str
    difference: str


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as the dense model, and the interval of that; none of the dense model itself."""

    median: str
    interval: str


@dataclass(frozen=True)
class Row:
    """A candidate as people read it."""

    name: str
    steps: str
    """Of training before the factorization."""
    shaped: str
    factorized: str
    recovered: str
    mark: str
    """`*` for the best at its keep, `≈` for one that the test rows cannot tell from it."""
    of_dense: Compared
    of_control: Compared
    targets: Relative
    model: Relative
    macs: Relative
    bytes: Relative
    speedup: Speedup
    order: Mapping[str, float | None]
    """By what the page sorts each column; empty of what it does not sort."""


@dataclass(frozen=True)
class Shaped:
    """What shaping did to the ranks of the dense weights, as people read it."""

    recipe: str
    keep: str
    average_rank: str
    full_rank: str


def to_csv(results: Results) -> str:
    """A line for the control and each candidate, every number in full; last zero-shot tasks, with the dense model's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    dense = _asked(results.dense.zero_shot)
    writer.writerow(
        [*COLUMNS, *(f"{ZERO_SHOT}{name}" for name in dense), *(f"dense.{ZERO_SHOT}{name}" for name in dense)]
    )
    control = _asked(results.dense.control.zero_shot)
    writer.writerow([*_control_values(results), *(control[name] for name in dense), *dense.values()])
    for one in results.candidates:
        found = _asked(one.evaluation.zero_shot)
        writer.writerow([*_values(results, one), *(found[name] for name in dense), *dense.values()])
    return text.getvalue()


def _asked(zero_shot: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{task}.{metric}": value for task, values in zero_shot.items() for metric, value in values.items()}


def _values(results: Results, one: CandidateResults) -> Iterable[str | float | None]:
    """In the order of COLUMNS; None is left empty."""
    speedup = one.benchmark.speedup
    return (
        one.recipe,
        one.keep,
        results.task.metric,
        results.dense.score.metric,
        one.factorized,
        one.recovered,
        one.evaluation.target_parameters,
        one.evaluation.size.model_parameters,
        one.evaluation.size.macs_per_token,
        one.evaluation.size.bytes,
        speedup.median,
        speedup.low,
        speedup.high,
        one.decision.steps,
        one.decision.average_rank,
        one.shaped,
        *_compared_values(results, one.after),
    )


def _control_values(results: Results) -> Iterable[str | float | None]:
    """The control as a recipe that keeps all; its speed is the dense model's."""
    dense = results.dense
    return (
        CONTROL_NAME,
        "1",
        results.task.metric,
        dense.score.metric,
        None,
        dense.control.score.metric,
        results.target_parameters,
        dense.size.model_parameters,
        dense.size.macs_per_token,
        dense.size.bytes,
        *(1.0, 1.0, 1.0),
        0,
        None,
        None,
        *_compared_values(results, CONTROL),
    )


def _compared_values(results: Results, one: ScoredModel) -> Iterable[float]:
    ends = [results.difference(one, reference) for reference in (DENSE, CONTROL)]
    return results.dense.control.score.metric, *(end for each in ends for end in (each.low, each.high))


def row(results: Results, one: CandidateResults) -> Row:
    """What the page and the terminal show of a candidate."""
    dense, small = results.dense.size, one.evaluation.size
    after, before, speedup = one.evaluation.target_parameters, results.target_parameters, one.benchmark.speedup
    return Row(
        name=one.name,
        steps=f"{one.decision.steps:,}",
        shaped=_score(one.shaped),
        factorized=_score(one.factorized),
        recovered=score(one.recovered),
        mark=_mark(results, one),
        of_dense=_compared(results, one.after, one.recovered, DENSE),
        of_control=_compared(results, one.after, one.recovered, CONTROL),
        targets=Relative(count(after), percent(after / before)),
        model=Relative(count(small.model_parameters), percent(small.model_parameters / dense.model_parameters)),
        macs=Relative(count(small.macs_per_token), percent(small.macs_per_token / dense.macs_per_token)),
        bytes=Relative(size(small.bytes), percent(small.bytes / dense.bytes)),
        speedup=Speedup(times(speedup.median), times_between(speedup.low, speedup.high)),
        order={
            "steps": one.decision.steps,
            "shaped": one.shaped,
            "factorized": one.factorized,
            "recovered": one.recovered,
            "of_dense": results.retained(one.recovered, DENSE),
            "of_control": results.retained(one.recovered, CONTROL),
            "targets": after,
            "model": small.model_parameters,
            "macs": small.macs_per_token,
            "bytes": small.bytes,
            "speedup": speedup.median,
        },
    )


def zero_shot(results: Results) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The metrics of lm-eval's tasks, and of the dense model and each candidate the name and the values."""
    dense = _asked(results.dense.zero_shot)
    control = (CONTROL_NAME, _asked(results.dense.control.zero_shot))
    models = [("dense", dense), control, *((one.name, _asked(one.evaluation.zero_shot)) for one in results.candidates)]
    return list(dense), [(name, [score(values[head]) for head in dense]) for name, values in models]


def shaped(results: Results) -> list[Shaped]:
    """The candidates whose weights were shaped, in the study's order."""
    ranks = [(one, one.decision.average_rank) for one in results.candidates]
    return [
        Shaped(one.recipe, one.keep, rank(average), rank(results.full_rank))
        for one, average in ranks
        if average is not None
    ]


def dense_rows(results: Results) -> list[Row]:
    """The dense model and its control, in the columns of a candidate."""
    dense, whole = results.dense.size, percent(1)
    return [
        Row(
            name=name,
            steps="",
            shaped="",
            factorized="",
            recovered=score(results.metric_of(one)),
            mark="",
            of_dense=_compared(results, one, results.metric_of(one), DENSE),
            of_control=_compared(results, one, results.metric_of(one), CONTROL),
            targets=Relative(count(results.target_parameters), whole),
            model=Relative(count(dense.model_parameters), whole),
            macs=Relative(count(dense.macs_per_token), whole),
            bytes=Relative(size(dense.bytes), whole),
            speedup=Speedup(times(1), ""),
            order={},
        )
        for name, one in (("dense", DENSE), (CONTROL_NAME, CONTROL))
    ]


def trivial_row(results: Results) -> Row:
    """The trivial baseline, in the columns of a candidate: it has a metric and no model."""
    nothing, metric = Relative("–", ""), results.metric_of(TRIVIAL)
    return Row(
        name=TRIVIAL_NAME,
        steps="",
        shaped="",
        factorized="",
        recovered=score(metric),
        mark="",
        of_dense=_compared(results, TRIVIAL, metric, DENSE),
        of_control=_compared(results, TRIVIAL, metric, CONTROL),
        targets=nothing,
        model=nothing,
        macs=nothing,
        bytes=nothing,
        speedup=Speedup("–", ""),
        order={},
    )


def _score(metric: float | None) -> str:
    return "–" if metric is None else score(metric)


def _mark(results: Results, one: CandidateResults) -> str:
    best = results.at(one.keep)[0]
    return "*" if results.is_best(one) else "≈" if one in results.rivals(best) else ""


def _compared(results: Results, one: ScoredModel, metric: float, reference: ScoredModel) -> Compared:
    """With no difference of a model from itself."""
    share, found = results.retained(metric, reference), results.difference(one, reference)
    words = "" if one == reference else between(found.low, found.high, metric)
    return Compared("–" if share is None else percent(share), words)


def legend(best: str) -> str:
    """What the marks and the intervals of the tables mean; `best` says how the best at a keep is marked."""
    return (
        f"{best}; ≈ these test rows cannot tell it from the best. Differences: {100 * LEVEL:.0f} % intervals of "
        f"{RESAMPLES:,} paired resamples of the test rows, each on its own; other seeds may differ more."
    )


def notes(results: Results) -> list[str]:
    """What the baseline answers, what no target reaches where that is most, and which models answer one thing only."""
    found = [f"The {TRIVIAL_NAME} answers {kind_of(results.task).trivial_answer}, whatever it is asked."]
    names = {DENSE: "dense", CONTROL: CONTROL_NAME} | {one.after: one.name for one in results.candidates}
    names |= {one.scored: f"{one.model} by {TITLES[one.runtime]}" for one in ways(results) if one.runtime != "torch"}
    alike: dict[str, list[str]] = {}
    for model, name in names.items():
        if model in results.only_answers:
            alike.setdefault(results.only_answers[model], []).append(name)
    if results.census.warning:
        found.append(results.census.warning)
    return found + [f"To every test row the answer is {answer}: {', '.join(some)}." for answer, some in alike.items()]


def to_text(results: Results) -> str:
    """The table for a terminal."""
    table = Table(box=SIMPLE_HEAD, title=f"{results.name}: {results.metric.with_direction}", title_justify="left")
    table.add_column("candidate", no_wrap=True)
    if results.searches_trained:
        table.add_column("steps before\nfactorization", justify="right")
    shaped = ("shaped",) if results.has_shaped else ()
    heads = (*shaped, "factorized", "recovered", "of dense", "difference", "of control", "difference")
    for name in (*heads, "targets", "model", "MACs", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in (*dense_rows(results), trivial_row(results)):
        _add(table, each, results)
    for keep in results.keeps:
        table.add_section()
        for one in results.at(keep):
            _add(table, row(results, one), results)
    tables = [table]
    if results.goals:
        tables.append(_goals(results))
    if results.exports:
        title = "the files to ship, × as fast as the dense model in torch at rows × tokens"
        tables.append(runtimes_table(results, Table(box=SIMPLE_HEAD, title=title, title_justify="left")))
    # A fixed width and no markup: the same lines in a terminal, a log and a test.
    console = Console(width=180, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(*tables)
    lines = [line.rstrip() for line in captured.get().strip("\n").splitlines()]
    return "\n".join([*lines, *(f"  {note}" for note in (legend("* best at its keep"), *notes(results)))])


def _goals(results: Results) -> Table:
    table = Table(box=SIMPLE_HEAD, title="what was asked for, and what there is", title_justify="left")
    drops = any(goal.largest_drop is not None for goal in results.goals)
    for name in ("goal", "candidate", "found", *(("shown by test rows",) if drops else ())):
        table.add_column(name)
    for name in (results.metric.title, "difference", "size", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in goal_rows(results):
        shown = (row.shown,) if drops else ()
        table.add_row(row.goal, row.candidate, row.found, *shown, row.metric, row.difference, row.bytes, row.speedup)
    return table


def _add(table: Table, row: Row, results: Results) -> None:
    steps = (row.steps,) if results.searches_trained else ()
    shaped = (row.shaped,) if results.has_shaped else ()
    compared = (text for each in (row.of_dense, row.of_control) for text in (each.retained, each.difference))
    shares = (row.targets.share, row.model.share, row.macs.share)
    recovered = f"{row.recovered} {row.mark or ' '}"
    table.add_row(row.name, *steps, *shaped, row.factorized, recovered, *compared, *shares, row.speedup.median)
