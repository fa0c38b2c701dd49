"""Make the table of candidates: as CSV with all digits, or with readable numbers for the page and the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tasks.artifacts.results_schema import CONTROL_NAME, TRIVIAL_NAME, Score, Size, Times
from tasks.nlp_tasks import kind_of
from tasks.report.cells import Cell, Row, cell, printed, terminal_table
from tasks.report.goals import goal_rows
from tasks.report.numbers import between, count, percent, score, signed, size, times, times_between
from tasks.report.results import CONTROL, DENSE, TRIVIAL, CandidateResults, Results, ScoredModel
from tasks.report.runtimes import TEXTS, TITLES, runtime_results, runtime_rows
from tasks.scoring.bootstrap import LEVEL, RESAMPLES

ZERO_SHOT = "zero_shot."
"""Prefix of the CSV columns of zero-shot tasks, which come last: zero_shot.TASK.METRIC, with the names of lm-eval."""

STEPS = "steps before factorization"
COMPARED = (
    "metric",
    "recovered",
    "dense",
    "control",
    "factorized",
    "from_dense_low",
    "from_dense_high",
    "target_parameters",
    "model_parameters",
    "macs_per_token",
    "bytes",
    "speedup",
)
"""The CSV columns that a person compares between studies."""
BEFORE, AFTER = "before fine-tuning", "after fine-tuning"
"""Columns of the metric before and after recovery fine-tuning."""


@dataclass(frozen=True)
class Entry:
    """Numbers of a model in the tables; None for those that the model does not have."""

    name: str
    recipe: str
    keep: str
    scored: ScoredModel
    metric: float
    zero_shot: Mapping[str, float] = field(default_factory=dict)
    """TASK.METRIC → value."""
    texts: Mapping[str, float] = field(default_factory=dict)
    """Name of a text in evaluate.texts → metric."""
    factorized_texts: Mapping[str, float] = field(default_factory=dict)
    """The same before recovery."""
    factorized: float | None = None
    shaped: float | None = None
    steps: int | None = None
    """Number of training steps before the factorization."""
    average_rank: float | None = None
    target_parameters: int | None = None
    size: Size | None = None
    speedup: Times | None = None
    """Speedup over the original model."""
    timed: str = ""
    """The model with weights of the same shapes that was timed in its place; empty if it was timed itself."""


def references(results: Results) -> list[Entry]:
    """Return the entries of the original model and of the control."""
    scores = (("dense", DENSE, results.dense), (CONTROL_NAME, CONTROL, results.dense.control))
    return [
        Entry(
            name=name,
            recipe=name,
            keep="1",
            scored=scored,
            metric=report.score.metric,
            zero_shot=_flat(report.zero_shot),
            texts=_metrics(report.texts),
            steps=0,
            target_parameters=results.target_parameters,
            size=results.dense.size,
            speedup=Times(median=1, low=1, high=1),
        )
        for name, scored, report in scores
    ]


def entry(candidate: CandidateResults) -> Entry:
    """Return the entry of a candidate."""
    return Entry(
        name=candidate.name,
        recipe=candidate.recipe,
        keep=candidate.keep,
        scored=candidate.after,
        metric=candidate.recovered,
        zero_shot=_flat(candidate.evaluation.zero_shot),
        texts=_metrics(candidate.evaluation.texts),
        factorized_texts=_metrics(candidate.evaluation.factorized_texts),
        factorized=candidate.factorized,
        shaped=candidate.shaped,
        steps=candidate.decision.steps,
        average_rank=candidate.decision.average_rank,
        target_parameters=candidate.evaluation.target_parameters,
        size=candidate.evaluation.size,
        speedup=candidate.benchmark.speedup,
        timed="" if candidate.benchmark.timed == candidate.name else candidate.benchmark.timed,
    )


def _flat(zero_shot: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{task}.{metric}": value for task, values in zero_shot.items() for metric, value in values.items()}


def _metrics(texts: Mapping[str, Score]) -> dict[str, float]:
    return {name: text.metric for name, text in texts.items()}


def to_csv(results: Results) -> str:
    """Return the table as CSV, with all digits and a row for the control and each candidate."""
    lines = list(numbers(results))
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def numbers(results: Results) -> Iterator[dict[str, str | float | None]]:
    """Yield the CSV rows of the control and each candidate: column → value, or None for an empty cell."""
    dense, control = references(results)
    for model in (control, *map(entry, results.candidates)):
        assert model.size is not None  # only the trivial baseline has none
        assert model.speedup is not None
        ends = {
            f"from_{name}_{end}": getattr(results.difference(model.scored, other), end)
            for name, other in (("dense", DENSE), ("control", CONTROL))
            for end in ("low", "high")
        }
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
            **ends,
            **{f"{TEXTS}{name}": model.texts[name] for name in dense.texts},
            **{f"factorized.{TEXTS}{name}": model.factorized_texts.get(name) for name in dense.texts},
            **{f"dense.{TEXTS}{name}": value for name, value in dense.texts.items()},
            **{f"{ZERO_SHOT}{name}": model.zero_shot.get(name) for name in dense.zero_shot},
            **{f"dense.{ZERO_SHOT}{name}": value for name, value in dense.zero_shot.items()},
        }


def compared(results: Results) -> dict[str, str | float | None]:
    """Return the numbers that DVC shows as metrics: name and `COMPARED` columns of the candidate marked as best."""
    best = results.named(results.choice.nearest)
    line = next(line for line in numbers(results) if (line["recipe"], line["keep"]) == (best.recipe, best.keep))
    return {"candidate": best.name, **{column: line[column] for column in COMPARED}}


def row(results: Results, candidate: CandidateResults) -> Row:
    """Return the row of a candidate, for the page and the terminal."""
    best = results.named(results.choice.nearest)
    mark = "*" if candidate == best else "" if results.gain(best.after, candidate.after) else "≈"
    return _row(results, entry(candidate), mark)


def reference_rows(results: Results) -> list[Row]:
    """Return the rows of the original model, the control and the trivial baseline, with the columns of `row`."""
    trivial = Entry(TRIVIAL_NAME, TRIVIAL_NAME, "–", TRIVIAL, results.metric_of(TRIVIAL))
    return [_row(results, model) for model in (*references(results), trivial)]


def row_groups(results: Results) -> list[list[Row]]:
    """Return the `reference_rows`, and the rows of the candidates at each keep, best test metric first."""
    candidates = (sorted(results.at(keep), key=results.best_on_test) for keep in results.keeps)
    return [reference_rows(results), *([row(results, each) for each in alike] for alike in candidates)]


def _row(results: Results, model: Entry, mark: str = "") -> Row:
    cells = {}
    if results.searches_trained:
        cells[STEPS] = cell(model.steps, "{:,}".format)
    if results.has_shaped:
        ranks = "" if model.average_rank is None else f"rank {model.average_rank:,.1f} of {results.full_rank:,.1f}"
        cells["shaped"] = cell(model.shaped, score, ranks)
    cells |= {
        BEFORE: cell(model.factorized, score),
        AFTER: cell(model.metric, score),
        "vs. original": _compared(results, model, DENSE),
        "vs. control": _compared(results, model, CONTROL),
        **_texts(results, model),
        "target parameters": _relative(model.target_parameters, results.target_parameters, count),
    }
    for head, name, text in (
        ("model parameters", "model_parameters", count),
        ("MACs per token", "macs_per_token", count),
        ("size", "bytes", size),
    ):
        cells[head] = _relative(getattr(model.size, name, None), getattr(results.dense.size, name), text)
    return Row(model.name, {**cells, "speed": _speedup(model.speedup, model.timed)}, mark)


def _texts(results: Results, model: Entry) -> dict[str, Cell]:
    """Return a cell for each text of evaluate.texts: the metric, and how many times that of the original model it is.

    Below are the same two numbers before fine-tuning, if that changed them.
    """
    cells = {}
    for name, text in results.dense.texts.items():
        value, before = model.texts.get(name), model.factorized_texts.get(name)
        below = [] if value is None else [times(value / text.metric)]
        if before is not None and before != value:
            below.append(f"{score(before)} ({times(before / text.metric)}) {BEFORE}")
        cells[f"{results.metric.title} on {name}"] = cell(value, score, "\n".join(below))
    return cells


def _relative(value: int | None, whole: int, text: Callable[[int], str]) -> Cell:
    return Cell() if value is None else cell(value, text, percent(value / whole))


def _speedup(speedup: Times | None, timed: str) -> Cell:
    if speedup is None:
        return Cell()
    measured = speedup.low < speedup.high  # not for the original model, which has speedup 1 by definition
    interval = times_between(speedup.low, speedup.high) if measured else ""
    return cell(speedup.median, times, f"as {timed}" if timed else interval)


def _compared(results: Results, model: Entry, reference: ScoredModel) -> Cell:
    """Return a cell with the difference from the reference's metric, and its interval; empty for the reference."""
    if model.scored == reference:
        return Cell()
    ends, difference = results.difference(model.scored, reference), model.metric - results.metric_of(reference)
    return cell(difference, partial(signed, metric=model.metric), between(ends.low, ends.high, model.metric))


def zero_shot(results: Results) -> list[Row]:
    """Return the rows of the table of zero-shot metrics, one for each model."""
    models = [*references(results), *map(entry, results.candidates)]
    heads = models[0].zero_shot
    return [Row(model.name, {head: cell(model.zero_shot.get(head), score) for head in heads}) for model in models]


def legend(results: Results, mark: str) -> list[str]:
    """Explain the marks, names and intervals in the tables. `mark` says how the chosen candidate is marked."""
    chosen = "the choice of `eckart promote`" if results.choice.chosen else "the candidate nearest to the limits"
    return [
        f"{mark} {chosen}; ≈ not significantly different from it.",
        f"dense is the original model; {CONTROL_NAME} is the control, the original model "
        f"{'with the same fine-tuning' if results.control_curve else 'itself'}.",
        f"Differences have {100 * LEVEL:.0f} % intervals from {RESAMPLES:,} paired resamples of the test examples; the "
        "intervals do not cover the choice of a seed.",
    ]


def notes(results: Results) -> list[str]:
    """Return notes on the trivial baseline, a low share of parameters in targets, and models with only one answer."""
    sentences = [f"The answer of the {TRIVIAL_NAME}: {kind_of(results.task).trivial_answer}."]
    sentences += filter(None, [results.census.warning])
    sentences += [f"Calibration: {warning}." for warning in results.calibration_warnings]
    decisions = {each.name: each.decision for each in results.candidates if each.decision.reached}
    sentences += [f"The thresholds of {name} met {decision.reached_in_words}." for name, decision in decisions.items()]
    names = {model.scored: model.name for model in (*references(results), *map(entry, results.candidates))}
    exported = [result for result in runtime_results(results) if result.runtime != "torch"]
    names |= {result.scored: f"{result.model} in {TITLES[result.runtime]}" for result in exported}
    alike: dict[str, list[str]] = {}
    for model, name in names.items():
        if model in results.only_answers:
            alike.setdefault(results.only_answers[model], []).append(name)
    return sentences + [
        f"The answer to every test example is {answer}: {', '.join(models)}." for answer, models in alike.items()
    ]


def to_text(results: Results) -> str:
    """Return all tables and notes as text for the terminal."""
    tables = [_candidates(results)]
    if goals := goal_rows(results):
        tables.append(terminal_table("goals", "goal", goals))
    if results.dense.texts:
        title = f"other texts; {results.metric.title} and its multiple of the original model's"
        models = [*references(results), *map(entry, results.candidates)]
        tables.append(terminal_table(title, "model", [Row(model.name, _texts(results, model)) for model in models]))
    if results.exports:
        title = "exported files; speed as a multiple of the original model in torch, at examples × tokens"
        tables.append(terminal_table(title, "model", runtime_rows(results)))
    lines = [printed(*tables), *(f"  {note.replace('`', '')}" for note in (*legend(results, "*"), *notes(results)))]
    return "\n".join(lines)


def _candidates(results: Results) -> Table:
    """Make the table of all models. The columns that a choice needs come first, since a narrow terminal cuts the last.

    It is at most 140 characters wide if no name has more than 29. The page also has steps, ranks, MACs and
    the interval of the difference from the control.
    """
    table = Table(box=SIMPLE_HEAD, title=f"{results.name}: {results.metric.with_direction}", title_justify="left")
    table.add_column("candidate", no_wrap=True)
    heads = [
        results.metric.title,
        "difference\nfrom original",
        "size",
        "speed",
        "model\nparameters",
        "target\nparameters",
        "difference\nfrom control",
        "before\nfine-tuning",
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for group in row_groups(results):
        for line in group:
            cells = line.cells
            table.add_row(
                line.name,
                f"{cells[AFTER].value} {line.mark or ' '}",
                _with_interval(cells["vs. original"]),
                cells["size"].value,
                cells["speed"].value,
                cells["model parameters"].below,
                cells["target parameters"].below,
                cells["vs. control"].value,
                cells[BEFORE].value,
            )
        table.add_section()
    return table


def _with_interval(difference: Cell) -> str:
    return f"{difference.value} ({difference.below})" if difference.below else difference.value
