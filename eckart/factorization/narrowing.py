"""Narrowing of MLPs: leaves out neurons, and fits the down layer to the outputs of the original MLP.

eckart/factorization/neuron_selection.py has the equations. In the factorization in order of execution, the layers that
compute the neurons are corrected first, like other targets. The down layer starts from the fit W₀ on the original
inputs and is corrected on the inputs that it gets (eckart/factorization/error_compensation.py). A smaller layer that
has a rank is then factorized.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics
from eckart.factorization.error_compensation import anchored
from eckart.factorization.neuron_selection import fitted
from eckart.factorization.weightings import Weighting, weigh
from eckart.model.layers import narrowed_like, present, set_weight
from eckart.model.mlps import Widths, narrowed
from eckart.model.targets import Target, weight_of


class Narrowing:
    """Narrows the MLPs of a model, one layer at a time.

    Args:
        targets: all targets of the model.
        widths: the MLPs to narrow.
        weighting: weighting of the recipe, by which down layers are fitted.
        statistics: calibration statistics of the original model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        targets: Sequence[Target],
        widths: Widths,
        weighting: Weighting,
        statistics: Statistics,
    ) -> None:
        self.model, self.widths = model, widths
        self.weighting, self.statistics = weighting, statistics
        self.targets = {target.name: target for target in targets}
        self.smaller = {target.name: target for target in narrowed(targets, widths)}
        self.down_of = {name: down for down, width in widths.items() for name in (*width.up, down)}
        """Name of each layer of the MLPs to narrow → name of the MLP's down layer."""

    def narrow(self, name: str, current: Statistics | None = None, anchor: float = 0.0, ridge: float = 0.0) -> None:
        """Replace the layer `name` of an MLP by one that only has the neurons that stay.

        Args:
            current: inputs and wanted_outputs of the layer in the partly compressed model; None: no correction.
            anchor, ridge: as in `anchored`.

        Raises:
            ValueError: a device map has offloaded a layer, or a statistic that the weighting reads is missing.
        """
        down, module = self.down_of[name], present(self.model, name)
        weight, kept = weight_of(module), self.kept(name)
        assert kept is not None
        kept = kept.to(weight.device)
        if name != down:
            smaller = weight[kept]
        else:
            smaller = fitted(weight, weigh(self.weighting, self.targets[down], self.statistics).right, kept)
            if current is not None:
                inputs, wanted = (current[kind][name] for kind in ("inputs", "wanted_outputs"))
                smaller = anchored(smaller, inputs, wanted, anchor, ridge)
        layer = narrowed_like(module, *smaller.shape)
        set_weight(layer, smaller)
        if layer.bias is not None:
            bias = module.get_parameter("bias").detach()
            with torch.no_grad():
                layer.bias.copy_(bias if name == down else bias[kept])
        self.model.set_submodule(name, layer)

    def kept(self, name: str) -> Tensor | None:
        """Return the outputs of the layer `name`, or inputs of a down layer, that stay; None if it is not narrowed."""
        if name not in self.down_of:
            return None
        neurons = self.targets[self.down_of[name]].in_features
        size = neurons if name in self.widths else self.targets[name].out_features
        return self.widths[self.down_of[name]].features(size, neurons)

    def shape(self, name: str) -> tuple[int, int] | None:
        """Return the shape `(out, in)` of the layer `name` after narrowing; None if its MLP stays as it is."""
        if name not in self.down_of:
            return None
        target = self.smaller[name]
        return target.out_features, target.in_features
