"""The tokens that a router sends to each expert: which example and which token each of an expert's inputs belongs to.

Experts (eckart/model/experts.py) give each expert the rows of its tokens only, so a row's place in the expert's input
says nothing about its example. Here the choices of the router are recorded while the model runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eckart.model.experts import Experts, by_expert
from eckart.model.targets import Target, Targets, leave_out

UNREACHED = "belongs to an expert that no calibration token reached"


@dataclass(frozen=True)
class RoutedRows:
    """The rows of an expert's input that are not padding.

    Attributes:
        rows: their numbers in the input, ascending `(rows,)`.
        examples: the example of each, ascending `(rows,)`.
        batch: number of examples in the batch.
    """

    rows: Tensor
    examples: Tensor
    batch: int

    def by_example(self, values: Tensor) -> Tensor:
        """Return `values` `(all rows, features)` as `(batch, width, features)`, zero after an example's last row."""
        counts = self._counts
        places = torch.arange(len(self.rows), device=values.device) - (counts.cumsum(0) - counts)[self.examples]
        spread = values.new_zeros(*self.mask.shape, values.shape[-1])
        return spread.index_put((self.examples, places), values[self.rows])

    @property
    def mask(self) -> Tensor:
        """Whether a place of `by_example` holds a row `(batch, width)`."""
        width = int(self._counts.max())
        return torch.arange(width, device=self.rows.device) < self._counts[:, None]

    @property
    def _counts(self) -> Tensor:
        """Number of rows of each example `(batch,)`."""
        return self.examples.bincount(minlength=self.batch)


class RoutedTokens:
    """Records in hooks which tokens the routers of a model send to the experts of `targets`."""

    def __init__(self, model: nn.Module, targets: Iterable[Target]) -> None:
        names = {target.routed_by for target in targets if target.routed_by}
        self._modules = {name: model.get_submodule(name) for name in names}
        self._chosen: dict[str, tuple[int, list[Tensor]]] = {}
        """Name of a module of experts → number of tokens of its last call, and the tokens' numbers for each expert."""
        self.reached: set[str] = set()
        """Names of the targets that have read a token that is not padding."""

    def hooks(self) -> list[RemovableHandle]:
        """Record all calls of the experts until these hooks are removed."""
        return [module.register_forward_pre_hook(partial(self._record, name)) for name, module in self._modules.items()]

    def _record(self, name: str, module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        assert isinstance(module, Experts)
        tokens, choices = args[1].shape
        order, counts = by_expert(args[1], module.count)
        self._chosen[name] = tokens, list((order // choices).split(counts))

    def count(self, target: Target) -> int:
        """Return the number of tokens, of all examples and with padding, among which the router chose."""
        return self._chosen[str(target.routed_by)][0]

    def rows(self, target: Target, examples: int, mask: Tensor | None) -> RoutedRows:
        """Return which rows of the input that `target` reads now are not padding, and the example of each.

        Args:
            examples: number of examples in the batch.
            mask: `(examples, tokens)`, 0 at padding tokens; None if there is no padding.
        """
        count, chosen = self._chosen[str(target.routed_by)]
        number = int(target.name.split(".")[-2])
        tokens = chosen[number]
        real = torch.ones_like(tokens) if mask is None else mask.to(tokens.device).flatten()[tokens]
        rows = real.nonzero().flatten()
        if len(rows):
            self.reached.add(target.name)
        return RoutedRows(rows, tokens[rows] // (count // examples), examples)


def unreached(targets: Iterable[Target], statistics: Mapping[str, Collection[str]]) -> list[str]:
    """Return the names of the experts' targets that have no statistics, because no token reached their expert.

    Args:
        statistics: of all targets (eckart/calibration/statistics.py); only their keys are read.
    """
    keys = {key.removesuffix(".input") for tensors in statistics.values() for key in tensors}
    return [target.name for target in targets if target.routed_by and target.sampled and target.name not in keys]


def without_unreached(found: Targets, statistics: Mapping[str, Collection[str]]) -> Targets:
    """Return `found` without the targets that are `unreached`, which then stay dense."""
    names = unreached(found.targets, statistics)
    return leave_out(found, names, UNREACHED) if names else found
