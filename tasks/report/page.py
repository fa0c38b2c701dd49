"""Write the comparison of a study as one self-contained HTML page, which loads no other files.

Its script (page.js) sorts and filters the tables; the page can be read without it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from eckart.recipe import captions
from tasks.report.conclusion import conclusion
from tasks.report.goals import goal_rows
from tasks.report.heatmap import columns, heat_maps
from tasks.report.plots import costs_svg, curves_svg, measures_svgs, predictions_svg, tradeoff_svg
from tasks.report.provenance import provenance, recipes_yaml
from tasks.report.results import Results
from tasks.report.runtimes import runtime_rows
from tasks.report.table import legend, notes, reference_rows, row, zero_shot
from tasks.runtime.templates import template


def page(results: Results, cards: Mapping[str, str]) -> str:
    """Return the page as HTML, with all names and numbers escaped. `cards`: candidate → model card."""
    meanings = captions()
    script = Path(__file__).with_name("page.js").read_text()
    return template(Path(__file__).with_name("page.html.j2")).render(
        results=results,
        metric=results.metric,
        cards=cards,
        conclusion=[sentence.split("`") for sentence in conclusion(results)],
        notes=notes(results),
        legend=legend("The best at each keep stands out"),
        rows=[
            reference_rows(results),
            *([row(results, candidate) for candidate in results.at(keep)] for keep in results.keeps),
        ],
        costs=costs_svg(results),
        tradeoff=tradeoff_svg(results),
        curves=curves_svg(results),
        predictions=predictions_svg(results),
        searches=measures_svgs(results, "search_curve"),
        recoveries=measures_svgs(results, "curve"),
        zero_shot=zero_shot(results),
        goals=goal_rows(results),
        runtimes=runtime_rows(results),
        measures={name: meanings[name] for name in results.measures if name in meanings},
        unscored=any(candidate.factorized is None for candidate in results.candidates),
        heat_maps=heat_maps(results),
        columns=columns(results),
        provenance=provenance(results),
        recipes=recipes_yaml(results.recipes),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
