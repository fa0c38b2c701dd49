"""Evidence: what the calibration data say about every target, gathered in one streaming pass.

For sample n at a target with inputs X_n `(tokens, in)` and output gradients Δ_n `(tokens, out)`, the gradient of
the sample's loss is G_n = Δ_nᵀ X_n `(out, in)`, and over N samples

    inputs            C_in  = (1/N) Σ X_nᵀ X_n               (DRONE, eq. 3: the Gram matrix of X)
    output_gradients  C_out = (1/N) Σ Δ_nᵀ Δ_n               (K-FAC's other factor)
    fisher            I     = (1/N) Σ G_n ⊙ G_n              (FWSVD: empirical Fisher, summed over one axis)
    taylor            T     = (1/N) Σ (G_n ⊙ W) ⊙ (G_n ⊙ W)  (IWSVD: Molchanov et al. 2019, summed over one axis)

Squares are of per-sample gradients: squaring the mean gradient of a batch is another, smaller number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.batch import Batch
from eckart.losses import Loss, mean_loss_times_batch
from eckart.targets import Target, weight_of

Kind = Literal["inputs", "output_gradients", "fisher", "taylor"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Axis = Literal["input", "output"]
Evidence = Mapping[str, Mapping[str, Tensor]]
"""Kind → key → statistic:

    inputs            Target.input_of            (in, in)
    tokens            Target.input_of            ()         mean tokens per sample, gathered with inputs
    output_gradients  Target.name                (out, out)
    fisher, taylor    Target.name + ".input"     (in,)      summed over outputs
                      Target.name + ".output"    (out,)     summed over inputs
    movement          Target.name + ".output"    (out,)     from shaping (eckart/shaping.py), not from this pass
"""


def collect(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    targets: Iterable[Target],
    kinds: Iterable[Kind] = KINDS,
    loss: Loss = mean_loss_times_batch,
) -> Evidence:
    """Gather evidence of `kinds` for `targets` in one pass; memory does not grow with the number of samples.

    The model runs in eval mode and comes back as it was. Padding (zeros of `attention_mask`) counts for nothing.

    Args:
        batches: model inputs with labels, each tensor `(batch, …)`.
        loss: whose gradients are gathered.

    Raises:
        ValueError: a statistic is not finite (the message names the target), tokens cannot be attributed to
            samples, or there is no sample.
    """
    collector = _Collector(model, tuple(targets), frozenset(kinds))
    needs_gradients = bool(collector.kinds - {"inputs"})
    with _frozen(model), collector.attached(), torch.set_grad_enabled(needs_gradients):
        for batch in batches:
            collector.batch = batch
            collector.samples += _batch_size(batch)
            total = loss(model, batch)
            if needs_gradients:
                total.backward()
    return collector.finish()


class _Collector:
    """Accumulates statistics from hooks: inputs on the way forward, everything else on the way back."""

    def __init__(self, model: nn.Module, targets: tuple[Target, ...], kinds: frozenset[str]) -> None:
        self.modules = {target: model.get_submodule(target.name) for target in targets}
        self.kinds = kinds
        self.batch: Batch = {}
        self.samples = 0
        self.sums: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS if kind in kinds}
        if "inputs" in kinds:
            self.sums["tokens"] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        hooks = [
            module.register_forward_hook(partial(self._forward, target)) for target, module in self.modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, target: Target, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = self._samples(target, args[0].detach())
        if "inputs" in self.kinds and target.input_of == target.name:
            flat = x.flatten(0, 1)
            self._add("inputs", target.name, flat.T @ flat)
            self._add("tokens", target.name, self._tokens(x))
        if not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # parameters are frozen, so the first targets start the graph
            output = output.detach().requires_grad_().clone()
        output.register_hook(partial(self._backward, target, x))
        return output

    def _backward(self, target: Target, x: Tensor, gradient: Tensor) -> None:
        delta = self._samples(target, gradient.detach())
        if "output_gradients" in self.kinds:
            flat = delta.flatten(0, 1)
            self._add("output_gradients", target.name, flat.T @ flat)
        if "fisher" in self.kinds:
            self._add_axes("fisher", target, *fisher_sums(x, delta))
        if "taylor" in self.kinds:
            self._add_axes("taylor", target, *taylor_sums(x, delta, weight_of(self.modules[target])))

    def _samples(self, target: Target, values: Tensor) -> Tensor:
        """`values` as `(batch, tokens, features)` in float32 or better, zero where the token is padding."""
        size = _batch_size(self.batch)
        if values.shape[0] != size if values.dim() > 2 else values.shape[0] % size:
            raise ValueError(
                f"{target.name}: {tuple(values.shape)} cannot be split into {size} samples; exclude this target"
            )
        values = values.reshape(size, -1, values.shape[-1]).to(torch.promote_types(values.dtype, torch.float32))
        mask = self.batch.get("attention_mask")
        if mask is None or values.shape[1] == 1 or bool(mask.all()):
            return values
        if mask.shape != values.shape[:2]:
            raise ValueError(
                f"{target.name}: {values.shape[1]} tokens per sample, but attention_mask has {mask.shape[1]}, "
                "so padding cannot be told from data; exclude this target"
            )
        return values.masked_fill(mask.unsqueeze(-1) == 0, 0)

    def _tokens(self, x: Tensor) -> Tensor:
        mask = self.batch.get("attention_mask")
        padded = mask is not None and mask.shape == x.shape[:2]
        return mask.sum().to(x.dtype) if mask is not None and padded else x.new_tensor(x.shape[0] * x.shape[1])

    def _add_axes(self, kind: str, target: Target, by_input: Tensor, by_output: Tensor) -> None:
        self._add(kind, f"{target.name}.input", by_input)
        self._add(kind, f"{target.name}.output", by_output)

    def _add(self, kind: str, key: str, value: Tensor) -> None:
        sums = self.sums[kind]
        sums[key] = sums[key].add_(value) if key in sums else value

    def _fill(self) -> None:
        """A target that no gradient reaches (a pooler beside an unpooled head) weighs nothing."""
        for target, module in self.modules.items():
            like = weight_of(module)
            if "output_gradients" in self.kinds:
                square = like.new_zeros(target.out_features, target.out_features)
                self.sums["output_gradients"].setdefault(target.name, square)
            for kind in self.kinds & {"fisher", "taylor"}:
                self.sums[kind].setdefault(f"{target.name}.input", like.new_zeros(target.in_features))
                self.sums[kind].setdefault(f"{target.name}.output", like.new_zeros(target.out_features))

    def finish(self) -> Evidence:
        if not self.samples:
            raise ValueError("there is no calibration sample: raise data.sizes.calibration")
        self._fill()
        for kind, sums in self.sums.items():
            for key, value in sums.items():
                if not torch.isfinite(value.div_(self.samples)).all():
                    raise ValueError(f"{kind} of {key} is not finite: the model overflows on the calibration data")
        return self.sums


def fisher_sums(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_n G_n ⊙ G_n summed over outputs `(in,)` and over inputs `(out,)`.

    Args:
        x: `(batch, tokens, in)`.
        delta: `(batch, tokens, out)`.

    Where tokens are few, without forming G_n: Σ_i G_ij² = [Xᵀ (Δ Δᵀ) X]_jj, and likewise for the other axis.
    """
    tokens, columns, rows = x.shape[1], x.shape[2], delta.shape[2]
    if 2 * tokens * (rows + columns) <= rows * columns:
        by_input = (x * (delta @ delta.mT @ x)).sum((0, 1))
        by_output = (delta * (x @ x.mT @ delta)).sum((0, 1))
        return by_input.clamp(min=0), by_output.clamp(min=0)  # sums of squares, but for cancellation
    squares = _squared_gradients(x, delta)
    return squares.sum(0), squares.sum(1)


def taylor_sums(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_n (G_n ⊙ W)² summed over outputs `(in,)` and over inputs `(out,)`; shapes as in `fisher_sums`."""
    squares = _squared_gradients(x, delta).mul_(weight.to(x.dtype).square())  # W² is the same for all samples
    return squares.sum(0), squares.sum(1)


def _squared_gradients(x: Tensor, delta: Tensor) -> Tensor:
    """Σ_n G_n ⊙ G_n `(out, in)`; one sample's gradient at a time, so that it stays in the processor's cache."""
    squares = x.new_zeros(delta.shape[2], x.shape[2])
    for one_x, one_delta in zip(x, delta, strict=True):
        gradient = one_delta.T @ one_x
        squares.addcmul_(gradient, gradient)
    return squares


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode and no parameter gradients; both restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode


def _batch_size(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def save_evidence(evidence: Evidence, folder: Path) -> None:
    """Write one `KIND.safetensors` for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, tensors in evidence.items():
        save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, folder / f"{kind}.safetensors")


def load_evidence(folder: Path) -> Evidence:
    """Read what `save_evidence` wrote; a tensor comes from the disk when it is asked for."""
    return {path.stem: _Stored(path) for path in sorted(folder.glob("*.safetensors"))}


class _Stored(Mapping[str, Tensor]):
    """A safetensors file as a mapping that reads one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._keys = tuple(self._file.keys())

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self._file.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
