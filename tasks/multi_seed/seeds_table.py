"""Make the table of a study over several seeds: mean ± sample standard deviation for every candidate.

A study of several tasks has one table per task, and one for all tasks.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eckart.recipe_parts import Method
from eckart.recovery import Recovery
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name, stage_name
from tasks.artifacts.results_schema import CONTROL_NAME, SECONDS
from tasks.config.schema import Data, Model, Training
from tasks.multi_seed import pairwise_differences as pairs
from tasks.multi_seed import published_numbers
from tasks.multi_seed.published_numbers import TaskMetrics
from tasks.multi_seed.study_file import StudyFile
from tasks.report.numbers import between, count, counted, percent, score, times
from tasks.report.provenance import base, cut, source
from tasks.report.results import CONTROL as CONTROL_MODEL
from tasks.report.results import DENSE as DENSE_MODEL
from tasks.report.results import Results, ScoredModel, load_results
from tasks.report.table import ZERO_SHOT, printed
from tasks.report.table import numbers as table_numbers
from tasks.runtime.hardware import cores
from tasks.scoring.bootstrap import LEVEL, RESAMPLES, interval

CANDIDATE = ["recipe", "keep"]
DENSE = ("dense", "–")
"""Recipe and keep of the original model in the tables."""

CONTROL = (CONTROL_NAME, "1")
REFERENCES: Mapping[str, ScoredModel] = {"dense": DENSE_MODEL, "control": CONTROL_MODEL}

_STAGES = ("search", "factorize", "finetune")
_ENDS = ("low", "high")
_WIDTH = 220


def collect(folders: Mapping[int, Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Collect the results of all seeds.

    Args:
        folders: seed → workspace of the finished study with this seed.

    Returns:
        A frame with a row per seed and candidate (the columns of reports/comparison.csv and relative numbers), and the
        frame of `pairwise_differences.differences`.
    """
    seeds = {seed: _load(folder) for seed, folder in folders.items()}
    rows = pd.concat([_rows(seed, results, folders[seed]) for seed, results in seeds.items()], ignore_index=True)
    return rows.merge(_over_seeds(rows[CANDIDATE].drop_duplicates(), seeds), on=CANDIDATE), pairs.differences(seeds)


def _load(folder: Path) -> Results:
    with contextlib.chdir(folder):
        return load_results()


def _over_seeds(candidates: pd.DataFrame, seeds: Mapping[int, Results]) -> pd.DataFrame:
    """Return the intervals of each candidate's differences from the original model and the control.

    Differences are averaged over the seeds, which have the same test examples.
    """

    def draws(model: ScoredModel) -> np.ndarray:
        mean: np.ndarray = np.mean([results.resampled[model] for results in seeds.values()], axis=0)
        return mean

    lines = []
    for recipe, keep in candidates.itertuples(index=False, name=None):
        model = CONTROL_MODEL if (recipe, keep) == CONTROL else (candidate_name(recipe, keep), "recovered")
        ends = {name: interval(draws(model) - draws(reference)) for name, reference in REFERENCES.items()}
        named = {f"seeds_from_{name}_{end}": getattr(found, end) for name, found in ends.items() for end in _ENDS}
        lines.append({"recipe": recipe, "keep": keep, **named})
    return pd.DataFrame(lines)


def _rows(seed: int, results: Results, folder: Path) -> pd.DataFrame:
    rows, size = pd.DataFrame(table_numbers(results)), results.dense.size
    rows.insert(0, "seed", seed)
    rows["test_rows"] = results.dense.score.rows
    rows["trivial"] = results.dense.trivial
    for name, reference in REFERENCES.items():
        rows[f"of_{name}"] = pd.Series([results.retained(value, reference) for value in rows.recovered], dtype=float)
    rows["target_share"] = rows.target_parameters / results.target_parameters
    rows["model_share"] = rows.model_parameters / size.model_parameters
    rows["macs_share"] = rows.macs_per_token / size.macs_per_token
    rows["seconds"] = _seconds(rows, folder)
    return rows


def _seconds(rows: pd.DataFrame, folder: Path) -> list[float | None]:
    """Return the total time of each candidate's search, factorization and recovery; None if a time is unknown."""
    try:
        known = TypeAdapter(dict[str, float]).validate_json((folder / SECONDS).read_bytes())
    except (OSError, ValueError):  # the file is missing or malformed
        known = {}
    seconds = []
    for candidate in rows[CANDIDATE].itertuples(index=False, name=None):
        name = candidate_name(*candidate)
        stages = ["control"] if candidate == CONTROL else [stage_name(stage, name) for stage in _STAGES]
        took = [known[stage] for stage in stages if stage in known]
        seconds.append(sum(took) if len(took) == len(stages) else None)
    return seconds


def _metric(rows: pd.DataFrame) -> Metric:
    return METRICS[rows.metric.iloc[0]]


def cells(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of the table, one per candidate, sorted by keep (largest first) and metric."""
    metric = _metric(rows)
    unit, scored = ", %" if metric.share else "", ("trivial", "dense", "factorized", "recovered")
    heads = ["recipe", "keep", *(f"{name}{unit}" for name in scored), *(f"of {name}, %" for name in REFERENCES)]
    heads += [f"from {name}{unit} ({100 * LEVEL:.0f} %)" for name in REFERENCES]
    heads += ["targets", "model parameters", "MACs per token", "speedup", "search steps", "seconds"]
    heads += ["rank after pruning", f"shaped{unit}"]
    groups = [group for _, group in rows.groupby(CANDIDATE, sort=False)]
    groups.sort(key=lambda group: (-float(group.keep.iloc[0]), -metric.goodness(group.recovered.mean())))
    return heads, [_line(group, metric, scored) for group in groups]


def _line(group: pd.DataFrame, metric: Metric, scored: Sequence[str]) -> list[str]:
    """Return the cells of a candidate; `group` has its row for each seed."""
    return [
        *(str(group[name].iloc[0]) for name in CANDIDATE),
        *(_scores(group[name], metric) for name in scored),
        *(_spread(group[f"of_{name}"] * 100) for name in REFERENCES),
        *(_difference(group, name, metric) for name in REFERENCES),
        percent(group.target_share.mean()),
        f"{count(group.model_parameters.mean())} ({percent(group.model_share.mean())})",
        f"{count(group.macs_per_token.mean())} ({percent(group.macs_share.mean())})",
        times(group.speedup.mean()),
        f"{group.search_steps.mean():.0f}",
        "–" if group.seconds.isna().any() else f"{group.seconds.mean():.0f}",
        _spread(group.average_rank),
        _scores(group["shaped"], metric),
    ]


def _difference(group: pd.DataFrame, reference: str, metric: Metric) -> str:
    """Format the difference from a reference: mean ± spread over seeds, and the mean's interval over test examples."""
    low, high = (group[f"seeds_from_{reference}_{end}"].iloc[0] for end in _ENDS)
    ends = f"{100 * low:+z.1f} to {100 * high:+z.1f}" if metric.share else between(low, high, group.recovered.mean())
    return f"{_scores(group.recovered - group[reference], metric)} ({ends})"


def _scores(values: pd.Series[float], metric: Metric) -> str:
    """Format mean ± spread of a metric: in percent if it is a share, otherwise with digits that suit its magnitude."""
    return _spread(values * 100) if metric.share else _plain(values)


def _plain(values: pd.Series[float]) -> str:
    if values.empty or values.isna().any():
        return "–"
    return score(values.mean(), values.std(ddof=1) if len(values) > 1 else None)


def _spread(values: pd.Series[float]) -> str:
    """Format mean ± sample standard deviation with one decimal; with one seed only the mean."""
    if values.empty or values.isna().any():
        return "–"
    mean = f"{values.mean():z.1f}"  # never -0.0
    return f"{mean} ± {values.std(ddof=1):.1f}" if len(values) > 1 else mean


def combined(rows: pd.DataFrame, metrics: TaskMetrics) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of a table of all tasks, as papers print GLUE: a line per candidate, a column per task.

    The original model comes first. Metrics between -1 and 1 are printed × 100. If all metrics are, the last column is
    their mean over the tasks, for the seeds that all tasks have. A missing value, or a mean with one, is a dash.

    Args:
        rows: rows of all tasks from `collect`, with a column `task`.
        metrics: task → its metric.
    """
    points, kinds = _points(rows, metrics), {task: METRICS[metric] for task, metric in metrics.items()}
    signs = pd.Series({task: -1 if kind.lower_is_better else 1 for task, kind in kinds.items()})
    goodness = (points * signs).mean(axis=1).groupby(level=CANDIDATE).mean()
    order = sorted(goodness.index, key=lambda name: (name != DENSE, name != DENSE and -float(name[1]), -goodness[name]))
    columns = [(f"{task}, {kind.title}", points[task], kind.bounded) for task, kind in kinds.items()]
    if len(kinds) > 1 and all(kind.bounded for kind in kinds.values()):
        columns.append(("mean", points.mean(axis=1, skipna=False), True))
    lines = [
        [*name, *((_spread if bounded else _plain)(values.loc[name].dropna()) for _, values, bounded in columns)]
        for name in order
    ]
    return [*CANDIDATE, *(head for head, _, _ in columns)], lines


def _points(rows: pd.DataFrame, metrics: TaskMetrics) -> pd.DataFrame:
    """Return the recovered metrics, × 100 if between -1 and 1: a row per candidate and seed, a column per task."""
    dense = rows.drop_duplicates(["task", "seed"]).assign(
        recipe=DENSE[0], keep=DENSE[1], recovered=lambda frame: frame.dense
    )
    both = pd.concat([dense, rows])
    factor = both.task.map({task: 100 if METRICS[metric].bounded else 1 for task, metric in metrics.items()})
    wide = both.assign(points=both.recovered * factor).set_index([*CANDIDATE, "seed", "task"]).points.unstack("task")
    return wide.reindex(columns=list(metrics)).rename_axis(columns=None)


def zero_shot(rows: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the table of zero-shot tasks (of lm-eval); the original model comes first."""
    asked = [name for name in map(str, rows.columns) if name.startswith(ZERO_SHOT)]
    names = {name: 1 if name.endswith(_NO_SHARES) else 100 for name in asked}
    seeds = rows.drop_duplicates("seed")
    lines = [[*DENSE, *(_spread(seeds[f"dense.{name}"] * factor) for name, factor in names.items())]]
    for candidate, group in rows.groupby(CANDIDATE, sort=False):
        lines.append([*map(str, candidate), *(_spread(group[name] * factor) for name, factor in names.items())])
    return [*CANDIDATE, *(name.removeprefix(ZERO_SHOT).replace(".", " ") for name in names)], lines


def joined(found: Mapping[str | None, pd.DataFrame]) -> pd.DataFrame:
    """Join the rows of all tasks, adding a column `task`. In a study without tasks, rows are returned unchanged."""
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
    """Return the rows of all tasks, and the page as Markdown, with all tables and published numbers.

    Above each table are the settings of its study, without date or path. Times are those of this machine.

    Args:
        studies: one for each task.
        found: task → rows from `collect`.
        apart: task → differences from `collect`.
        name: name of the study. The page links to NAME.csv and NAME.pairs.csv, which must be in the same folder.
        command: the command that made the page.
    """
    rows, metrics = joined(found), {study.task: study.metric for study in studies}
    cited = _cited(studies[0], metrics)
    unit = "seed" if None in metrics else "task and seed"
    text = [
        f"# {name}",
        "",
        f"Made by `{command}`. The numbers of each {unit} are in [{name}.csv]({name}.csv), the "
        f"differences between recipes with their intervals in [{name}.pairs.csv]({name}.pairs.csv).",
        "",
    ]
    if None in metrics:
        return rows, _lines([*text, *_part(rows, apart[None], studies[0]), *cited])
    text += [_OF_ALL, "", *_table(*combined(rows, metrics)), *cited]
    for study in studies:
        text += ["", f"## {study.task}", "", *_part(found[study.task], apart[study.task], study)]
    return rows, _lines(text)


_OF_ALL = "Metrics after recovery, × 100 except perplexities; `dense` is the original model."
_NO_SHARES = ("perplexity", "bits_per_byte")  # metrics of lm-eval that do not lie between 0 and 1
_OF_ZERO_SHOT = "Zero-shot tasks of lm-evaluation-harness after recovery, × 100 except perplexities and bits per byte."
_OF_TRIALS = "Trials at one keep and with one seed; the table above has each recipe's best on validation examples (*)."
_OF_OTHERS = "Numbers from papers, not measured here; the last column points to the note on what differs."


def _part(rows: pd.DataFrame, apart: pd.DataFrame, study: StudyFile) -> list[str]:
    """Return the section of one task, as lines: settings, tables and trials."""
    heads, lines = zero_shot(rows)
    asked = ["", _OF_ZERO_SHOT, "", *_table(heads, lines)] if heads != CANDIDATE else []
    best = {"Best after recovery": "; ".join(pairs.leaders(apart, rows)) + "."}
    facts = [f"- {what}: {fact}" for what, fact in (best | _facts(rows, study.params)).items()]
    return [*facts, "", *_table(*cells(rows)), *asked, *_tried(study)]


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    align = ("left", *["right"] * (len(heads) - 1))
    return [pd.DataFrame(lines, columns=list(heads)).to_markdown(index=False, disable_numparse=True, colalign=align)]


def _tried(study: StudyFile) -> list[str]:
    """Return the table of the study's trials, as lines; [] if there were none."""
    if not study.tried:
        return []
    metric = METRICS[study.metric]
    unit = ", %" if metric.share else ""
    lines = [
        [
            trial.recipe,
            _words(trial.change),
            _scores(pd.Series([trial.validation]), metric),
            "*" if trial.chosen else "",
        ]
        for trial in study.tried
    ]
    return ["", _OF_TRIALS, "", *_table(["recipe", "trial", f"validation{unit}", ""], lines)]


def _words(change: Mapping[str, Any], prefix: str = "") -> str:
    """Format the change of a trial, as `recovery.steps 30, ranks.kind waterfill`, or `as it is` if it is empty."""
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
    metric = METRICS[data.metric]
    retained = "each ÷ recovered" if metric.lower_is_better else "recovered ÷ each"
    test = f"on {rows.test_rows.iloc[0]:,} test examples"
    return {
        "Seeds": f"{', '.join(map(str, seeds))}; {spread}. Original model, search and recovery are trained for each.",
        "Metric": f"{metric.with_direction} {test}; of dense and of control: {retained}.",
        "Trivial": "the metric of an answer that reads no input.",
        "Control": f"the original model with the recovery fine-tuning of {params['study']['control']}.",
        "Differences": "recovered minus dense and minus control, averaged over the seeds, with the "
        f"{100 * LEVEL:.0f} % interval of {RESAMPLES:,} paired resamples of the test examples, the same for all "
        "seeds. One such interval in 20 misses.",
        "Data": f"{source(data)}, split with seed {data.seed}, at most {data.sizes.train:,} training examples; "
        f"{cut(data)}.",
        "Model": f"{base(model)}; as the original model, "
        + (f"fine-tuned for {teacher.epochs:g} × the training split." if teacher.epochs else "taken as it is."),
        "Recovery": "; ".join(_recoveries(params)) + ".",
        "Seconds": "search, factorization and recovery of a candidate on this machine, while others ran; without the "
        "original model and the statistics, which all share.",
        "Machine": f"{_machine()}; {counted(params['threads']['candidate'], 'thread')} for each candidate.",
    }


def _recoveries(params: Mapping[str, Any]) -> list[str]:
    """Describe the distinct settings of recovery fine-tuning, each with the recipes that have it, unless all do."""
    ways: dict[str, list[str]] = {}
    for name in params["study"]["recipes"]:
        recovery: Method = TypeAdapter(Recovery).validate_python(params["recipes"][name]["recovery"])
        way = ", then ".join(
            f"{training.steps} steps of {training.batch_size} examples at a rate of {training.learning_rate:g}"
            for training in recovery.trainings.values()
        )
        ways.setdefault(way, []).append(name)
    return [way if len(ways) == 1 else f"{way} ({', '.join(names)})" for way, names in ways.items()]


def _machine() -> str:
    """Describe the machine by its hardware, without its name."""
    graphics = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return ", ".join(filter(None, [counted(cores(), "core"), processor(), graphics]))


def processor() -> str:
    """Return the name of the processor's model, or '' if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def to_text(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as text for the terminal."""
    table = Table(box=SIMPLE_HEAD)
    for position, head in enumerate(heads):
        table.add_column(head, justify="right" if position else "left")
    for line in lines:
        table.add_row(*line)
    return printed(table, width=_WIDTH)


def write(table: Path, rows: pd.DataFrame, apart: pd.DataFrame, text: str) -> list[Path]:
    """Write the page and, in the same folder, rows and differences as CSV files.

    Args:
        table: path of the page, NAME.md.
        rows: rows of all tasks.
        apart: differences between pairs of models.
        text: the page in Markdown.

    Returns:
        The paths of all files.
    """
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(text)
    files = {table.with_suffix(".csv"): rows, table.with_suffix(".pairs.csv"): apart}
    for file, content in files.items():
        content.to_csv(file, index=False, lineterminator="\n")
    return [table, *files]
