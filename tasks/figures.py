"""Stage figures: draw the papers' figures from a study → reports/figures/PART, as PNG, SVG and JSON.

The part `results` shows scores, ranks, trainings, memory and speed; the part `weights` the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from eckart.model.experts import unfuse
from eckart.model.targets import weight_of
from tasks.artifacts.errors import StageError
from tasks.artifacts.names import FIGURES_STAGE, candidate_name
from tasks.artifacts.paths import FACTORIZED, RANKS, SHAPED
from tasks.config.params_file import section
from tasks.config.schema import Count, FigurePart, Study
from tasks.data.loading import batches, encoded
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.report.figures import of_weights
from tasks.report.figures.drawing import Format, draw
from tasks.report.figures.of_results import plots_of, sensitive_rows
from tasks.report.figures.of_weights import Weights
from tasks.report.figures.plot import ORIGINAL, Figure, Plot
from tasks.report.result_files import load_results
from tasks.report.results import Results
from tasks.runtime.stage_runner import output, run_item, say

FIGURES = Path("reports/figures")
_EXAMPLES = 128  # most calibration examples for the scores of neurons


def figures(part: str) -> None:
    """Draw one of `study.figures`. Beside each plot, NAME.json has its numbers."""
    if part not in section("study", Study).figures:
        raise StageError(f"study.figures has no {part}")
    results = load_results()
    found: dict[FigurePart, Any] = {"results": plots_of, "weights": _of_weights}
    count = 0
    with output(FIGURES / part) as folder:
        for figure in found[part](results):
            write(figure, folder)
            count += 1
    say(f"{count} figures in {FIGURES / part}")


def write(figure: Figure, folder: Path) -> None:
    """Write a figure in all formats."""
    for kind in get_args(Format):
        (folder / f"{figure.name}.{kind}").write_bytes(draw(figure, kind))
    if isinstance(figure, Plot):
        (folder / f"{figure.name}.json").write_text(figure.model_dump_json(indent=1, exclude_none=True) + "\n")


def _of_weights(results: Results) -> Iterator[Figure]:
    """Yield the figures of the middle layer: of the original model and, at each keep, of the pruned weights."""
    names = of_weights.middle(results.targets)
    original = {ORIGINAL: _weights(TEACHER, results, names)}
    pruned: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for candidate in results.candidates:
        if candidate.decision.as_shaped:
            weights = _weights(RANKS / candidate.name / SHAPED, results, names)
            pruned.setdefault(candidate.keep, {})[candidate.recipe] = weights
    for keep, by_recipe in pruned.items():
        weights_at = Weights(keep, {**original, **by_recipe})
        yield from of_weights.spectra(results.name, weights_at, results.recipes)
        yield of_weights.pattern(results.name, weights_at)
    if not pruned:
        yield from of_weights.spectra(results.name, Weights("", original), results.recipes)
    yield from _neuron_scores(results, names)


def _weights(folder: Path, results: Results, names: list[str]) -> dict[str, torch.Tensor]:
    model, _ = load(folder, kind_of(results.task).auto)
    unfuse(model, results.targets)
    return {name: weight_of(model.get_submodule(name)).clone() for name in names}


def _neuron_scores(results: Results, names: list[str]) -> Iterator[Figure]:
    """Yield a figure for each keep at which a recipe has sparse rows that are chosen by these scores."""
    residual = [recipe for recipe in results.recipes if sensitive_rows(results, recipe)]
    kind, size = kind_of(results.task), section("importance.batch_size", Count)
    for keep in results.keeps if residual else ():
        scores = {}
        for recipe in residual:
            model, tokenizer = load(FACTORIZED / candidate_name(recipe, keep), kind.auto)
            data = encoded("calibration", tokenizer)
            data = data.select(range(min(_EXAMPLES, len(data))))
            examples = batches(data, kind.collate(tokenizer, model), size, to_device(model))
            scores[recipe] = of_weights.neuron_scores(model, names, examples, kind.objective().loss)
        if any(scores.values()):
            yield of_weights.score_histogram(results.name, keep, scores, results.recipes)


if __name__ == "__main__":
    run_item(FIGURES_STAGE, "part", "one of study.figures", figures)
