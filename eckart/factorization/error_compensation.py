"""Anchoring: a target factorized in order makes up for what those before it have lost.

With X `(tokens, in)` what a target reads in the dense model and X̂ what it reads by now, the map that gives the dense
outputs back best, of full rank, is the least-squares solution of X̂ W*ᵀ = X Wᵀ. With C = X̂ᵀ X̂, D = Xᵀ X̂ and a ridge λ::

    W* = W (D + λ I) (C + λ I)⁻¹ = W + W (D − C) (C + λ I)⁻¹,

so nothing changes where nothing was lost (D = C), nor as λ grows. The target then factorizes (1 − a) W + a W* in place
of W, a the anchor. As ‖X Wᵀ − X̂ Ŵᵀ‖² = ‖X Wᵀ − X̂ W*ᵀ‖² + ‖X̂ (W* − Ŵ)ᵀ‖² for λ = 0, the best Ŵ of a rank is that of W*
under C, and, as the first term does not depend on Ŵ for any L either, under both sides
(eckart/factorization/weighted_svd.py).

On a chain of linear maps and no biases W* = W, as what a weighted SVD loses on the inputs is orthogonal to what it
keeps: what can be made up for comes from residual connections, biases and nonlinear functions.

Source: ours in this form. One-sided ones, from outputs of the dense model, are AA-SVD, SAES-SVD and the error
compensation M of PIFA (Zhao et al., ICML 2025).

The bias stays, and is the same on both sides. What an embedding reads are ids, which nothing changes. A target that
stays dense is anchored, too: that is its factorization at full rank. The maps of a product are anchored one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics
from eckart.model.layers import present, replace, set_weight
from eckart.model.targets import Target, weight_of


def anchored(weight: Tensor, inputs: Tensor, dense_inputs: Tensor, anchor: float, ridge: float) -> Tensor:
    """(1 − a) W + a W* `(out, in)`, computed in float64 where the device has it.

    Args:
        weight: W `(out, in)`.
        inputs, dense_inputs: C and D `(in, in)`.
        anchor: a.
        ridge: λ ÷ the mean of C's diagonal, above 0.
    """
    w, c, d = (x.to(torch.float32 if x.device.type == "mps" else torch.float64) for x in (weight, inputs, dense_inputs))
    level = c.diagonal().mean()
    if not level > 0:
        return w  # nothing is read
    ridged = c + ridge * level * torch.eye(len(c), dtype=c.dtype, device=c.device)
    return w + anchor * torch.linalg.solve(ridged, w @ (d - c), left=False)


class DenseModules:
    """The modules of a model that gave way to others, to be put back for a forward of the dense model.

    All other modules are those of both models, so this takes the memory of the dense targets and no more.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}

    def keep(self, targets: Iterable[Target]) -> None:
        """Remember what is there of `targets`."""
        self.modules |= {each.name: self.model.get_submodule(each.name) for some in targets for each in some.maps}

    @contextmanager
    def back(self) -> Iterator[None]:
        """The model is the dense one."""
        present = {name: self.model.get_submodule(name) for name in self.modules}
        try:
            self._put(self.modules)
            yield
        finally:
            self._put(present)

    def _put(self, modules: dict[str, nn.Module]) -> None:
        for name, module in modules.items():
            replace(self.model, name, module)


def anchor_targets(
    model: PreTrainedModel, targets: Iterable[Target], statistics: Statistics, anchor: float, ridge: float
) -> None:
    """Replace the maps of `targets`, all dense, by others with anchored weights; arguments as for `anchored`.

    Raises:
        ValueError: a device map left one on the CPU or the disk.
    """
    for target in (each for some in targets for each in some.maps):
        if target.input_of not in statistics.get("dense_inputs", {}):
            continue  # an embedding
        module = deepcopy(present(model, target.name))
        inputs, dense_inputs = (statistics[kind][target.input_of] for kind in ("inputs", "dense_inputs"))
        set_weight(module, anchored(weight_of(module), inputs, dense_inputs, anchor, ridge))
        replace(model, target.name, module)
