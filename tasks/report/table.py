"""The comparison as a table: for machines as CSV, for people with readable and relative numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tasks.report.numbers import count, percent, rank, score, size, times
from tasks.report.results import CandidateResults, Results

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
    "search_steps",
    "average_rank",
    "shaped",
)


ZERO_SHOT = "zero_shot."
"""Begins the columns that come after these: TASK.METRIC of lm-eval."""


@dataclass(frozen=True)
class Relative:
    """A number of a candidate and its share of the dense model's."""

    value: str
    share: str


@dataclass(frozen=True)
class Row:
    """A candidate as people read it."""

    name: str
    steps: str
    """Of training before the factorization."""
    shaped: str
    factorized: str
    recovered: str
    retained: str
    best: bool
    targets: Relative
    model: Relative
    macs: Relative
    bytes: Relative
    speedup: str


@dataclass(frozen=True)
class Shaped:
    """What shaping did to the ranks of the dense weights, as people read it."""

    recipe: str
    keep: str
    average_rank: str
    full_rank: str


def to_csv(results: Results) -> str:
    """A line per candidate, every number in full; last zero-shot tasks, where there are any, with the dense model's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    dense = _asked(results.dense.zero_shot)
    writer.writerow(
        [*COLUMNS, *(f"{ZERO_SHOT}{name}" for name in dense), *(f"dense.{ZERO_SHOT}{name}" for name in dense)]
    )
    for one in results.candidates:
        found = _asked(one.evaluation.zero_shot)
        writer.writerow([*_values(results, one), *(found[name] for name in dense), *dense.values()])
    return text.getvalue()


def _asked(zero_shot: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{task}.{metric}": value for task, values in zero_shot.items() for metric, value in values.items()}


def _values(results: Results, one: CandidateResults) -> Iterable[str | float | None]:
    """In the order of COLUMNS; None is left empty."""
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
        one.benchmark.speedup,
        one.decision.steps,
        one.decision.average_rank,
        one.shaped,
    )


def row(results: Results, one: CandidateResults) -> Row:
    """What the page and the terminal show of a candidate."""
    dense, small = results.dense.size, one.evaluation.size
    retained = results.retained(one.recovered)
    after, before = one.evaluation.target_parameters, results.target_parameters
    return Row(
        name=one.name,
        steps=f"{one.decision.steps:,}",
        shaped=_score(one.shaped),
        factorized=_score(one.factorized),
        recovered=score(one.recovered),
        retained=_retained(retained),
        best=results.is_best(one),
        targets=Relative(count(after), percent(after / before)),
        model=Relative(count(small.model_parameters), percent(small.model_parameters / dense.model_parameters)),
        macs=Relative(count(small.macs_per_token), percent(small.macs_per_token / dense.macs_per_token)),
        bytes=Relative(size(small.bytes), percent(small.bytes / dense.bytes)),
        speedup=times(one.benchmark.speedup),
    )


def zero_shot(results: Results) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The metrics of lm-eval's tasks, and of the dense model and each candidate the name and the values."""
    dense = _asked(results.dense.zero_shot)
    models = [("dense", dense), *((one.name, _asked(one.evaluation.zero_shot)) for one in results.candidates)]
    return list(dense), [(name, [score(values[head]) for head in dense]) for name, values in models]


def shaped(results: Results) -> list[Shaped]:
    """The candidates whose weights were shaped, in the study's order."""
    ranks = [(one, one.decision.average_rank) for one in results.candidates]
    return [
        Shaped(one.recipe, one.keep, rank(average), rank(results.full_rank))
        for one, average in ranks
        if average is not None
    ]


def dense_row(results: Results) -> Row:
    """The dense model, in the columns of a candidate."""
    dense, whole = results.dense.size, percent(1)
    retained = results.retained(results.dense.score.metric)
    return Row(
        name="dense",
        steps="",
        shaped="",
        factorized="",
        recovered=score(results.dense.score.metric),
        retained=_retained(retained),
        best=False,
        targets=Relative(count(results.target_parameters), whole),
        model=Relative(count(dense.model_parameters), whole),
        macs=Relative(count(dense.macs_per_token), whole),
        bytes=Relative(size(dense.bytes), whole),
        speedup=times(1),
    )


def _score(metric: float | None) -> str:
    return "–" if metric is None else score(metric)


def _retained(share: float | None) -> str:
    return "–" if share is None else percent(share)


def to_text(results: Results) -> str:
    """The table for a terminal; a star marks the best at each keep."""
    table = Table(box=SIMPLE_HEAD, title=f"{results.name}: {results.metric.with_direction}", title_justify="left")
    table.add_column("candidate")
    if results.searches_trained:
        table.add_column("steps before\nfactorization", justify="right")
    shaped = ("shaped",) if results.has_shaped else ()
    for name in (*shaped, "factorized", "recovered", "of dense", "targets", "model", "MACs", "speedup"):
        table.add_column(name, justify="right")
    _add(table, dense_row(results), results)
    for keep in results.keeps:
        table.add_section()
        for one in results.at(keep):
            _add(table, row(results, one), results)
    # A fixed width and no markup: the same lines in a terminal, a log and a test.
    console = Console(width=120, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())


def _add(table: Table, row: Row, results: Results) -> None:
    star = " *" if row.best else "  "
    steps = (row.steps,) if results.searches_trained else ()
    shaped = (row.shaped,) if results.has_shaped else ()
    shares = (row.targets.share, row.model.share, row.macs.share)
    table.add_row(row.name, *steps, *shaped, row.factorized, row.recovered + star, row.retained, *shares, row.speedup)
