"""Figures of the weights of the middle layer: singular values, errors of truncation, zeros and scores of neurons.

"Middle layer" is the block in the middle of the model, with one target of each kind; a model without blocks shows all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Loss
from eckart.model.batches import Batch, batch_size
from eckart.model.layers import gradient_of, low_rank_layers, matrix_of
from eckart.model.targets import Target
from tasks.report.figures.plot import ORIGINAL, Figure, Line, Pattern, Plot
from tasks.report.target_names import kind_in_layer, short

_BINS = 40


@dataclass(frozen=True)
class Weights:
    """Weights of some targets at one keep, for which singular values are compared.

    Attributes:
        keep: "" if there is only the original model.
        by_model: `original` or the recipe that pruned the weights → target name → weight `(out, in)`.
    """

    keep: str
    by_model: Mapping[str, Mapping[str, Tensor]]


def middle(targets: Sequence[Target]) -> list[str]:
    """Return the names of the linear layers of the middle block, one for each kind."""
    layers = [layer for target in targets for layer in target.layers]
    blocks = list(dict.fromkeys(kind_in_layer(layer.name)[:2] for layer in layers if kind_in_layer(layer.name)[1]))
    wanted = blocks[len(blocks) // 2] if blocks else ("", "")
    by_kind: dict[str, str] = {}
    for layer in layers:
        *block, kind = kind_in_layer(layer.name)
        if tuple(block) == wanted:
            by_kind.setdefault(kind, layer.name)
    return list(by_kind.values())


def spectra(study: str, weights: Weights, order: tuple[str, ...]) -> Iterator[Figure]:
    """Yield the figures of singular values: LoSparse, figure 3; DRONE, figure 2; LPAF, last figure of section 3.2.

    The error of W at rank k is ‖W − W_k‖_F with the best W_k of that rank.
    """
    values = {
        label: {name: torch.linalg.svdvals(weight.double()).numpy() for name, weight in layers.items()}
        for label, layers in weights.by_model.items()
    }
    suffix, place = (f"-{weights.keep}", f", keep {weights.keep}") if weights.keep else ("", "")
    for name, title, x, y, draw in (
        ("singular-values", "singular values", "index", "singular value", _values),
        ("share-of-singular-values", "share of the singular values", "largest of them, %", "of their sum, %", _shares),
        ("reconstruction-error", "error of truncated weights", "rank k", "‖W − W_k‖ (Frobenius)", _errors),
    ):
        panels = {
            panel: {label: draw(values[label][layer]) for label in values}
            for layer, panel in _panels(next(iter(values.values())))
        }
        yield Plot(
            name=f"{name}{suffix}",
            title=f"{study}: {title}{place}, middle layer",
            x=x,
            y=y,
            panels=panels,
            order=order,
            same_y=name == "share-of-singular-values",
            marks=False,
        )


def _values(values: np.ndarray) -> Line:
    return Line.through(range(1, len(values) + 1), values)


def _shares(values: np.ndarray) -> Line:
    part = np.concatenate([[0.0], np.cumsum(values)])
    return Line.through(np.linspace(0, 100, len(part)), 100 * part / part[-1])


def _errors(values: np.ndarray) -> Line:
    rest = np.concatenate([np.cumsum(values[::-1] ** 2)[::-1], [0.0]])  # Σ_{k>r} s_k² for r = 0, 1, …
    return Line.through(range(len(rest)), np.sqrt(rest))


def pattern(study: str, weights: Weights) -> Pattern:
    """Return the figure of the entries that pruning left: LPAF, figure of patterns in section 3.2."""
    pruned = {label: layers for label, layers in weights.by_model.items() if label != ORIGINAL}
    layer, kind = next(_panels(next(iter(pruned.values()))))
    return Pattern(
        name=f"pattern-{weights.keep}",
        title=f"{study}: weights that are left of {kind}, keep {weights.keep}, middle layer",
        panels={recipe: (layers[layer] != 0).numpy() for recipe, layers in pruned.items()},
    )


def neuron_scores(
    model: PreTrainedModel, names: Sequence[str], batches: Iterable[Batch], loss: Loss
) -> dict[str, Tensor]:
    """Return the sensitivity of the sparse rows before training (LoSparse, eq. 4): the mean of |S ⊙ ∂L/∂S| over a row.

    Args:
        model: factorized model whose residuals S have all rows.
        loss: sum of the losses of a batch; the gradient is that of the mean over all examples.

    Returns:
        Layer → scores `(out,)`; without the layers that have no residual.
    """
    layers = {name: layer for name, layer in low_rank_layers(model).items() if name in names and layer.rows is not None}
    model.eval().requires_grad_(False)
    for layer in layers.values():
        layer.get_parameter("residual.weight").requires_grad_(True)
    count = 0
    for batch in batches:
        loss(model, batch).backward()
        count += batch_size(batch)
    scores = {}
    for name, layer in layers.items():
        assert layer.residual is not None
        residual, gradient = matrix_of(layer.residual).detach(), gradient_of(layer.residual)
        gradient = torch.zeros_like(residual) if gradient is None else gradient
        scores[name] = (residual.float() * gradient.float() / count).abs().mean(1).cpu()
    return scores


def score_histogram(study: str, keep: str, scores: Mapping[str, Mapping[str, Tensor]], order: tuple[str, ...]) -> Plot:
    """Return the figure of the scores of neurons: LoSparse, figures 1 and 4.

    Departs from the paper: scores are those of the first step, on calibration examples, not smoothed over a training.
    """
    layers = dict.fromkeys(name for by_layer in scores.values() for name in by_layer)
    panels = {}
    for layer, title in _panels(layers):
        largest = max(float(by_layer[layer].max()) for by_layer in scores.values() if layer in by_layer)
        edges = np.linspace(0, largest or 1.0, _BINS + 1)
        panels[title] = {
            recipe: _histogram(by_layer[layer].numpy(), edges)
            for recipe, by_layer in scores.items()
            if layer in by_layer
        }
    return Plot(
        name=f"neuron-scores-{keep}",
        title=f"{study}: scores of neurons before training, keep {keep}, middle layer",
        x="score",
        y="neurons",
        panels=panels,
        order=order,
        same_y=False,
        marks=False,
        steps=True,
    )


def _histogram(values: np.ndarray, edges: np.ndarray) -> Line:
    counts = np.histogram(values, edges)[0]
    return Line.through(edges, [*counts, counts[-1]])


def _panels(layers: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each layer and the short title of its panel."""
    kinds = {layer: kind_in_layer(layer)[2] for layer in layers}
    titles = short({*kinds.values()})
    yield from ((layer, titles[kind]) for layer, kind in kinds.items())
