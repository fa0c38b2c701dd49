"""Census of a model: its numbers of parameters by kind, to show how many of them are in targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from eckart.model.layers import LowRankLayer, parts_of_layers
from eckart.model.probing import is_linear


class Census(BaseModel):
    """Numbers of parameters of a whole model by kind; a shared parameter is counted once.

    Attributes:
        targets: number of weights in targets.
        linear: reason why linear layers or other matrices are not targets → number of weights in them.
        experts: number of weights in tensors that hold several experts; these are not targets.
        embeddings: number of weights in embeddings that are not targets.
        rest: number of all other parameters: biases, norms, convolutions and so on.
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
        """Share of the model's parameters that is in targets; the total leaves out embeddings that are not targets."""
        return self.targets / max(self.total - self.embeddings, 1)

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Rows of a table for users: a description of each kind of parameters, and their number, if above 0."""
        lines = [
            ("targets", self.targets),
            *((f"linear layers left out (reason: {reason})", count) for reason, count in self.linear.items()),
            ("experts", self.experts),
            ("embeddings", self.embeddings),
            ("the rest (biases, norms, convolutions)", self.rest),
        ]
        return [(name, count) for name, count in lines if count]

    @property
    def warning(self) -> str | None:
        """Warning for users if most of the model cannot be compressed; None if `reached` is at least half."""
        if self.reached >= 0.5:
            return None
        others = [(name, count) for name, count in self.rows if name not in ("targets", "embeddings")]
        name, count = max(others, key=lambda line: line[1])
        return (
            f"Targets are only {self.reached:.0%} of the parameters outside of embeddings, so no keep makes the model "
            f"much smaller; {count:,} others are in {name}."
        )


def census(model: nn.Module, targets: Collection[str], excluded: Mapping[str, str]) -> Census:
    """Count the parameters of `model` by kind.

    Args:
        targets: names of the modules that are targets.
        excluded: name of each other linear layer and of each of the `other_matrices` → why it is not a target.
    """
    counts: Counter[str] = Counter()
    linear: Counter[str] = Counter()
    weights = {id(model.get_submodule(name).get_parameter("weight")) for name in targets}
    seen: set[int] = set()
    for name, place, owner, parameter in _parameters(model):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        reason = excluded.get(name) or excluded.get(place)
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
    parts = ("targets", "experts", "embeddings", "rest")
    return Census(linear=dict(linear), **{part: counts[part] for part in parts})


def other_matrices(model: nn.Module) -> dict[str, str]:
    """Return the matrices outside of dense linear layers and embeddings: name of each → why it is not a target."""
    matrices: dict[str, str] = {}
    for name, place, owner, parameter in _parameters(model):
        if isinstance(owner, LowRankLayer):
            matrices[place] = "is factorized already"
        elif is_linear(owner) or _is_embedding(owner):
            continue
        elif _are_experts(name, owner, parameter):
            matrices[name] = "holds the weights of several experts in one tensor"
        elif _is_matrix(model, name, parameter):
            matrices[name] = f"belongs to {type(owner).__name__}, which is no Linear"
    return matrices


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Tensor]]:
    """Yield each parameter's name, the name of the module that owns it, that module, and the parameter.

    The factors of a low-rank layer belong to that layer.
    Embeddings come first, so that a weight that an embedding shares with a head counts as the embedding's.
    """
    layers = parts_of_layers(model)
    parameters = [
        (f"{prefix}.{name}" if prefix else name, layers.get(prefix, prefix), parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    owned = [(name, place, model.get_submodule(place), parameter) for name, place, parameter in parameters]
    return iter(sorted(owned, key=lambda entry: not _is_embedding(entry[2])))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or type(module).__name__.endswith("Embedding")


def _are_experts(name: str, owner: nn.Module, parameter: Tensor) -> bool:
    named = "expert" in name or "Expert" in type(owner).__name__
    return named and parameter.dim() in (2, 3) and not name.endswith("bias")


def _is_matrix(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether `parameter` looks like a weight matrix or a stack of them, and is not a convolution's kernel."""
    is_stack = parameter.dim() == 3
    is_weight = parameter.dim() == 2 and name.endswith("weight")
    if not (is_weight or is_stack) or min(parameter.shape) < 2:
        return False
    parts = name.split(".")[:-1]
    owners = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    return not any(isinstance(owner, nn.modules.conv._ConvNd) for owner in owners)
