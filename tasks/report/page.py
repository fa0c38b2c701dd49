"""Write the comparison of a study as one self-contained HTML page, which loads no other files.

Its script (page.js) sorts and filters the tables; the page can be read without it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from eckart.recipe import captions
from tasks.nlp_tasks import kind_of
from tasks.report.conclusion import conclusion, dense_warning
from tasks.report.frontier import frontier_svgs
from tasks.report.goals import goal_rows
from tasks.report.heatmap import columns, heat_maps
from tasks.report.non_inferiority import verdict
from tasks.report.predictions import predicted_and_measured, predictions_read, predictions_svg
from tasks.report.provenance import provenance, recipes_yaml
from tasks.report.results import Results
from tasks.report.runtimes import runtime_rows
from tasks.report.shipping import tiles, to_ship
from tasks.report.table import AFTER, BEFORE, legend, notes, row_groups, zero_shot
from tasks.report.tradeoff import tradeoff_svg
from tasks.report.training_plots import curves_svg, measures_svgs
from tasks.runtime.templates import template

_PARTS = re.compile(r"<(pre|code|script|style)\b.*?</\1>|<[^>]*>|[^<]+", re.DOTALL)  # code, tags and text
_HYPHEN = re.compile(r"(?<![\w.])-(?=\d)")  # before a number; on the page it becomes a minus sign


def page(results: Results, cards: Mapping[str, str]) -> str:
    """Return the page as HTML, with all names and numbers escaped. `cards`: candidate → model card."""
    meanings, shipped = captions(), to_ship(results)
    script = Path(__file__).with_name("page.js").read_text()
    text = template(Path(__file__).with_name("page.html.j2")).render(
        results=results,
        metric=results.metric,
        cards=cards,
        contents=_contents(results),
        classes=kind_of(results.task).objective().classes,
        shipped=shipped,
        tiles=tiles(results, shipped),
        verdict=verdict(results, shipped.run.scored),
        conclusion=conclusion(results),
        warning=dense_warning(results),
        notes=[*legend(results, "In color:"), *notes(results)],
        before=BEFORE,
        after=AFTER,
        rows=row_groups(results),
        sizes=frontier_svgs(results, "size"),
        times=frontier_svgs(results, "time"),
        tradeoffs=[tradeoff_svg(results), tradeoff_svg(results, narrow=True)],
        curves=curves_svg(results),
        predictions=predictions_svg(results),
        predictions_read=predictions_read(results),
        searches=measures_svgs(results, "search_curve"),
        recoveries=measures_svgs(results, "curve"),
        zero_shot=zero_shot(results),
        goals=goal_rows(results),
        runtimes=runtime_rows(results),
        measures={name: meanings[name] for name in results.measures if name in meanings},
        unscored=any(candidate.factorized is None for candidate in results.candidates),
        heat_maps=heat_maps(results),
        columns=columns(results),
        narrows=any(candidate.decision.widths for candidate in results.candidates),
        provenance=provenance(results),
        recipes=recipes_yaml(results, results.recipes),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return _PARTS.sub(lambda part: part[0] if part[0].startswith("<") else _HYPHEN.sub("−", part[0]), text)


def _contents(results: Results) -> dict[str, str]:
    """Return the sections of the page: id → title."""
    sections = {
        "files": f"{results.metric.title} against size",
        "candidates": "Candidates",
        "choice": "The choice",
        "goals": "Goals" if results.goals else "",
        "exported": "Exported files" if results.exports else "",
        "zero-shot": "Zero-shot tasks" if results.dense.zero_shot else "",
        "text": "Generated text" if results.dense.continuations else "",
        "time": f"{results.metric.title} against time",
        "keep": "Before and after fine-tuning",
        "ranks": "Ranks",
        "predicted": "Predicted and measured loss" if predicted_and_measured(results) else "",
        "before": "Training before the factorization" if results.searches_trained else "",
        "training": "Training" if results.fine_tuned else "",
        "definitions": "Definitions",
        "settings": "How the numbers were made",
        "each": "Commands and model cards",
    }
    return {id_: title[0].upper() + title[1:] for id_, title in sections.items() if title}
