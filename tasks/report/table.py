"""The comparison as a table: for machines as CSV, for people with readable and relative numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tasks.artifacts.results_schema import CONTROL_NAME, TRIVIAL_NAME, Size, Times
from tasks.nlp_tasks import kind_of
from tasks.report.goals import goal_rows
from tasks.report.numbers import between, count, percent, rank, score, size, times, times_between
from tasks.report.results import CONTROL, DENSE, TRIVIAL, CandidateResults, Results, ScoredModel
from tasks.report.runtimes import TITLES, runtimes_table, ways
from tasks.scoring.bootstrap import LEVEL, RESAMPLES

ZERO_SHOT = "zero_shot."
"""Begins the columns of zero-shot tasks, TASK.METRIC of lm-eval, after all others."""

_NONE = "–"


@dataclass(frozen=True)
class Entry:
    """A model that the tables list, with its numbers; None where it has none."""

    name: str
    recipe: str
    keep: str
    scored: ScoredModel
    metric: float
    zero_shot: Mapping[str, float] = field(default_factory=dict)
    """TASK.METRIC → value."""
    factorized: float | None = None
    shaped: float | None = None
    steps: int | None = None
    """Training steps before the factorization."""
    average_rank: float | None = None
    target_parameters: int | None = None
    size: Size | None = None
    speedup: Times | None = None
    """Over the original model."""


@dataclass(frozen=True)
class Cell:
    """A number, and below it its share of the original model's, or its interval."""

    value: str = _NONE
    below: str = ""


@dataclass(frozen=True)
class Row:
    """An entry as people read it."""

    name: str
    steps: str
    shaped: str
    factorized: str
    recovered: str
    mark: str
    """`*` for the best at its keep, `≈` for one that is not significantly different from it."""
    of_dense: Cell
    """The share of the original model's metric that is retained, and the interval of the difference."""
    of_control: Cell
    targets: Cell
    model: Cell
    macs: Cell
    bytes: Cell
    speedup: Cell
    order: Mapping[str, float | None]
    """Column → the number by which the page sorts it."""


@dataclass(frozen=True)
class Shaped:
    """The rank that shaping left of the weights, as people read it."""

    recipe: str
    keep: str
    average_rank: str
    full_rank: str


def references(results: Results) -> list[Entry]:
    """Return the original model and its control."""
    scores = (("dense", DENSE, results.dense), (CONTROL_NAME, CONTROL, results.dense.control))
    return [
        Entry(
            name=name,
            recipe=name,
            keep="1",
            scored=scored,
            metric=report.score.metric,
            zero_shot=_flat(report.zero_shot),
            steps=0,
            target_parameters=results.target_parameters,
            size=results.dense.size,
            speedup=Times(median=1, low=1, high=1),
        )
        for name, scored, report in scores
    ]


def entry(candidate: CandidateResults) -> Entry:
    """Return a candidate as the tables list it."""
    return Entry(
        name=candidate.name,
        recipe=candidate.recipe,
        keep=candidate.keep,
        scored=candidate.after,
        metric=candidate.recovered,
        zero_shot=_flat(candidate.evaluation.zero_shot),
        factorized=candidate.factorized,
        shaped=candidate.shaped,
        steps=candidate.decision.steps,
        average_rank=candidate.decision.average_rank,
        target_parameters=candidate.evaluation.target_parameters,
        size=candidate.evaluation.size,
        speedup=candidate.benchmark.speedup,
    )


def _flat(zero_shot: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{task}.{metric}": value for task, values in zero_shot.items() for metric, value in values.items()}


def to_csv(results: Results) -> str:
    """Return a line for the control and each candidate, every number in full."""
    lines = list(numbers(results))
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def numbers(results: Results) -> Iterator[dict[str, str | float | None]]:
    """Yield a line of the CSV for the control and each candidate: column → value; None stays empty."""
    dense, control = references(results)
    for model in (control, *map(entry, results.candidates)):
        assert model.size is not None  # only the trivial baseline has none
        assert model.speedup is not None
        yield {
            "recipe": model.recipe,
            "keep": model.keep,
            "metric": results.task.metric,
            "dense": dense.metric,
            "factorized": model.factorized,
            "recovered": model.metric,
            "target_parameters": model.target_parameters,
            "model_parameters": model.size.model_parameters,
            "macs_per_token": model.size.macs_per_token,
            "bytes": model.size.bytes,
            "speedup": model.speedup.median,
            "speedup_low": model.speedup.low,
            "speedup_high": model.speedup.high,
            "search_steps": model.steps,
            "average_rank": model.average_rank,
            "shaped": model.shaped,
            "control": control.metric,
            **_ends(results, model),
            **{f"{ZERO_SHOT}{name}": model.zero_shot[name] for name in dense.zero_shot},
            **{f"dense.{ZERO_SHOT}{name}": value for name, value in dense.zero_shot.items()},
        }


def _ends(results: Results, model: Entry) -> dict[str, float]:
    found = {name: results.difference(model.scored, other) for name, other in (("dense", DENSE), ("control", CONTROL))}
    return {f"from_{name}_{end}": getattr(found[name], end) for name in found for end in ("low", "high")}


def row(results: Results, candidate: CandidateResults) -> Row:
    """Return a candidate as the page and the terminal show it."""
    best = results.at(candidate.keep)[0]
    mark = "*" if results.is_best(candidate) else "≈" if candidate in results.rivals(best) else ""
    return _row(results, entry(candidate), mark)


def reference_rows(results: Results) -> list[Row]:
    """Return the original model, its control and the trivial baseline, in the columns of a candidate."""
    trivial = Entry(TRIVIAL_NAME, TRIVIAL_NAME, _NONE, TRIVIAL, results.metric_of(TRIVIAL))
    return [_row(results, model) for model in (*references(results), trivial)]


def _row(results: Results, model: Entry, mark: str = "") -> Row:
    whole = results.dense.size.model_dump() | {"targets": results.target_parameters}
    cost = model.size.model_dump() | {"targets": model.target_parameters} if model.size else {}
    relative = {
        name: Cell((size if name == "bytes" else count)(value), percent(value / whole[name]))
        for name, value in cost.items()
    }
    return Row(
        name=model.name,
        steps=_NONE if model.steps is None else f"{model.steps:,}",
        shaped=_score(model.shaped),
        factorized=_score(model.factorized),
        recovered=score(model.metric),
        mark=mark,
        of_dense=_compared(results, model, DENSE),
        of_control=_compared(results, model, CONTROL),
        targets=relative.get("targets", Cell()),
        model=relative.get("model_parameters", Cell()),
        macs=relative.get("macs_per_token", Cell()),
        bytes=relative.get("bytes", Cell()),
        speedup=_speedup(model.speedup),
        order={
            "steps": model.steps,
            "shaped": model.shaped,
            "factorized": model.factorized,
            "recovered": model.metric,
            "of_dense": results.retained(model.metric, DENSE),
            "of_control": results.retained(model.metric, CONTROL),
            "targets": cost.get("targets"),
            "model": cost.get("model_parameters"),
            "macs": cost.get("macs_per_token"),
            "bytes": cost.get("bytes"),
            "speedup": model.speedup.median if model.speedup else None,
        },
    )


def _speedup(speedup: Times | None) -> Cell:
    if speedup is None:
        return Cell()
    measured = speedup.low < speedup.high  # that of the original model over itself is 1
    return Cell(times(speedup.median), times_between(speedup.low, speedup.high) if measured else "")


def _score(metric: float | None) -> str:
    return _NONE if metric is None else score(metric)


def _compared(results: Results, model: Entry, reference: ScoredModel) -> Cell:
    """Compare a model with a reference; with itself it has no difference."""
    share, found = results.retained(model.metric, reference), results.difference(model.scored, reference)
    difference = "" if model.scored == reference else between(found.low, found.high, model.metric)
    return Cell(_NONE if share is None else percent(share), difference)


def zero_shot(results: Results) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the metrics of lm-eval's tasks, and for each model its name and values."""
    models = [*references(results), *map(entry, results.candidates)]
    heads = list(models[0].zero_shot)
    return heads, [(model.name, [score(model.zero_shot[head]) for head in heads]) for model in models]


def shaped(results: Results) -> list[Shaped]:
    """Return the candidates whose weights were shaped, in the study's order."""
    return [
        Shaped(model.recipe, model.keep, rank(model.average_rank), rank(results.full_rank))
        for model in map(entry, results.candidates)
        if model.average_rank is not None
    ]


def legend(best: str) -> str:
    """Return what the marks and intervals of the tables mean; `best` says how the best at a keep is marked."""
    return (
        f"{best}; ≈ not significantly different from the best. Differences: {100 * LEVEL:.0f} % intervals from "
        f"{RESAMPLES:,} paired resamples of the test examples; they do not cover the choice of a seed."
    )


def notes(results: Results) -> list[str]:
    """Return notes on the trivial baseline, on large parts that no target covers, and on models with one answer."""
    found = [f"The {TRIVIAL_NAME} always answers {kind_of(results.task).trivial_answer}."]
    if results.census.warning:
        found.append(results.census.warning)
    names = {model.scored: model.name for model in (*references(results), *map(entry, results.candidates))}
    names |= {way.scored: f"{way.model} in {TITLES[way.runtime]}" for way in ways(results) if way.runtime != "torch"}
    alike: dict[str, list[str]] = {}
    for model, name in names.items():
        if model in results.only_answers:
            alike.setdefault(results.only_answers[model], []).append(name)
    return found + [
        f"The answer to every test example is {answer}: {', '.join(models)}." for answer, models in alike.items()
    ]


def to_text(results: Results) -> str:
    """Return the tables for a terminal."""
    tables = [_candidates(results)]
    if results.goals:
        tables.append(_goals(results))
    if results.exports:
        title = "exported files; times as fast as the original model in torch at examples × tokens"
        tables.append(runtimes_table(results, Table(box=SIMPLE_HEAD, title=title, title_justify="left")))
    lines = [printed(*tables), *(f"  {note}" for note in (legend("* best at its keep"), *notes(results)))]
    return "\n".join(lines)


def printed(*tables: Table, width: int = 180) -> str:
    """Return tables as text of a fixed width without markup: the same in a terminal, a log and a test."""
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(*tables)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())


def _candidates(results: Results) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"{results.name}: {results.metric.with_direction}", title_justify="left")
    table.add_column("candidate", no_wrap=True)
    if results.searches_trained:
        table.add_column("steps before\nfactorization", justify="right")
    shaped = ("shaped",) if results.has_shaped else ()
    heads = (*shaped, "factorized", "recovered", "of dense", "difference", "of control", "difference")
    for name in (*heads, "targets", "model", "MACs", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for reference in reference_rows(results):
        table.add_row(*_cells(reference, results))
    for keep in results.keeps:
        table.add_section()
        for candidate in results.at(keep):
            table.add_row(*_cells(row(results, candidate), results))
    return table


def _cells(row: Row, results: Results) -> Iterator[str]:
    yield row.name
    yield from (row.steps,) if results.searches_trained else ()
    yield from (row.shaped,) if results.has_shaped else ()
    yield row.factorized
    yield f"{row.recovered} {row.mark or ' '}"
    for compared in (row.of_dense, row.of_control):
        yield from (compared.value, compared.below)
    yield from (row.targets.below, row.model.below, row.macs.below, row.speedup.value)


def _goals(results: Results) -> Table:
    table = Table(box=SIMPLE_HEAD, title="goals", title_justify="left")
    drops = any(goal.largest_drop is not None for goal in results.goals)
    for name in ("goal", "candidate", "result", *(("shown by test examples",) if drops else ())):
        table.add_column(name)
    for name in (results.metric.title, "difference", "size", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in goal_rows(results):
        shown = (row.shown,) if drops else ()
        table.add_row(row.goal, row.candidate, row.found, *shown, row.metric, row.difference, row.bytes, row.speedup)
    return table
