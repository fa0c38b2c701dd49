"""The comparison as one self-contained page, without any script, font or picture from elsewhere.

It can be read without its script (page.js), which sorts, filters, moves the plot and opens candidates.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from eckart.recipe import captions
from tasks.report.conclusion import conclusion
from tasks.report.continuations import beginnings, written
from tasks.report.details import details
from tasks.report.goals import goal_rows
from tasks.report.heatmap import columns, heat_maps, order_of_kinds
from tasks.report.plots import curves_svg, predictions_svg, recovery_svgs, search_svgs, tradeoff_svg
from tasks.report.provenance import provenance
from tasks.report.results import Results
from tasks.report.runtimes import runtime_rows, shapes
from tasks.report.scatter import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, scatter
from tasks.report.summary import summary
from tasks.report.table import legend, notes, reference_rows, row, shaped, zero_shot
from tasks.runtime.templates import template

_SCRIPT = Path(__file__).with_name("page.js")


def page(results: Results, cards: Mapping[str, str]) -> str:
    """Return the whole page; every name and number in it is escaped. `cards`: candidate → model card."""
    meanings = captions()
    script = _SCRIPT.read_text()
    plot = scatter(results)
    return template(Path(__file__).with_name("page.html.j2")).render(
        results=results,
        metric=results.metric,
        conclusion=[sentence.split("`") for sentence in conclusion(results)],
        summary=summary(results),
        references=reference_rows(results),
        notes=notes(results),
        legend=legend("The best at each keep stands out"),
        rows={keep: [row(results, candidate) for candidate in results.at(keep)] for keep in results.keeps},
        # Markup: matplotlib has escaped every text in them.
        tradeoff=Markup(tradeoff_svg(results)),
        curves=Markup(curves_svg(results)),
        predictions=Markup(predictions_svg(results) or ""),
        searches={recipe: Markup(plot) for recipe, plot in search_svgs(results).items()},
        recoveries={recipe: Markup(plot) for recipe, plot in recovery_svgs(results).items()},
        zero_shot=zero_shot(results),
        beginnings=beginnings(results),
        written=written(results, results.candidates),
        shaped=shaped(results),
        goals=list(goal_rows(results)),
        runtimes=runtime_rows(results),
        shapes=shapes(results),
        measures={name: meanings[name] for name in results.measures if name in meanings},
        unscored=any(candidate.factorized is None for candidate in results.candidates),
        heat_maps=heat_maps(results),
        columns=columns(results),
        order_of_kinds=order_of_kinds(results),
        provenance=provenance(results),
        places={candidate.name: (candidate.recipe, candidate.keep) for candidate in results.candidates},
        scatter=plot,
        field={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        details=details(results, plot, cards),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
