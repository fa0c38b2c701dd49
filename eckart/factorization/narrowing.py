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
from eckart.model.layers import narrowed_like, present, replace, set_weight
from eckart.model.mlps import Widths
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
        self.down_of = {name: down for down, width in widths.items() for name in (*width.up, down)}
        """Name of each layer of the MLPs to narrow → name of the MLP's down layer."""

    def narrow(self, name: str, current: Statistics | None = None, anchor: float = 0.0, ridge: float = 0.0) -> None:
        """Replace the layer `name` of an MLP by one that only has the neurons that stay.

        Args:
            current: inputs and dense_inputs of the layer in the partly compressed model; None: no correction.
            anchor, ridge: as in `anchored`.

        Raises:
            ValueError: a device map has offloaded a layer, or a statistic that the weighting reads is missing.
        """
        down, module = self.down_of[name], present(self.model, name)
        weight, neurons = weight_of(module), self.neurons(name)
        assert neurons is not None
        neurons = neurons.to(weight.device)
        if name != down:
            smaller = weight[neurons]
        else:
            smaller = fitted(weight, weigh(self.weighting, self.targets[down], self.statistics).right, neurons)
            if current is not None:
                inputs, dense_inputs = (current[kind][name] for kind in ("inputs", "dense_inputs"))
                smaller = anchored(weight, inputs, dense_inputs, anchor, ridge, start=smaller)
        layer = narrowed_like(module, *smaller.shape)
        set_weight(layer, smaller)
        if layer.bias is not None:
            bias = module.get_parameter("bias").detach()
            with torch.no_grad():
                layer.bias.copy_(bias if name == down else bias[neurons])
        replace(self.model, name, layer)

    def neurons(self, name: str) -> Tensor | None:
        """Return the neurons that stay in the MLP of the layer `name`; None if it is not narrowed."""
        return torch.tensor(self.widths[self.down_of[name]].kept) if name in self.down_of else None

    def shape(self, name: str) -> tuple[int, int] | None:
        """Return the shape `(out, in)` of the layer `name` after narrowing; None if its MLP stays as it is."""
        if name not in self.down_of:
            return None
        kept = self.widths[self.down_of[name]].neurons
        target = self.targets[name]
        return (target.out_features, kept) if name in self.widths else (kept, target.in_features)
