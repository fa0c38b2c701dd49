"""Error compensation (anchoring): each target corrects the error of the targets that were factorized before it.

The inputs of a target are X `(tokens, in)` in the original model and X̂ in the partly factorized model. It should have
the original outputs T = X Wᵀ `(tokens, out)`, biases left out. W* is the dense weight that best restores them, the
least-squares solution of X̂ W*ᵀ = T. With C = X̂ᵀ X̂, B = Tᵀ X̂ and a ridge λ::

    W* = (B + λ W) (C + λ I)⁻¹ = W + (B − W C) (C + λ I)⁻¹.

W* is W if there was no error (X̂ = X), and tends to W as λ grows. The target then factorizes (1 − a) W + a W* in place
of W; the number a is the anchor. For λ = 0, ‖T − X̂ Ŵᵀ‖² = ‖T − X̂ W*ᵀ‖² + ‖X̂ (W* − Ŵ)ᵀ‖². So the best Ŵ of a rank is
the truncated weighted SVD of W* under C (eckart/factorization/weighted_svd.py). The same holds with a left side L,
because the first term still does not depend on Ŵ.

On a chain of linear layers without biases W* = W, because the error of a weighted SVD on its inputs is orthogonal to
the outputs that the factors keep. So corrections only matter with residual connections, biases or nonlinear functions.

A layer whose output is added to hidden states R̂ `(tokens, out)` can also correct their error, so that the sum is that
of the original model (`sums`): then T = X Wᵀ + R − R̂.

A narrowed layer reads fewer inputs than W, so it starts from a fit W₀ to them in place of W.

Related: AA-SVD, SAES-SVD and the error compensation M of PIFA (Zhao et al., ICML 2025) also start from the original
model's outputs, with a weighting of one side. Ours is the weighting of both sides together with the anchor.

Biases are kept. Embeddings are not corrected, because their inputs, token ids, do not change. Targets that stay dense
are corrected like targets of full rank. The two layers of a product are corrected one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics
from eckart.factorization.weightings import exact_dtype
from eckart.model.experts import sharing_copy
from eckart.model.layers import present, replaced, set_weight
from eckart.model.targets import Target, weight_of


def anchored(weight: Tensor, inputs: Tensor, wanted: Tensor, anchor: float, ridge: float) -> Tensor:
    """Return the corrected weight (1 − a) W + a W* `(out, in)`, computed in float64 if the device supports it.

    Args:
        weight: W, or W₀ of a narrowed layer.
        inputs: C `(in, in)`.
        wanted: B `(out, in)`.
        anchor: a, in [0, 1].
        ridge: λ ÷ the mean of C's diagonal, above 0.
    """
    w, c, b = (x.to(exact_dtype(x)) for x in (weight, inputs, wanted))
    level = c.diagonal().mean()
    if not level > 0:
        return w  # all inputs are zero
    ridged = c + ridge * level * torch.eye(len(c), dtype=c.dtype, device=c.device)
    return w + anchor * torch.linalg.solve(ridged, b - w @ c, left=False)


class DenseModules:
    """The original dense modules of a model's targets, kept so that the original model can still be run.

    The original and the factorized model share all other modules, so this only takes the memory of the dense targets.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}

    def keep(self, targets: Iterable[Target]) -> None:
        """Store the modules that `targets` have now, before they are replaced, unless a stored block has them.

        Of experts, the module of all experts of a layer is stored, which `back` can put back faster than each of them.
        """
        for layer in (layer for target in targets for layer in target.layers):
            if any(layer.name.startswith(f"{block}.") for block in self.modules):
                continue
            name = layer.routed_by or layer.name
            self.modules[name] = self.model.get_submodule(name)
            if layer.routed_by:
                self.model.set_submodule(name, sharing_copy(self.modules[name]))

    def keep_blocks(self, names: Iterable[str]) -> None:
        """Store the modules `names` with all that they contain, and put copies in their place."""
        for name in names:
            self.modules[name] = self.model.get_submodule(name)
            self.model.set_submodule(name, deepcopy(self.modules[name]))

    def back(self) -> AbstractContextManager[None]:
        """Put the stored modules back while the context lasts, so that the model computes like the original one."""
        return replaced(self.model, self.modules)


def anchor_targets(
    model: PreTrainedModel, targets: Iterable[Target], statistics: Statistics, anchor: float, ridge: float
) -> None:
    """Replace each layer of `targets`, all still dense, by a dense layer with its corrected weight (see `anchored`).

    Raises:
        ValueError: a device map has offloaded a layer to the CPU or the disk.
    """
    for layer in (layer for target in targets for layer in target.layers):
        wanted = statistics.get("wanted_outputs", {}).get(layer.name)
        if wanted is None:
            continue  # embeddings are not corrected
        module = deepcopy(present(model, layer.name))
        inputs = statistics["inputs"][layer.input_of]
        set_weight(module, anchored(weight_of(module), inputs, wanted, anchor, ridge))
        model.set_submodule(layer.name, module)
