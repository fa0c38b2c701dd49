"""Figures of scores, ranks, trainings, memory and speed, from the results of a study.

Each function names the papers' figures that it makes. Where a study has too few candidates for a relation, such as one
keep only, it has no figure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any, Literal

from eckart.shaping.pruning import Pruning
from tasks.report.figures.plot import CONTROL, ORIGINAL, Line, Plot
from tasks.report.perplexity_scale import spans_widely
from tasks.report.results import CONTROL as CONTROL_MODEL
from tasks.report.results import DENSE as DENSE_MODEL
from tasks.report.results import CandidateResults, Curve, Results, by_measure
from tasks.report.target_names import kind_in_layer, short

_KEEP = "keep (share of target parameters)"


def plots_of(results: Results) -> list[Plot]:
    """Return all figures that these results have."""
    makers: tuple[Callable[[Results], Iterator[Plot]], ...] = (
        _scores_over_keep,
        _shaped_over_remaining,
        _scores_over_low_rank,
        _scores_over_speed,
        _size_and_speed,
        _ranks_by_layer,
        _trainings,
    )
    return [plot for maker in makers for plot in maker(results)]


def _plot(
    results: Results, name: str, title: str, axes: tuple[str, str], panels: dict[str, dict[str, Line]], **more: Any
) -> Plot:
    """Return a plot with the titles `axes` of x and y; `more` are further attributes, such as levels."""
    settings = {"order": results.recipes, **more}
    return Plot(name=name, title=f"{results.name}: {title}", x=axes[0], y=axes[1], panels=panels, **settings)


def _scores_over_keep(results: Results) -> Iterator[Plot]:
    """ARS, figures 2, A1 (after fine-tuning) and A3 (before it); LoSparse, figure 5; SoftLM, figure 9."""
    if len(results.keeps) < 2:
        return
    after = {recipe: _scores(results, results.of(recipe), "recovered") for recipe in results.recipes}
    yield _score_plot(results, "score-over-keep", "after fine-tuning", after, _KEEP)
    before = {recipe: _scores(results, results.of(recipe), "factorized") for recipe in results.recipes}
    before = {recipe: line for recipe, line in before.items() if line.x}
    if before:
        yield _score_plot(results, "score-before-over-keep", "before fine-tuning", before, _KEEP, control=False)


def _scores(
    results: Results,
    candidates: list[CandidateResults],
    step: Literal["factorized", "recovered"],
    x: Callable[[CandidateResults], float] = lambda candidate: float(candidate.keep),
) -> Line:
    """Return a metric over `x`, with the interval of its difference from the original model around it."""
    present = (each for each in candidates if getattr(each, step) is not None)
    scored = sorted(present, key=lambda each: (float(each.keep), x(each)))  # measured x may differ in order by seed
    metrics = (getattr(each, step) for each in scored)
    return Line.through(map(x, scored), metrics, (results.bar((each.name, step)) for each in scored))


def _score_plot(results: Results, name: str, when: str, lines: dict[str, Line], x: str, control: bool = True) -> Plot:
    metric, levels = results.metric, {ORIGINAL: results.metric_of(DENSE_MODEL)}
    levels |= {CONTROL: results.metric_of(CONTROL_MODEL)} if control else {}
    values = [*levels.values(), *(y for line in lines.values() for y in line.y)]
    more = {"levels": {"": levels}, "logarithmic": spans_widely(metric, values)}
    return _plot(results, name, f"{metric.title} {when}", (x, f"{metric.with_direction}, test"), {"": lines}, **more)


def _shaped_over_remaining(results: Results) -> Iterator[Plot]:
    """LPAF, figure of section 3.2: score and mean rank of pruned weights over their share, beside factorized ones."""
    shaped = [recipe for recipe in results.recipes if results.settings.recipes[recipe].get("shaping")]
    labels = {recipe: f"{recipe}, pruned only" if recipe in shaped else recipe for recipe in results.recipes}
    score, rank = results.metric.title, "mean rank"
    panels: dict[str, dict[str, Line]] = {score: {}, rank: {}}
    for recipe in results.recipes:
        own = [each for each in results.of(recipe) if recipe not in shaped or each.shaped is not None]
        by_share = {_share_left(results, each): each for each in own}
        if len(by_share) < 2:
            continue
        x = sorted(by_share)
        at = [by_share[share] for share in x]
        scores = (each.recovered if each.shaped is None else each.shaped for each in at)
        panels[score][labels[recipe]] = Line.through(x, scores)
        panels[rank][labels[recipe]] = Line.through(x, (_mean_rank(results, each) for each in at))
    if not any(labels[recipe] in panels[score] for recipe in shaped):
        return
    levels = {score: {ORIGINAL: results.metric_of(DENSE_MODEL)}, rank: {"full rank": results.full_rank}}
    more = {"levels": levels, "order": tuple(labels.values()), "same_y": False}
    yield _plot(
        results, "pruned-over-remaining", "pruning and ranks", ("share of target weights left", ""), panels, **more
    )


def _share_left(results: Results, candidate: CandidateResults) -> float:
    """Return the share of the weights that shaping leaves for this keep; without shaping, the keep."""
    keep, shaping = float(candidate.keep), results.settings.recipes[candidate.recipe].get("shaping")
    return Pruning.model_validate(shaping).share_at(keep) if shaping else keep


def _mean_rank(results: Results, candidate: CandidateResults) -> float:
    if candidate.decision.average_rank is not None:
        return candidate.decision.average_rank
    return fmean(_rank(results, candidate, target.name) for target in results.targets)


def _rank(results: Results, candidate: CandidateResults, name: str) -> int:
    """Return the rank of a target after compression; the full one if it stays dense."""
    rank = candidate.evaluation.targets[name].rank
    target = next(target for target in results.targets if target.name == name)
    return min(target.out_features, target.in_features) if rank is None else rank


def _scores_over_low_rank(results: Results) -> Iterator[Plot]:
    """LoSparse, figure 6: score over the share of all weights that the factors have, the rest being sparse rows.

    A line joins recipes that differ in nothing else.
    """
    lines = {}
    for keep in results.keeps:
        alike: dict[str, dict[str, float]] = {}
        for candidate in results.at(keep):
            if residual := sensitive_rows(results, candidate.recipe):
                other = results.settings.recipes[candidate.recipe] | {"residual": {**residual, "low_rank": None}}
                shares = alike.setdefault(json.dumps(other, sort_keys=True), {})
                shares[candidate.recipe] = 100 * float(keep) * residual["low_rank"]
        groups = [shares for shares in alike.values() if len({*shares.values()}) > 1]
        for shares in groups:
            at = [each for each in results.at(keep) if each.recipe in shares]
            label = f"keep {keep}" + f", {at[0].recipe}" * (len(groups) > 1)
            lines[label] = _scores(results, at, "recovered", partial(_share_of, shares))
    if lines:
        x = "factors, % of the target layers’ weights"
        plot = _score_plot(results, "score-over-low-rank", "over the share of factors", lines, x)
        yield plot.model_copy(update={"order": tuple(lines)})


def sensitive_rows(results: Results, recipe: str) -> dict[str, Any] | None:
    """Return the settings of sparse rows that are chosen by their sensitivity, as in LoSparse; None without such."""
    residual = results.settings.recipes[recipe].get("residual")
    return residual if residual and residual["score"] == "sensitivity" else None


def _share_of(shares: dict[str, float], candidate: CandidateResults) -> float:
    return shares[candidate.recipe]


def _scores_over_speed(results: Results) -> Iterator[Plot]:
    """DRONE, figure 3: score over speed."""
    lines = {
        recipe: _scores(results, results.of(recipe), "recovered", lambda each: each.benchmark.speedup.median)
        for recipe in results.recipes
    }
    if len(results.candidates) > 1:
        yield _score_plot(results, "score-over-speed", "over speed", lines, "speed, × the original’s")


def _size_and_speed(results: Results) -> Iterator[Plot]:
    """SoftLM, figures 7 and 8: memory and speed, over keep."""
    if len(results.keeps) < 2:
        return
    memory, speed = "weights, % of the original’s bytes", "speed, × the original’s"
    panels: dict[str, dict[str, Line]] = {memory: {}, speed: {}}
    for recipe in results.recipes:
        at = sorted(results.of(recipe), key=lambda each: float(each.keep))
        x = [float(each.keep) for each in at]
        speedups = [each.benchmark.speedup for each in at]
        panels[memory][recipe] = Line.through(
            x, (100 * each.evaluation.size.bytes / results.dense.size.bytes for each in at)
        )
        ends = ((each.low, each.high) for each in speedups)
        panels[speed][recipe] = Line.through(x, (each.median for each in speedups), ends)
    levels = {memory: {ORIGINAL: 100.0}, speed: {ORIGINAL: 1.0}}
    yield _plot(results, "size-and-speed", "memory and speed", (_KEEP, ""), panels, levels=levels, same_y=False)


def _ranks_by_layer(results: Results) -> Iterator[Plot]:
    """ARS, figure A4; SoftLM, figures 1b, 6 and 10 to 14: the rank of each kind of layer over depth."""
    names: dict[tuple[str, str], dict[int, list[str]]] = {}
    for target in results.targets:
        stack, layer, kind = kind_in_layer(target.name)
        if layer:
            names.setdefault((stack, kind), {}).setdefault(int(layer), []).append(target.name)
    names = {key: layers for key, layers in names.items() if len(layers) > 1}
    stacks, kinds = short({stack for stack, _ in names} - {""}), short({kind for _, kind in names})
    for keep in results.keeps if names else ():
        panels: dict[str, dict[str, Line]] = {}
        for (stack, kind), layers in names.items():
            title = f"{stacks[stack]} {kinds[kind]}" if len(stacks) > 1 and stack else kinds[kind]
            x = sorted(layers)
            panels[title] = {
                each.recipe: Line.through(x, (fmean(_rank(results, each, name) for name in layers[at]) for at in x))
                for each in results.at(keep)
            }
        title = f"ranks at keep {keep} (dense layers: the full rank)"
        yield _plot(results, f"ranks-by-layer-{keep}", title, ("layer", "rank"), panels)


def _trainings(results: Results) -> Iterator[Plot]:
    """ARS, figures 3, A5 (fine-tuning), 4 and A2 (search): losses and other measures over the steps of training."""
    for keep in results.keeps:
        at = results.at(keep)
        searches = {each.recipe: each.search_curve for each in at}
        yield from _training(results, f"search-{keep}", f"before the factorization, keep {keep}", searches)
        recoveries = {each.recipe: each.curve for each in at}
        with_control = {**recoveries, CONTROL: results.control_curve}
        yield from _training(results, f"fine-tuning-{keep}", f"fine-tuning at keep {keep}", with_control)


def _training(results: Results, name: str, title: str, curves: dict[str, Curve]) -> Iterator[Plot]:
    panels = by_measure(curves)
    if not any(label != CONTROL for label in panels.get("task loss", {})):
        return
    single = len(panels) == 1
    drawn = {
        "" if single else measure: {label: Line.through(*zip(*points, strict=True)) for label, points in lines.items()}
        for measure, lines in panels.items()
    }
    yield _plot(results, name, title, ("step", "task loss" if single else ""), drawn, same_y=False, marks=False)
