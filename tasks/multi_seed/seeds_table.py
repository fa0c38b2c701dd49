"""A study over all its seeds as one table: mean ± sample standard deviation of every candidate.

A study of several tasks has a table of each, and one of all.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eckart.model.targets import Targets
from eckart.recipe_parts import Method
from eckart.recovery import Recovery
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name, stage_name
from tasks.artifacts.paths import TARGETS
from tasks.artifacts.results_schema import CONTROL_NAME, DENSE_METRICS, SECONDS, DenseReport
from tasks.artifacts.task_spec import SPLITS, Task
from tasks.config.schema import Data, Model, Training
from tasks.multi_seed import published_numbers
from tasks.multi_seed.published_numbers import TaskMetrics
from tasks.multi_seed.study_file import StudyFile
from tasks.report import pairwise_differences as pairs
from tasks.report.numbers import between, count, counted, percent, score, times
from tasks.report.provenance import cut
from tasks.report.results import read_rows
from tasks.report.table import ZERO_SHOT
from tasks.runtime.hardware import cores
from tasks.scoring.bootstrap import LEVEL, RESAMPLES, interval, resampled

COMPARISON = Path("reports/comparison.csv")
CANDIDATE = ["recipe", "keep"]
DENSE = ("dense", "–")
"""What stands for recipe and keep of the dense model."""

CONTROL = (CONTROL_NAME, "1")
REFERENCES = ("dense", "control")
Candidate = tuple[str, str]

_OF_DENSE = {DENSE: "dense", CONTROL: "control"}
_MAKING = ("search", "factorize", "finetune")
_ENDS = ("low", "high")
_WIDTH = 220


def collect(folders: Mapping[int, Path]) -> pd.DataFrame:
    """What each seed found, a row per seed and candidate: the columns of reports/comparison.csv, and relative numbers.

    Args:
        folders: seed → its workspace, in which the study has finished.
    """
    rows = pd.concat([_rows(seed, folder) for seed, folder in folders.items()], ignore_index=True)
    return rows.merge(_over_seeds(rows[CANDIDATE].drop_duplicates(), folders), on=CANDIDATE)


def _over_seeds(candidates: pd.DataFrame, folders: Mapping[int, Path]) -> pd.DataFrame:
    """Of each candidate the intervals of its differences averaged over the seeds, which have the same test rows."""
    task = Task.model_validate_json((next(iter(folders.values())) / SPLITS / "task.json").read_text())
    ones = list(candidates.itertuples(index=False, name=None))
    every = dict.fromkeys((DENSE, CONTROL, *ones))
    drawn = resampled(task, {(seed, *one): _scored(folders[seed], one) for seed in folders for one in every})
    means = {one: np.mean([drawn[seed, *one] for seed in folders], axis=0) for one in every}
    lines = []
    for one in ones:
        ends = {name: interval(means[one] - means[other]) for name, other in (("dense", DENSE), ("control", CONTROL))}
        named = {f"seeds_from_{name}_{end}": getattr(found, end) for name, found in ends.items() for end in _ENDS}
        lines.append({**dict(zip(CANDIDATE, one, strict=True)), **named})
    return pd.DataFrame(lines)


def _scored(folder: Path, one: Candidate) -> pd.DataFrame:
    """What each test row contributed to a candidate, the dense model or its control."""
    if one in _OF_DENSE:
        rows, model = read_rows(folder, "dense", "dense"), _OF_DENSE[one]
    else:
        rows, model = read_rows(folder, candidate_name(*one), "evaluate"), "recovered"
    return rows[rows.model == model]


def _rows(seed: int, folder: Path) -> pd.DataFrame:
    # `none` may name a recipe, and 0.50 a keep: they are no missing value and no number here.
    kinds = {"recipe": str, "keep": str}
    rows = pd.read_csv(folder / COMPARISON, dtype=kinds, keep_default_na=False, na_values=[""])
    dense = DenseReport.model_validate_json((folder / DENSE_METRICS).read_text())
    targets = Targets.model_validate_json((folder / TARGETS).read_text()).targets
    rows.insert(0, "seed", seed)
    rows["test_rows"] = dense.score.rows
    rows["trivial"] = dense.trivial
    for name in REFERENCES:
        pairs = zip(rows.recovered, rows[name], strict=True)
        rows[f"of_{name}"] = pd.Series([_metric(rows).retained(*pair) for pair in pairs], dtype=float)
    rows["target_share"] = rows.target_parameters / sum(target.parameters for target in targets)
    rows["model_share"] = rows.model_parameters / dense.size.model_parameters
    rows["macs_share"] = rows.macs_per_token / dense.size.macs_per_token
    rows["seconds"] = _seconds(rows, folder)
    return rows


def _seconds(rows: pd.DataFrame, folder: Path) -> list[float | None]:
    """What each candidate took to be made: its search, factorization and recovery; None where that is not known."""
    file = folder / SECONDS
    try:
        known = TypeAdapter(dict[str, float]).validate_json(file.read_bytes())
    except (OSError, ValueError):  # there is none that can be read
        known = {}
    found = []
    for one in rows[CANDIDATE].itertuples(index=False, name=None):
        stages = ["control"] if one == CONTROL else [stage_name(stage, candidate_name(*one)) for stage in _MAKING]
        took = [known[stage] for stage in stages if stage in known]
        found.append(sum(took) if len(took) == len(stages) else None)
    return found


def _metric(rows: pd.DataFrame) -> Metric:
    return METRICS[rows.metric.iloc[0]]


def cells(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and a line per candidate: larger keeps first, then what recovers best."""
    metric = _metric(rows)
    unit, scored = ", %" if metric.share else "", ("trivial", "dense", "factorized", "recovered")
    heads = ["recipe", "keep", *(f"{name}{unit}" for name in scored)]
    heads += [f"of {name}, %" for name in REFERENCES] + [
        f"from {name}{unit} ({100 * LEVEL:.0f} %)" for name in REFERENCES
    ]
    heads += [
        "targets",
        "model parameters",
        "MACs per token",
        "speedup",
        "search steps",
        "seconds",
        "rank after pruning",
        f"shaped{unit}",
    ]
    groups = [group for _, group in rows.groupby(CANDIDATE, sort=False)]
    groups.sort(key=lambda group: (-float(group.keep.iloc[0]), -metric.goodness(group.recovered.mean())))
    lines = [
        [
            *(str(group[name].iloc[0]) for name in CANDIDATE),
            *(_scores(group[name], metric) for name in scored),
            *(_spread(group[f"of_{name}"] * 100) for name in REFERENCES),
            *(_difference(group, name, metric) for name in REFERENCES),
            percent(group.target_share.mean()),
            f"{count(group.model_parameters.mean())} ({percent(group.model_share.mean())})",
            f"{count(group.macs_per_token.mean())} ({percent(group.macs_share.mean())})",
            times(group.speedup.mean()),
            f"{group.search_steps.mean():.0f}",
            _plain_mean(group.seconds),
            _spread(group.average_rank),
            _scores(group["shaped"], metric),
        ]
        for group in groups
    ]
    return heads, lines


def _difference(group: pd.DataFrame, reference: str, metric: Metric) -> str:
    """Mean ± spread over the seeds, and the interval of the mean over the test rows."""
    low, high = (group[f"seeds_from_{reference}_{end}"].iloc[0] for end in _ENDS)
    ends = f"{100 * low:+z.1f} to {100 * high:+z.1f}" if metric.share else between(low, high, group.recovered.mean())
    return f"{_scores(group.recovered - group[reference], metric)} ({ends})"


def _scores(values: pd.Series[float], metric: Metric) -> str:
    """As `_spread`; shares in percent, others with the digits that their size asks for."""
    return _spread(values * 100) if metric.share else _plain(values)


def _plain(values: pd.Series[float]) -> str:
    if values.empty or values.isna().any():
        return "–"
    return score(values.mean(), values.std(ddof=1) if len(values) > 1 else None)


def _plain_mean(values: pd.Series[float]) -> str:
    return "–" if values.isna().any() else f"{values.mean():.0f}"


def _spread(values: pd.Series[float]) -> str:
    """Mean ± sample standard deviation, to one decimal; of one seed the mean alone."""
    if values.empty or values.isna().any():
        return "–"
    mean = f"{values.mean():z.1f}"  # never -0.0
    return f"{mean} ± {values.std(ddof=1):.1f}" if len(values) > 1 else mean


def combined(rows: pd.DataFrame, metrics: TaskMetrics) -> tuple[list[str], list[list[str]]]:
    """All tasks in one table, as papers print GLUE: the heads, and a line per candidate, the dense model first.

    A metric between -1 and 1 is printed as 100 × it, and where all are such there is their mean over the tasks, of the
    seeds that all tasks have. What is missing is a dash, and then so is the mean.

    Args:
        rows: of `collect`, of all tasks, with their names in the column `task`.
        metrics: of each task.
    """
    points, kinds = _points(rows, metrics), {task: METRICS[metric] for task, metric in metrics.items()}
    signs = pd.Series({task: -1 if kind.lower_is_better else 1 for task, kind in kinds.items()})
    goodness = (points * signs).mean(axis=1).groupby(level=CANDIDATE).mean()
    order = sorted(goodness.index, key=lambda one: (one != DENSE, one != DENSE and -float(one[1]), -goodness[one]))
    columns = [(f"{task}, {kind.title}", points[task], kind.bounded) for task, kind in kinds.items()]
    if len(kinds) > 1 and all(kind.bounded for kind in kinds.values()):
        columns.append(("mean", points.mean(axis=1, skipna=False), True))
    lines = [
        [*one, *((_spread if bounded else _plain)(values.loc[one].dropna()) for _, values, bounded in columns)]
        for one in order
    ]
    return [*CANDIDATE, *(head for head, _, _ in columns)], lines


def _points(rows: pd.DataFrame, metrics: TaskMetrics) -> pd.DataFrame:
    """A row per candidate and seed, a column per task."""
    dense = rows.drop_duplicates(["task", "seed"]).assign(
        recipe=DENSE[0], keep=DENSE[1], recovered=lambda one: one.dense
    )
    both = pd.concat([dense, rows])
    factor = both.task.map({task: 100 if METRICS[metric].bounded else 1 for task, metric in metrics.items()})
    wide = both.assign(points=both.recovered * factor).set_index([*CANDIDATE, "seed", "task"]).points.unstack("task")
    return wide.reindex(columns=list(metrics)).rename_axis(columns=None)


def _asked(rows: pd.DataFrame) -> list[str]:
    """The columns of zero-shot tasks."""
    return [name for name in map(str, rows.columns) if name.startswith(ZERO_SHOT)]


def zero_shot(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The tasks of lm-eval with their metrics, and a line per candidate, the dense model first; shares in percent."""
    names = {name: 1 if name.endswith(_NO_SHARES) else 100 for name in _asked(rows)}
    seeds = rows.drop_duplicates("seed")
    lines = [[*DENSE, *(_spread(seeds[f"dense.{name}"] * factor) for name, factor in names.items())]]
    for one, group in rows.groupby(CANDIDATE, sort=False):
        lines.append([*map(str, one), *(_spread(group[name] * factor) for name, factor in names.items())])
    return [*CANDIDATE, *(name.removeprefix(ZERO_SHOT).replace(".", " ") for name in names)], lines


def joined(found: Mapping[str | None, pd.DataFrame]) -> pd.DataFrame:
    """The rows of all tasks, with their names in the column `task`; those of a study without tasks as they are."""
    if None in found:
        return found[None]
    return pd.concat([rows.assign(task=task)[["task", *rows]] for task, rows in found.items()], ignore_index=True)


def page(
    studies: Sequence[StudyFile],
    found: Mapping[str | None, pd.DataFrame],
    apart: Mapping[str | None, pd.DataFrame],
    name: str,
    command: str,
) -> tuple[pd.DataFrame, str]:
    """All rows, and as Markdown their tables and what is published.

    Each table has a head that says how it was made, with no date and no path. Seconds and speedup are this machine's.

    Args:
        studies: one of each task.
        found: task → what `collect` gave.
        apart: task → what `pairs.differences` gave.
        name: of the study; the rows are beside it in NAME.csv.
        command: that made it.
    """
    rows, metrics = joined(found), {study.task: study.metric for study in studies}
    cited = _cited(studies[0], metrics)
    each = "seed" if None in metrics else "task and seed"
    text = [
        f"# {name}",
        "",
        f"Made by `{command}`. The numbers of each {each} are in [{name}.csv]({name}.csv), the "
        f"differences between recipes with their intervals in [{name}.pairs.csv]({name}.pairs.csv).",
        "",
    ]
    if None in metrics:
        return rows, _lines([*text, *_part(rows, apart[None], studies[0]), *cited])
    text += [_OF_ALL, "", *_table(*combined(rows, metrics)), *cited]
    for study in studies:
        text += ["", f"## {study.task}", "", *_part(found[study.task], apart[study.task], study)]
    return rows, _lines(text)


_OF_ALL = "Recovered, 100 × each metric but for perplexities; `dense` is the model that is compressed."
_NO_SHARES = ("perplexity", "bits_per_byte")  # of texts; what other tasks of lm-eval give lies between 0 and 1
_OF_ZERO_SHOT = (
    "Zero-shot tasks after recovery, 100 × what lm-evaluation-harness gives but for perplexities and bits of a byte."
)
_OF_TRIALS = (
    "Trials at one keep and with one seed: what was best on validation rows (*) is what the table has of its recipe."
)
_OF_OTHERS = "What papers report, none of it measured here; the last column numbers what differs."


def _part(rows: pd.DataFrame, apart: pd.DataFrame, study: StudyFile) -> list[str]:
    """The facts, the table and the trials of one task."""
    asked = ["", _OF_ZERO_SHOT, "", *_table(*zero_shot(rows))] if _asked(rows) else []
    best = {"Best after recovery": "; ".join(pairs.leaders(apart, rows)) + "."}
    facts = [f"- {what}: {fact}" for what, fact in (best | _facts(rows, study.params)).items()]
    return [*facts, "", *_table(*cells(rows)), *asked, *_tried(study)]


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    align = ("left", *["right"] * (len(heads) - 1))
    return [pd.DataFrame(lines, columns=list(heads)).to_markdown(index=False, disable_numparse=True, colalign=align)]


def _tried(study: StudyFile) -> list[str]:
    """What trials found, and which the table has."""
    if not study.tried:
        return []
    metric = METRICS[study.metric]
    unit = ", %" if metric.share else ""
    lines = [
        [one.recipe, _words(one.change), _scores(pd.Series([one.validation]), metric), "*" if one.chosen else ""]
        for one in study.tried
    ]
    return ["", _OF_TRIALS, "", *_table(["recipe", "trial", f"validation{unit}", ""], lines)]


def _words(change: Mapping[str, Any], prefix: str = "") -> str:
    """`recovery.steps 30, ranks.kind waterfill`, or `as it is` for no change."""
    parts = [
        _words(value, f"{prefix}{key}.") if isinstance(value, dict) else f"{prefix}{key} {value}"
        for key, value in change.items()
    ]
    return ", ".join(parts) or "as it is"


def _cited(study: StudyFile, metrics: TaskMetrics) -> list[str]:
    cited = published_numbers.beside(study.published, metrics)
    if not cited:
        return []
    notes = [f"{number}. {note}" for number, note in enumerate(published_numbers.notes(cited), start=1)]
    return ["", "## Published", "", _OF_OTHERS, "", *_table(*published_numbers.cells(cited, metrics)), "", *notes]


def _lines(text: Sequence[str]) -> str:
    return "\n".join(text).rstrip("\n") + "\n"


def _facts(rows: pd.DataFrame, params: Mapping[str, Any]) -> dict[str, str]:
    data, model = Data(**params["data"]), Model(**params["model"])
    teacher = Training(**params["teacher"])
    seeds = list(dict.fromkeys(rows.seed))
    spread = "mean ± sample standard deviation over them" if len(seeds) > 1 else "one run, no spread"
    source = " ".join(filter(None, (data.source, data.config, data.revision and f"at {data.revision}")))
    metric = METRICS[data.metric]
    retained = "each ÷ recovered" if metric.lower_is_better else "recovered ÷ each"
    test = f"on {rows.test_rows.iloc[0]:,} test rows"
    return {
        "Seeds": f"{', '.join(map(str, seeds))}; {spread}. Dense model, search and recovery are trained anew for each.",
        "Metric": f"{metric.with_direction} {test}; of dense and of control: {retained}.",
        "Trivial": "the metric of an answer that reads no input.",
        "Control": f"the dense model with the recovery of {params['study']['control']}.",
        "Differences": "recovered less dense and less control, averaged over the seeds, and how far the choice of test "
        f"rows may move that: {100 * LEVEL:.0f} % of {RESAMPLES:,} paired resamples, the same for all seeds. "
        "One such interval in 20 misses.",
        "Data": f"{source}, split with seed {data.seed}, at most {data.sizes.train:,} training rows; {cut(data)}.",
        "Model": f"{' at '.join(filter(None, (model.base, model.revision)))}; as the dense model, "
        + (f"fine-tuned for {teacher.epochs:g} × the training split." if teacher.epochs else "taken as it is."),
        "Recovery": "; ".join(_recoveries(params)) + ".",
        "Seconds": "search, factorization and recovery of a candidate on this machine, beside others; not the "
        "teacher and the statistics, which all share.",
        "Machine": f"{_machine()}; {counted(params['threads']['candidate'], 'thread')} for each candidate.",
    }


def _recoveries(params: Mapping[str, Any]) -> list[str]:
    """How the recipes recover, each way once; the first is that of all where there is no other."""
    ways: dict[str, list[str]] = {}
    for name in params["study"]["recipes"]:
        recovery: Method = TypeAdapter(Recovery).validate_python(params["recipes"][name]["recovery"])
        way = ", then ".join(
            f"{one.steps} steps of {one.batch_size} rows at a rate of {one.learning_rate:g}"
            for one in recovery.trainings.values()
        )
        ways.setdefault(way, []).append(name)
    return [way if len(ways) == 1 else f"{way} ({', '.join(names)})" for way, names in ways.items()]


def _machine() -> str:
    """Its kind, and not which one it is."""
    graphics = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return ", ".join(filter(None, [counted(cores(), "core"), processor(), graphics]))


def processor() -> str:
    """Its kind, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def to_text(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    table = Table(box=SIMPLE_HEAD)
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position else "left")
    for line in lines:
        table.add_row(*line)
    # A fixed width and no markup: the same lines in a terminal, a log and a test.
    console = Console(width=_WIDTH, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())


def write(table: Path, rows: pd.DataFrame, apart: pd.DataFrame, text: str) -> list[Path]:
    """Write the Markdown to `table`, and rows and pairs beside it as CSV; the files."""
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(text)
    files = {table.with_suffix(".csv"): rows, table.with_suffix(".pairs.csv"): apart}
    for file, content in files.items():
        content.to_csv(file, index=False, lineterminator="\n")
    return [table, *files]
