"""A census: what the parameters of a whole model are, and which of them targets reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from eckart.model.layers import HeadRows, LowRankMap
from eckart.model.probing import is_linear

_CONVOLUTIONS = nn.modules.conv._ConvNd
_FACTORIZED = "is factorized already"


class Census(BaseModel):
    """How many parameters of a model are what; a shared one is counted once.

    Attributes:
        targets: weights of targets.
        linear: of other linear layers, by the reason why they are no targets.
        experts: of experts whose weights are one tensor, which are no targets either.
        embeddings: that are no targets.
        rest: biases, norms, convolutions and whatever else there is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: int
    linear: dict[str, int]
    experts: int
    embeddings: int
    rest: int

    @property
    def total(self) -> int:
        return self.targets + sum(self.linear.values()) + self.experts + self.embeddings + self.rest

    @property
    def reached(self) -> float:
        """The share of what is no embedding that targets are."""
        return self.targets / max(self.total - self.embeddings, 1)

    @property
    def rows(self) -> list[tuple[str, int]]:
        """What the parameters are, in words, and how many; those that there are none of are left out."""
        named = [
            ("targets", self.targets),
            *((f"other linear layers ({reason})", count) for reason, count in self.linear.items()),
            ("experts", self.experts),
            ("embeddings", self.embeddings),
            ("the rest (biases, norms, convolutions)", self.rest),
        ]
        return [(name, count) for name, count in named if count]

    @property
    def warning(self) -> str | None:
        """What a user must know where most of the model stays as it is, a sentence; None where targets reach half."""
        if self.reached >= 0.5:
            return None
        others = [(name, count) for name, count in self.rows if name not in ("targets", "embeddings")]
        name, count = max(others, key=lambda one: one[1])
        return (
            f"Targets are only {self.reached:.0%} of the parameters outside of embeddings, so that no keep makes the "
            f"model much smaller; {count:,} others are in {name}."
        )


def census(model: nn.Module, targets: Collection[str], excluded: Mapping[str, str]) -> Census:
    """Count the parameters of `model`.

    Args:
        targets: names of the modules whose weights are targets.
        excluded: other linear layers and what `other_matrices` finds, each with the reason why it is no target.
    """
    counts: Counter[str] = Counter()
    linear: Counter[str] = Counter()
    weights = {id(model.get_submodule(name).get_parameter("weight")) for name in targets}
    seen: set[int] = set()
    for name, owner, parameter in _parameters(model):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        reason = excluded.get(name) or excluded.get(name.rpartition(".")[0])
        if id(parameter) in weights:
            counts["targets"] += parameter.numel()
        elif _is_embedding(owner):
            counts["embeddings"] += parameter.numel()
        elif reason and _are_experts(name, owner, parameter) and not is_linear(owner):
            counts["experts"] += parameter.numel()
        elif reason and parameter.dim() > 1:
            linear[reason] += parameter.numel()
        else:
            counts["rest"] += parameter.numel()
    return Census(
        targets=counts["targets"],
        linear=dict(linear),
        experts=counts["experts"],
        embeddings=counts["embeddings"],
        rest=counts["rest"],
    )


def other_matrices(model: nn.Module) -> dict[str, str]:
    """Parameters that inputs are multiplied with outside of linear layers, by name, and what they are."""
    found: dict[str, str] = {}
    for name, owner, parameter in _parameters(model):
        layer = name.rpartition(".")[0]
        if isinstance(owner, LowRankMap | HeadRows):
            found[layer] = _FACTORIZED
        elif is_linear(owner) or _is_embedding(owner):
            continue
        elif _are_experts(name, owner, parameter):
            found[name] = "holds the weights of several experts in one tensor"
        elif _is_matrix(model, name, parameter):
            found[name] = f"belongs to {type(owner).__name__}, which is no Linear"
    return found


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, module and parameter; a shared one first where it is an embedding's."""
    every = [
        (f"{prefix}.{name}" if prefix else name, module, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return iter(sorted(every, key=lambda one: not _is_embedding(one[1])))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or type(module).__name__.endswith("Embedding")


def _are_experts(name: str, owner: nn.Module, parameter: Tensor) -> bool:
    named = "expert" in name or "Expert" in type(owner).__name__
    return named and parameter.dim() in (2, 3) and not name.endswith("bias")


def _is_matrix(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether it looks like one, or like several; not the kernel of a convolution, whose norm may own it."""
    several = parameter.dim() == 3
    one = parameter.dim() == 2 and name.endswith("weight")
    if not (one or several) or min(parameter.shape) < 2:
        return False
    parts = name.split(".")[:-1]
    owners = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    return not any(isinstance(owner, _CONVOLUTIONS) for owner in owners)
