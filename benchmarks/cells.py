"""The arguments of benchmarks, and the cells of their tables."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.paths import FINETUNED
from tasks.artifacts.results_schema import Times
from tasks.artifacts.task_spec import load_task
from tasks.multi_seed.seeds_table import unit_of
from tasks.report.numbers import score
from tasks.report.rounding import rounded

ORIGINAL = "original"


def parser_of_candidates(description: str | None) -> ArgumentParser:
    """Return a parser of the argument `candidates`; a name that is not in models/finetuned is refused."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    names = sorted(folder.name for folder in FINETUNED.glob("*"))
    parser.add_argument("candidates", nargs="+", choices=names, metavar="CANDIDATE", help="of models/finetuned")
    return parser


def metric_title() -> str:
    """Return the name and unit of the study's metric, as the head of a column."""
    metric = METRICS[load_task().metric]
    return metric.title + unit_of(metric)


def metric_cell(value: float) -> str:
    return rounded(100 * value) if METRICS[load_task().metric].bounded else score(value)


def megabytes(size: float) -> str:
    return rounded(size / 1e6)


def times_cell(times: Times) -> str:
    """Format a ratio and its interval: 1.51 (1.50 to 1.52)."""
    return f"{rounded(times.median, 2)} ({rounded(times.low, 2)} to {rounded(times.high, 2)})"
