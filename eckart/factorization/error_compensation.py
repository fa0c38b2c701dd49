"""Error compensation (anchoring): each target corrects for the error of the targets that were factorized before it.

A target reads X `(tokens, in)` in the original model and X̂ in the partly factorized one. The dense weight that best
restores the original outputs is the least-squares solution of X̂ W*ᵀ = X Wᵀ. With C = X̂ᵀ X̂, D = Xᵀ X̂ and a ridge λ::

    W* = W (D + λ I) (C + λ I)⁻¹ = W + W (D − C) (C + λ I)⁻¹.

It is W if nothing was lost (D = C), and tends to W as λ grows. The target then factorizes (1 − a) W + a W* in place of
W, where a is the anchor. For λ = 0, ‖X Wᵀ − X̂ Ŵᵀ‖² = ‖X Wᵀ − X̂ W*ᵀ‖² + ‖X̂ (W* − Ŵ)ᵀ‖². So the best Ŵ of a rank is that
of W* under C; and with a left side L as well, as the first term does not depend on Ŵ then either
(eckart/factorization/weighted_svd.py).

On a chain of linear layers without biases W* = W, because the error of a weighted SVD on its inputs is orthogonal to
what it keeps. So there is something to correct only with residual connections, biases or nonlinear functions.

Source: ours in this form. AA-SVD, SAES-SVD and the error compensation M of PIFA (Zhao et al., ICML 2025) are one-sided
forms that start from the original model's outputs.

Biases are kept. Embeddings are left as they are, since ids do not change. Targets that stay dense are corrected, too,
which is their factorization at full rank. The two layers of a product are corrected one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics
from eckart.factorization.weightings import exact_dtype
from eckart.model.layers import present, replace, set_weight
from eckart.model.targets import Target, weight_of


def anchored(weight: Tensor, inputs: Tensor, dense_inputs: Tensor, anchor: float, ridge: float) -> Tensor:
    """Return (1 − a) W + a W* `(out, in)`, computed in float64 if the device has it.

    Args:
        weight: W `(out, in)`.
        inputs, dense_inputs: C and D `(in, in)`.
        anchor: a.
        ridge: λ ÷ the mean of C's diagonal, above 0.
    """
    w, c, d = (x.to(exact_dtype(x)) for x in (weight, inputs, dense_inputs))
    level = c.diagonal().mean()
    if not level > 0:
        return w  # all inputs are zero
    ridged = c + ridge * level * torch.eye(len(c), dtype=c.dtype, device=c.device)
    return w + anchor * torch.linalg.solve(ridged, w @ (d - c), left=False)


class DenseModules:
    """The modules of a model that were replaced, to be put back for a forward of the original model.

    Both models share all other modules, so this only takes the memory of the dense targets.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}

    def keep(self, targets: Iterable[Target]) -> None:
        """Remember the modules that `targets` have now."""
        for target in targets:
            self.modules |= {layer.name: self.model.get_submodule(layer.name) for layer in target.layers}

    @contextmanager
    def back(self) -> Iterator[None]:
        """Turn the model into the original one for a while."""
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
    """Replace the layers of `targets`, all dense, by layers with `anchored` weights.

    Raises:
        ValueError: a device map left one on the CPU or the disk.
    """
    for layer in (layer for target in targets for layer in target.layers):
        if layer.input_of not in statistics.get("dense_inputs", {}):
            continue  # an embedding
        module = deepcopy(present(model, layer.name))
        inputs, dense_inputs = (statistics[kind][layer.input_of] for kind in ("inputs", "dense_inputs"))
        set_weight(module, anchored(weight_of(module), inputs, dense_inputs, anchor, ridge))
        replace(model, layer.name, module)
