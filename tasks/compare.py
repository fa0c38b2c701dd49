"""Compare: every candidate beside the dense model → reports/comparison.csv, .html, .txt, .png, runtimes.csv."""

from __future__ import annotations

from pathlib import Path

from tasks.report.page import page
from tasks.report.plots import tradeoff_png
from tasks.report.results import load_results
from tasks.report.runtimes import runtimes_csv
from tasks.report.table import to_csv, to_text
from tasks.stage import run, say

REPORTS = Path("reports")
TABLE = REPORTS / "comparison.csv"
PAGE = REPORTS / "comparison.html"
TEXT = REPORTS / "comparison.txt"
PICTURE = REPORTS / "comparison.png"
RUNTIMES = REPORTS / "runtimes.csv"


def compare() -> None:
    """Write the table, the page and the trade-off plot; the same inputs give the same bytes."""
    results = load_results()
    table, text, picture = to_csv(results), page(results), tradeoff_png(results)
    TABLE.write_text(table)
    PAGE.write_text(text)
    PICTURE.write_bytes(picture)
    RUNTIMES.write_text(runtimes_csv(results))
    TEXT.write_text(to_text(results) + "\n")
    say(f"read {PAGE}")


if __name__ == "__main__":
    run("compare", compare)
