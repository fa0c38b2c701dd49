"""Make the table of a study over several seeds: mean ± sample standard deviation for every candidate.

A study of several tasks has one table per task, and one for all tasks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eckart.recipe_parts import Method
from eckart.recovery import Recovery
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name, stage_name
from tasks.artifacts.results_schema import CONTROL_NAME, SECONDS
from tasks.config.schema import Data, Model, Training
from tasks.multi_seed import published_numbers
from tasks.multi_seed.pairwise_differences import differences, leaders, mean_difference
from tasks.multi_seed.published_numbers import TaskMetrics
from tasks.multi_seed.study_file import StudyFile
from tasks.nlp_tasks import task_class
from tasks.report.numbers import between, count, counted, percent, score, times
from tasks.report.provenance import base, calibration, cut, generation, source
from tasks.report.result_files import load_results
from tasks.report.results import CONTROL, Results, ScoredModel
from tasks.report.results import DENSE as DENSE_MODEL
from tasks.report.rounding import rounded
from tasks.report.runtimes import TEXTS
from tasks.report.table import ZERO_SHOT, printed
from tasks.report.table import numbers as table_numbers
from tasks.scoring.bootstrap import LEVEL, RESAMPLES

CANDIDATE = ["recipe", "keep"]
CONTROL_ROW = (CONTROL_NAME, "1")
REFERENCES: Mapping[str, ScoredModel] = {"dense": DENSE_MODEL, "control": CONTROL}
_TITLES = {"dense": "original", "control": "control"}

SHOWN = (
    "Metrics after recovery fine-tuning, × 100 except perplexities. `dense` is the original model, "
    f"`{CONTROL_NAME}` the control."
)
"""The line above the table of all tasks."""

_STAGES = ("search", "factorize", "finetune")


def collect(folders: Mapping[int, Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Collect the results of all seeds from their workspaces.

    Returns:
        Two DataFrames. The first has a row per seed and candidate, with the columns of reports/comparison.csv and
        numbers relative to the original model and the control. `pairwise_differences.differences` makes the second.
    """
    seeds: dict[int, Results] = {}
    for seed, folder in folders.items():
        with contextlib.chdir(folder):
            seeds[seed] = load_results()
    rows = pd.concat([_rows(seed, results, folders[seed]) for seed, results in seeds.items()], ignore_index=True)
    candidates = rows[CANDIDATE].itertuples(index=False, name=None)
    models = [CONTROL if name == CONTROL_ROW else (candidate_name(*name), "recovered") for name in candidates]
    for name, reference in REFERENCES.items():
        ends = [mean_difference(seeds, model, reference) for model in models]
        rows[f"seeds_from_{name}_low"] = [interval.low for interval in ends]
        rows[f"seeds_from_{name}_high"] = [interval.high for interval in ends]
    return rows, differences(seeds)


def _rows(seed: int, results: Results, folder: Path) -> pd.DataFrame:
    rows, size = pd.DataFrame(table_numbers(results)), results.dense.size
    rows.insert(0, "seed", seed)
    rows["test_rows"] = results.dense.score.examples
    rows["trivial"] = results.dense.trivial
    for name, reference in REFERENCES.items():
        rows[f"of_{name}"] = pd.Series([results.retained(value, reference) for value in rows.recovered], dtype=float)
    rows["target_share"] = rows.target_parameters / results.target_parameters
    rows["model_share"] = rows.model_parameters / size.model_parameters
    rows["macs_share"] = rows.macs_per_token / size.macs_per_token
    rows["seconds"] = _seconds(rows, folder)
    rows["machine"] = results.machines
    return rows


def _seconds(rows: pd.DataFrame, folder: Path) -> list[float | None]:
    """Return the total time of each candidate's search, factorization and recovery; None if a time is unknown."""
    try:
        by_stage = TypeAdapter(dict[str, float]).validate_json((folder / SECONDS).read_bytes())
    except (OSError, ValueError):  # the file is missing or malformed
        by_stage = {}
    totals = []
    for candidate in rows[CANDIDATE].itertuples(index=False, name=None):
        name = candidate_name(*candidate)
        stages = ["control"] if candidate == CONTROL_ROW else [stage_name(stage, name) for stage in _STAGES]
        totals.append(sum(by_stage[stage] for stage in stages) if by_stage.keys() >= {*stages} else None)
    return totals


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table of candidates as text, a line per candidate: largest keep first, then best metric first.

    A column without any value is left out.
    """
    metric = METRICS[rows.metric.iloc[0]]
    unit, points = unit_of(metric), ", points" if metric.bounded else ""
    titles = {"trivial": "trivial", "dense": "original", "factorized": "factorized", "recovered": "recovered"}
    groups = rows.groupby(CANDIDATE, sort=False)
    goodness = groups.recovered.mean().map(metric.goodness)
    lines = [
        {f"{title}{unit}": _scores(group[name], metric) for name, title in titles.items()}
        | {f"of {_TITLES[name]}, %": _spread(100 * group[f"of_{name}"]) for name in REFERENCES}
        | {
            f"vs. {_TITLES[name]}{points} ({100 * LEVEL:.0f} %)": _difference(group, name, metric)
            for name in REFERENCES
        }
        | {
            "targets": percent(group.target_share.mean()),
            "model parameters": f"{count(group.model_parameters.mean())} ({percent(group.model_share.mean())})",
            "MACs per token": f"{count(group.macs_per_token.mean())} ({percent(group.macs_share.mean())})",
            "speedup": "–" if group.speedup.isna().any() else times(group.speedup.mean()),
            "search steps": f"{group.search_steps.mean():.0f}",
            "seconds": "–" if group.seconds.isna().any() else f"{group.seconds.mean():.0f}",
            "rank after pruning": _spread(group.average_rank),
            f"shaped{unit}": _scores(group.shaped, metric),
        }
        for _, group in groups
    ]
    table = _in_order(pd.DataFrame(lines, index=goodness.index), goodness)
    return table.loc[:, (table != "–").any()]


def combined(rows: pd.DataFrame, metrics: TaskMetrics) -> pd.DataFrame:
    """Return the table of all tasks as text, laid out as papers print results on GLUE.

    Each candidate has a line, each task a column. The original model comes first. Metrics between -1 and 1 are printed
    × 100. If all tasks have such metrics, the last column is their mean over the tasks, for the seeds that all tasks
    have. A dash stands for a missing value.
    """
    kinds = {task: METRICS[metric] for task, metric in metrics.items()}
    both = _with_dense(rows, {"recovered": "dense"})
    scores = both.pivot(index=[*CANDIDATE, "seed"], columns="task", values="recovered").reindex(columns=list(kinds))
    points = scores * [100 if kind.bounded else 1 for kind in kinds.values()]
    goodness = (points * [kind.goodness(1) for kind in kinds.values()]).mean(axis=1).groupby(CANDIDATE).mean()
    points.columns = pd.Index([f"{task}, {kind.title}" for task, kind in kinds.items()])
    formats = [_one_decimal if kind.bounded else score for kind in kinds.values()]
    if len(kinds) > 1 and all(kind.bounded for kind in kinds.values()):
        points["mean"] = points.mean(axis=1, skipna=False)
        formats.append(_one_decimal)
    texts = {
        head: points[head].dropna().groupby(CANDIDATE).agg(_spread, text).reindex(goodness.index, fill_value="–")
        for head, text in zip(points, formats, strict=True)
    }
    return _in_order(pd.DataFrame(texts), goodness)


def texts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table of the texts in evaluate.texts as text; the original model comes first.

    Each has a column for the metric and one for its multiple of the original model's.
    """
    names = [name.removeprefix(TEXTS) for name in map(str, rows.columns) if name.startswith(TEXTS)]
    both = _with_dense(rows, {f"{TEXTS}{name}": f"dense.{TEXTS}{name}" for name in names})
    values = both[CANDIDATE].copy()
    for name in names:
        values[name] = both[f"{TEXTS}{name}"]
        values[f"{name} ÷ original"] = values[name] / both[f"dense.{TEXTS}{name}"]
    return values.groupby(CANDIDATE, sort=False).agg(_spread, score).reset_index()


def zero_shot(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the table of lm-eval's zero-shot tasks as text, shares × 100; the original model comes first."""
    names = [name for name in map(str, rows.columns) if name.startswith(ZERO_SHOT)]
    values = _with_dense(rows, {name: f"dense.{name}" for name in names}).set_index(CANDIDATE)[names]
    unbounded = {
        name for name in names if name.endswith(("perplexity", "bits_per_byte")) or (values[name].abs() > 1).any()
    }
    values *= {name: 1 if name in unbounded else 100 for name in names}
    formats = {name: partial(_spread, text=score) if name in unbounded else _spread for name in names}
    texts = values.groupby(CANDIDATE, sort=False).agg(formats).reset_index()
    return texts.rename(columns=lambda name: name.removeprefix(ZERO_SHOT).replace(".", " "))


def _with_dense(rows: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Put rows of the original model before `rows`. `columns`: column → the column with the original model's value."""
    first = rows.drop_duplicates([name for name in ("task", "seed") if name in rows])
    own = {name: first[dense] for name, dense in columns.items()}
    return pd.concat([first.assign(recipe="dense", keep="–", **own), rows])


def _in_order(lines: pd.DataFrame, goodness: pd.Series[float]) -> pd.DataFrame:
    """Sort lines by keep (the original model first, then the largest) and goodness; both arguments have one order."""
    keys = goodness.rename("goodness").reset_index()
    keys["keep"] = pd.to_numeric(keys.keep, errors="coerce").fillna(math.inf)  # the original model has no keep
    return lines.iloc[keys.sort_values(["keep", "goodness"], ascending=False).index].reset_index()


def _difference(group: pd.DataFrame, reference: str, metric: Metric) -> str:
    """Format the difference from a reference: mean ± spread over seeds, and the mean's interval over test examples."""
    low, high = (group[f"seeds_from_{reference}_{end}"].iloc[0] for end in ("low", "high"))
    difference = group.recovered - group[reference]
    if not metric.bounded:
        return f"{_spread(difference, score)} ({between(low, high, group.recovered.mean())})"
    if difference.isna().any():
        return "–"
    mean, *others = (rounded(100 * value, sign=True) for value in (difference.mean(), low, high))
    spread = f" ± {rounded(100 * difference.std())}" if len(difference) > 1 else ""
    return f"{mean}{spread} ({' to '.join(others)})"


def unit_of(metric: Metric) -> str:
    """Return what follows the name of a metric in the head of a column."""
    return ", %" if metric.share else ", × 100" if metric.bounded else ""


def _scores(values: pd.Series[float], metric: Metric) -> str:
    """Format mean ± spread of a metric: × 100 if it is bounded, otherwise with digits that suit its magnitude."""
    return _spread(values * 100) if metric.bounded else _spread(values, score)


def _one_decimal(*numbers: float) -> str:
    return " ± ".join(map(rounded, numbers))


def _spread(values: pd.Series[float], text: Callable[..., str] = _one_decimal) -> str:
    """Format the mean and the sample standard deviation (none for one seed) by `text`; a dash if a value is missing."""
    if values.isna().any():
        return "–"
    return text(values.mean(), values.std()) if len(values) > 1 else text(values.mean())


def joined(tables: Mapping[str | None, pd.DataFrame]) -> pd.DataFrame:
    """Join the tables of all tasks, adding a column `task`. In a study without tasks, the table is unchanged."""
    if None in tables:
        return tables[None]
    return pd.concat([rows.assign(task=task)[["task", *rows]] for task, rows in tables.items()], ignore_index=True)


def page(
    studies: Sequence[StudyFile],
    rows: Mapping[str | None, pd.DataFrame],
    pairs: Mapping[str | None, pd.DataFrame],
    name: str,
    command: str,
) -> tuple[pd.DataFrame, str]:
    """Return a DataFrame with the rows of all tasks, and the page as Markdown, with all tables and published numbers.

    Above each table are the settings of its study, without date or path.

    Args:
        studies: the study of each task.
        rows, pairs: task → the first and the second frame that `collect` returns.
        name: name of the study. The page links to NAME.csv and NAME.pairs.csv, which must be in the same folder.
        command: the command that made the page.
    """
    all_rows, metrics = joined(rows), {study.task: study.metric for study in studies}
    cited, unit = _cited(studies[0], metrics), "seed" if None in metrics else "task and seed"
    blocks = [
        f"# {name}",
        f"Made by `{command}`. The numbers of each {unit} are in [{name}.csv]({name}.csv), the "
        f"differences between recipes with their intervals in [{name}.pairs.csv]({name}.pairs.csv).",
    ]
    if None in metrics:
        blocks += [*_part(all_rows, pairs[None], studies[0]), *cited]
    else:
        blocks += [SHOWN]
        blocks += [_markdown(combined(all_rows, metrics)), *cited]
        for study in studies:
            blocks += [f"## {study.task}", *_part(rows[study.task], pairs[study.task], study)]
    return all_rows, "\n\n".join(blocks) + "\n"


def _part(rows: pd.DataFrame, pairs: pd.DataFrame, study: StudyFile) -> list[str]:
    """Return the part of the page on one task, as Markdown blocks: settings, tables and trials."""
    facts = {"Best after recovery": "; ".join(leaders(pairs, rows)) + "."} | _facts(rows, study.params)
    blocks = ["\n".join(f"- {topic}: {fact}" for topic, fact in facts.items()), _markdown(cells(rows))]
    other = texts(rows)
    if len(other.columns) > len(CANDIDATE):
        blocks += [
            f"{METRICS[study.metric].title.capitalize()} on other texts after recovery, and ÷ the original model's.",
            _markdown(other),
        ]
    zero = zero_shot(rows)
    if len(zero.columns) > len(CANDIDATE):
        blocks += [
            "Zero-shot tasks of lm-evaluation-harness after recovery, × 100 except perplexities, bits per byte "
            "and what exceeds 1, such as BLEU.",
            _markdown(zero),
        ]
    if study.tried:
        blocks += [
            "Trials at one keep and with one seed; the table above has each recipe's best on validation examples (*).",
            _markdown(_trials(study)),
        ]
    return blocks


def _trials(study: StudyFile) -> pd.DataFrame:
    """Return the table of trials as text."""
    metric, trials = METRICS[study.metric], pd.DataFrame(list(study.tried))
    trials["change"] = trials.change.map(_change_text)
    trials["validation"] = [_scores(pd.Series([value]), metric) for value in trials.validation]
    trials["chosen"] = trials.chosen.map({True: "*", False: ""})
    return trials.set_axis(["recipe", "trial", f"validation{unit_of(metric)}", ""], axis="columns")


def _markdown(table: pd.DataFrame) -> str:
    align = ("left", *["right"] * (len(table.columns) - 1))
    return table.to_markdown(index=False, disable_numparse=True, colalign=align)


def _change_text(change: Mapping[str, Any], prefix: str = "") -> str:
    """Format the change of a trial, as `recovery.steps 30, ranks.kind waterfill`, or `as it is` if it is empty."""
    parts = [
        _change_text(value, f"{prefix}{key}.") if isinstance(value, dict) else f"{prefix}{key} {value}"
        for key, value in change.items()
    ]
    return ", ".join(parts) or "as it is"


def _cited(study: StudyFile, metrics: TaskMetrics) -> list[str]:
    """Return the Markdown blocks with the published numbers; [] if there are none for these tasks."""
    cited = published_numbers.beside(study.published, metrics)
    if not cited:
        return []
    blocks = [
        "## Published",
        "Numbers from papers, not measured here; the last column points to the note on what differs.",
        _markdown(published_numbers.table(cited, metrics)),
    ]
    notes = [f"{number}. {note}" for number, note in enumerate(published_numbers.notes(cited), start=1)]
    return blocks + (["\n".join(notes)] if notes else [])


def _facts(rows: pd.DataFrame, params: Mapping[str, Any]) -> dict[str, str]:
    data, model = Data(**params["data"]), Model(**params["model"])
    teacher = Training(**params["teacher"])
    seeds = rows.seed.unique()
    spread = "mean ± sample standard deviation over them" if len(seeds) > 1 else "one run, no spread"
    metric = METRICS[data.metric]
    retained = "that of each ÷ the candidate's" if metric.lower_is_better else "the candidate's metric ÷ that of each"
    machines = dict.fromkeys(name for names in rows.machine.unique() for name in names.split("; ") if name)
    test = f"on {rows.test_rows.iloc[0]:,} test examples"
    most = f"at most {data.sizes.train:,}" if data.sizes.train else "all"
    return {
        "Seeds": f"{', '.join(map(str, seeds))}; {spread}. Original model, search and recovery are trained for each.",
        "Metric": f"{metric.with_direction} {test}. Columns *of original* and *of control*: {retained}.",
        "Trivial": "the metric of an answer that needs no model.",
        "Control": "the original model itself, whose answers the candidates are trained to."
        if task_class(data.task).from_original
        else _control(params),
        "Differences": "recovered minus original and minus control, mean over the seeds, so a loss is "
        f"{'positive' if metric.lower_is_better else 'negative'}; the {100 * LEVEL:.0f} % interval is of {RESAMPLES:,} "
        "paired resamples of the test examples, the same for all seeds. About 1 in 20 misses the true value.",
        "Data": f"{source(data)}, split with seed {data.seed}, {most} training examples; {cut(data)}.",
        **calibration(data),
        **generation(data),
        "Model": f"{base(model)}; the original model is "
        + (f"this, fine-tuned on {teacher.epochs:g} × the training split." if teacher.epochs else "this, as it is."),
        "Recovery": "; ".join(_recoveries(params)) + ".",
        "Seconds": "search, factorization and fine-tuning of one candidate; others may run at the same time. Not "
        "included: the original model and the calibration statistics, which all candidates share.",
        "Machine": f"{'; '.join(machines) or 'unknown'}; "
        f"{counted(params['threads']['candidate'], 'thread')} for each candidate.",
    }


def _recovery(params: Mapping[str, Any], recipe: str) -> Method:
    recovery: Method = TypeAdapter(Recovery).validate_python(params["recipes"][recipe]["recovery"])
    return recovery


def _control(params: Mapping[str, Any]) -> str:
    name = params["study"]["control"]
    if _recovery(params, name).trains:
        return f"the original model with the recovery fine-tuning of {name}."
    return f"the original model itself, because the recovery of {name} takes no step."


def _recoveries(params: Mapping[str, Any]) -> list[str]:
    """Describe each distinct setting of recovery fine-tuning, with its recipes unless all recipes have this setting."""
    by_text: dict[str, list[str]] = {}
    for name in params["study"]["recipes"]:
        parts = [
            f"{training.steps} steps of {training.batch_size} examples at a rate of {training.learning_rate:g}"
            + f", {training.schedule}" * (training.schedule != "linear")
            for training in _recovery(params, name).trainings.values()
            if training.steps
        ]
        text = ", then ".join(parts) or "none"
        by_text.setdefault(text, []).append(name)
    return [text if len(by_text) == 1 else f"{text} ({', '.join(names)})" for text, names in by_text.items()]


def to_text(table: pd.DataFrame) -> str:
    """Return a table as text for the terminal."""
    shown = Table(box=SIMPLE_HEAD)
    for position, head in enumerate(table.columns):
        shown.add_column(head, justify="right" if position else "left")
    for line in table.itertuples(index=False):
        shown.add_row(*line)
    return printed(shown, width=220)


def write(table: Path, rows: pd.DataFrame, pairs: pd.DataFrame, text: str) -> list[Path]:
    """Write the page (`text`) to `table`, and rows and pairs as CSV files beside it; return the paths of all files."""
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(text)
    files = {table.with_suffix(".csv"): rows, table.with_suffix(".pairs.csv"): pairs}
    for file, content in files.items():
        content.to_csv(file, index=False, lineterminator="\n")
    return [table, *files]
