"""Stage compare: compare every candidate with the original model → reports/comparison.csv, .html, .txt, .png,
runtimes.csv, choice.json, metrics.json, and model cards in reports/cards."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.artifacts.paths import (
    CARDS,
    COMPARISON_PAGE,
    COMPARISON_PICTURE,
    COMPARISON_TABLE,
    COMPARISON_TEXT,
    RUNTIMES,
)
from tasks.report.card import card
from tasks.report.choose_candidate import CHOICE
from tasks.report.conclusion import chosen, conclusion, dense_warning
from tasks.report.page import page
from tasks.report.result_files import load_results
from tasks.report.runtimes import runtimes_csv
from tasks.report.table import compared, to_csv, to_text
from tasks.report.tradeoff import tradeoff_png
from tasks.runtime.stage_runner import output, run, say, warn

METRICS = Path("reports/metrics.json")


def compare() -> None:
    """Write all reports and the model cards. The same inputs always give the same bytes."""
    results = load_results()
    cards = {candidate.name: card(results, candidate) for candidate in results.candidates}
    table, text, picture = to_csv(results), page(results, cards), tradeoff_png(results)
    warn(dense_warning(results))
    COMPARISON_TABLE.write_text(table)
    COMPARISON_PAGE.write_text(text)
    COMPARISON_PICTURE.write_bytes(picture)
    RUNTIMES.write_text(runtimes_csv(results))
    CHOICE.write_text(chosen(results).model_dump_json(indent=2))
    METRICS.write_text(json.dumps(compared(results), indent=2) + "\n")
    COMPARISON_TEXT.write_text("\n".join([to_text(results), "", *conclusion(results), ""]))
    with output(CARDS) as folder:
        for name, content in cards.items():
            (folder / f"{name}.md").write_text(content)
    say(f"read {COMPARISON_PAGE}")


if __name__ == "__main__":
    run("compare", compare)
