"""Statistics: what the calibration data say about every target, gathered in one streaming pass.

For sample n at a target with inputs X_n `(tokens, in)` and output gradients Δ_n `(tokens, out)`, the gradient of
the sample's loss is G_n = Δ_nᵀ X_n `(out, in)`, and over N samples (the tokens of a target that runs several times are
those of all its calls)::

    inputs            C_in  = (1/N) Σ X_nᵀ X_n               (DRONE, eq. 3: the Gram matrix of X)
    output_gradients  C_out = (1/N) Σ Δ_nᵀ Δ_n               (K-FAC's other factor)
    fisher            I     = (1/N) Σ G_n ⊙ G_n              (FWSVD: empirical Fisher, summed over one axis)
    taylor            T     = (1/N) Σ (G_n ⊙ W) ⊙ (G_n ⊙ W)  (IWSVD: Molchanov et al. 2019, summed over one axis)

Squares are of per-sample gradients: squaring the mean gradient of a batch is another, smaller number.

Where a model was factorized in part, a walk (eckart/factorization/layerwise_forward.py) sees what a target reads in
the dense model, X_n, beside what it reads by now, X̂_n, for anchoring (eckart/factorization/error_compensation.py)::

    dense_inputs      D     = (1/N) Σ X_nᵀ X̂_n
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Loss, mean_loss_times_batch
from eckart.model.module_context import frozen
from eckart.model.probing import is_embedding, masks_of
from eckart.model.targets import Product, Target, weight_of

StatisticKind = Literal["inputs", "output_gradients", "fisher", "taylor"]
STATISTIC_KINDS: tuple[StatisticKind, ...] = get_args(StatisticKind)
OF_GRADIENTS: tuple[StatisticKind, ...] = ("output_gradients", "fisher", "taylor")
Axis = Literal["input", "output"]
Statistics = Mapping[str, Mapping[str, Tensor]]
"""Kind → key → statistic.

The kinds, with the key and the shape of each::

    inputs            Target.input_of            (in, in)   (in,) for an embedding: its diagonal, and there is no more
    tokens            Target.input_of            ()         mean tokens per sample, gathered with inputs
    input_sums        Target.input_of            (in,)      (1/N) Σ of the inputs of a Product, gathered with inputs
    dense_inputs      Target.input_of            (in, in)   of a walk beside the dense model; of no embedding
    output_gradients  Target.name                (out, out)  (out,) for a head over a vocabulary: its diagonal, no more
    fisher, taylor    Target.name + ".input"     (in,)      summed over outputs
                      Target.name + ".output"    (out,)     summed over inputs
    movement          Target.name + ".output"    (out,)     from shaping (eckart/shaping/), not from this pass
"""


def collect(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    targets: Iterable[Target],
    kinds: Iterable[StatisticKind] = STATISTIC_KINDS,
    loss: Loss = mean_loss_times_batch,
    then: Target | None = None,
    offload_activations: bool = False,
) -> Statistics:
    """Gather statistics of `kinds` for `targets` in one pass; memory does not grow with the number of samples.

    The model runs in eval mode and comes back as it was. Padding (zeros of each target's mask) counts for nothing.

    Args:
        batches: model inputs with labels, each tensor `(batch, …)`.
        loss: whose gradients are gathered; of several, squares of gradients are summed.
        then: a target that runs after all of `targets`. Where inputs are all that is asked for, the forward ends
            there; not where the first batch shows that one of `targets` runs later too.
        offload_activations: keep what the backward pass needs on the CPU until then.

    Raises:
        ValueError: a statistic is not finite (the message names the target), tokens cannot be attributed to
            samples, or there is no sample.
    """
    collector = Collector(model, targets, frozenset(kinds))
    end = None if then is None else _End(model, collector.modules.values(), then)
    needs_gradients = bool(collector.kinds - {"inputs"})
    with frozen(model), collector.attached():
        for batch in batches:
            collector.start(batch)
            if not needs_gradients:
                _read(model, batch, loss, end)
                continue
            with torch.enable_grad(), _activations_on_cpu(model) if offload_activations else nullcontext():
                losses = loss(model, batch).reshape(-1).unbind()
            if not losses[0].requires_grad:
                raise ValueError(f"{NO_GRADIENT}; a model that computes its layers outside of autograd gives none")
            for number, one in enumerate(losses, 1):
                one.backward(retain_graph=number < len(losses))
                collector.join()
            del losses, one  # and with them the graph, before the next one grows
    return collector.finish()


@torch.no_grad()
def _read(model: PreTrainedModel, batch: Batch, loss: Loss, end: _End | None) -> None:
    """A forward without gradients, as far as `end` wants it."""
    with end or nullcontext():
        try:
            loss(model, batch)
        except _Reached:
            return
    if end:
        end.learn()


@dataclass(frozen=True)
class Pass:
    """What one pass over the calibration data gathers for, and the target at which inputs are complete."""

    targets: tuple[Target, ...]
    then: Target | None


def passes(targets: Sequence[Target], layers_at_once: int | None) -> list[Pass]:
    """Share `targets` out to passes over `layers_at_once` layers each, in order of execution; None is one pass.

    A layer is what shares its name up to the first number, such as `model.layers.3`; what has no number between two
    layers is one too. Each target's statistics are bit for bit that of a single pass, as no target's hooks see
    another's.
    """
    if layers_at_once is None:
        return [Pass(tuple(targets), None)]
    layers: dict[str, list[Target]] = {}
    numbered = ""
    for target in targets:
        layer = _layer(target.name)
        numbered = layer or numbered
        layers.setdefault(layer or f"after {numbered}", []).append(target)
    every, step = list(layers.values()), layers_at_once
    groups = [list(chain.from_iterable(every[start : start + step])) for start in range(0, len(every), step)]
    following = [group[0] for group in groups[1:]]
    return [Pass(tuple(group), then) for group, then in zip(groups, [*following, None], strict=True)]


def _layer(name: str) -> str:
    """`name` up to and including its first number; nothing where it has none."""
    parts = name.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def gather(
    model: PreTrainedModel,
    batches: Callable[[], Iterable[Batch]],
    groups: Sequence[Pass],
    kinds: Collection[StatisticKind],
    loss: Loss,
    offload_activations: bool = False,
) -> Iterator[Statistics]:
    """Yield the statistics of each group of targets, gathered in a pass of its own.

    Args:
        batches: called for each pass; gives the calibration data.
        groups: as `passes` makes them.

    Raises:
        ValueError: statistics of gradients are asked for, and no target has a gradient; or as for `collect`.
    """
    without_gradient = bool({*kinds} & {*OF_GRADIENTS})
    for number, group in enumerate(groups, 1):
        statistics = collect(model, batches(), group.targets, kinds, loss, group.then, offload_activations)
        without_gradient = without_gradient and not has_gradients(statistics)
        if without_gradient and number == len(groups):
            raise ValueError(NO_GRADIENT)
        yield statistics
        del statistics  # before the next pass


class _Reached(Exception):
    """Everything that is to be gathered from this forward has run."""


class _End:
    """Ends forwards before `then`, once a whole one has shown that all `modules` run before it."""

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], then: Target) -> None:
        self.modules = tuple(modules)
        self.module = model.get_submodule(then.name)
        self.passed = False
        self.late = False
        self.armed = False

    def __enter__(self) -> None:
        self.hooks = [module.register_forward_pre_hook(self._before_target) for module in self.modules]
        self.hooks.append(self.module.register_forward_pre_hook(self._before_then))

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _before_target(self, *_: object) -> None:
        self.late |= self.passed

    def _before_then(self, *_: object) -> None:
        if self.armed:
            raise _Reached
        self.passed = True

    def learn(self) -> None:
        """After a whole forward."""
        self.armed = self.passed and not self.late
        self.passed = False


@contextmanager
def _activations_on_cpu(model: nn.Module) -> Iterator[None]:
    """What the graph saves goes to the CPU, but for the model's weights, which stay where they are anyway."""
    resident = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if not parameter.is_meta}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        return tensor if tensor.untyped_storage().data_ptr() in resident else (tensor.device, tensor.cpu())

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class Collector:
    """Accumulates statistics from hooks: inputs on the way forward, everything else on the way back."""

    def __init__(self, model: nn.Module, targets: Iterable[Target], kinds: frozenset[str]) -> None:
        targets = tuple(targets)
        maps = [each for target in targets for each in target.maps]
        self.modules = {target: model.get_submodule(target.name) for target in maps}
        self.of_products = {each.input_of for target in targets if isinstance(target, Product) for each in target.maps}
        self.kinds = kinds
        self.batch: Batch = {}
        self.calls: dict[Target, list[tuple[Tensor, Tensor] | None]] = {}
        """Of this batch: what each call read and its gradient, kept where calls must be joined."""
        self.counts: dict[str, int] = {}
        """Rows for each sample of a target that sees no mask."""
        self.samples = 0
        self.sums: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATISTIC_KINDS if kind in kinds}

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

    def start(self, batch: Batch) -> None:
        """Go on to the next batch; all calls of the one before are done."""
        self.batch = batch
        self.calls = {}
        self.samples += _batch_size(batch)

    def read(self, target: Target, reads: Tensor, dense: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Take in what a call of `target` reads, `dense` in the dense model.

        Returns:
            It as samples, and which tokens are no padding.
        """
        module = self.modules[target]
        call = self._call(target)
        ids = is_embedding(module)
        real = self._real(target, reads.shape if ids else reads.shape[:-1], call)
        real = None if real is None else real.to(reads.device)
        x = self._samples(reads.unsqueeze(-1) if ids else reads.detach(), real)
        if "inputs" in self.kinds and target.input_of == target.name:
            precision = _summed(module.get_parameter("weight"))
            if ids:
                self._add("inputs", target.name, _counts(x, real, target.in_features).to(precision))
            else:
                self._add_gram("inputs", target.name, x.flatten(0, 1).to(precision))
            tokens = torch.tensor(x.shape[0] * x.shape[1], device=x.device) if real is None else real.sum()
            self._add("tokens", target.name, tokens.to(precision))
            if dense is not None and not ids:
                product = self._samples(dense, real).flatten(0, 1).T @ x.flatten(0, 1)
                self._add("dense_inputs", target.name, product.to(precision))
            if target.name in self.of_products:
                self._add("input_sums", target.name, x.sum((0, 1)).to(precision))
        return x, real

    def _forward(self, target: Target, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, real = self.read(target, args[0])
        call = len(self.calls[target]) - 1
        if not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # parameters are frozen, so the first targets start the graph
            output = output.detach().requires_grad_().clone()
        squares = self.kinds & {"fisher", "taylor"}  # which alone need what it read
        output.register_hook(partial(self._backward, target, call, x if squares else None, real))
        return output

    def _backward(self, target: Target, call: int, x: Tensor | None, real: Tensor | None, gradient: Tensor) -> None:
        delta = self._samples(gradient.detach(), real)
        if "output_gradients" in self.kinds:
            flat = delta.flatten(0, 1)
            if target.of_vocabulary:
                self._add("output_gradients", target.name, flat.square().sum(0))
            else:
                self._add_gram("output_gradients", target.name, flat)
        if x is None:
            return
        if target.repeated:
            self.calls[target][call] = x, delta
        else:
            self._add_squares(target, x, delta)

    def _call(self, target: Target) -> int:
        """Which call of `target` for this batch this is, from 0."""
        calls = self.calls.setdefault(target, [])
        if calls and not target.repeated:
            raise ValueError(f"{target.name}: its forward ran again for the same batch; exclude this target")
        calls.append(None)
        return len(calls) - 1

    def join(self) -> None:
        """Squares of gradients that several calls share, once the gradients of all of them are there."""
        for target, calls in self.calls.items():
            if pairs := [pair for pair in calls if pair is not None]:
                self._add_squares(target, *(torch.cat(parts, 1) for parts in zip(*pairs, strict=True)))
            self.calls[target] = [None] * len(calls)

    def _add_squares(self, target: Target, x: Tensor, delta: Tensor) -> None:
        module, kinds = self.modules[target], self.kinds & {"fisher", "taylor"}
        sums = (lookup_sums if is_embedding(module) else square_sums)(x, delta, weight_of(module), kinds)
        for kind, (by_input, by_output) in sums.items():
            self._add(kind, f"{target.name}.input", by_input)
            self._add(kind, f"{target.name}.output", by_output)

    def _real(self, target: Target, shape: Sequence[int], call: int) -> Tensor | None:
        """Which tokens of this call are no padding, `(batch, tokens)` of 0 and 1; None where all are.

        Args:
            shape: of its rows.
        """
        size, mask = _batch_size(self.batch), self._mask(target)
        whole = mask is None or len(shape) == 1 or shape[0] in (size, math.prod(mask.shape[:-1]))
        if shape[0] % size or not whole:
            raise ValueError(
                f"{target.name}: rows of {tuple(shape)} cannot be split into {size} samples; exclude this target"
            )
        tokens = math.prod(shape) // size
        if mask is None:
            self._check_count(target, tokens, len(shape) == 1)
            return None
        mask = mask.flatten(1)
        if target.repeated and tokens == 1:  # a cell: its calls are the tokens, in their order
            mask = mask[:, call : call + 1]
        if mask.shape != (size, tokens):
            raise ValueError(
                f"{target.name}: {tokens} tokens per sample, but {target.mask} has {mask.shape[1]}, so padding cannot "
                "be told from data: exclude this target, or pad batches as the model pads them itself"
            )
        return None if bool(mask.all()) else mask

    def _mask(self, target: Target) -> Tensor | None:
        """The mask of what `target` sees; None: it sees none."""
        masks = masks_of(self.batch)
        if target.mask is None or not masks:
            return None
        if target.mask not in masks:
            raise ValueError(f"{target.name}: the batch has no {target.mask}: add it, 0 where a token is padding")
        return self.batch[target.mask]

    def _check_count(self, target: Target, tokens: int, flat: bool) -> None:
        """Where texts differ in length, what does not see their tokens has as many rows for each sample.

        So has what reads rows of all samples in one dimension, as an expert reads those that a router sends.
        """
        known = masks_of(self.batch) or flat
        if known and self.counts.setdefault(target.name, tokens) != tokens:
            raise ValueError(
                f"{target.name}: {self.counts[target.name]} rows for each sample of one batch and {tokens} of another, "
                "which belong to no mask; exclude this target"
            )

    def _samples(self, values: Tensor, real: Tensor | None) -> Tensor:
        """`values` as `(batch, tokens, features)`, in float32 or better if no ids; zero where the token is padding."""
        if values.is_floating_point():
            values = values.to(torch.promote_types(values.dtype, torch.float32))
        values = values.reshape(_batch_size(self.batch), -1, values.shape[-1])
        return values if real is None else values.masked_fill(real.unsqueeze(-1) == 0, 0)

    def _add(self, kind: str, key: str, value: Tensor) -> None:
        sums = self.sums.setdefault(kind, {})
        sums[key] = sums[key].add_(value) if key in sums else value

    def _add_gram(self, kind: str, key: str, rows: Tensor) -> None:
        """Add Xᵀ X; its lower triangle waits for `finish`."""
        sums = self.sums.setdefault(kind, {})
        if key not in sums:
            sums[key] = rows.new_zeros(rows.shape[1], rows.shape[1])
        add_gram(sums[key], rows)

    def _fill(self) -> None:
        """A target that no gradient reaches (a pooler beside an unpooled head) weighs nothing."""
        for target, module in self.modules.items():
            some = next(module.parameters())
            like = torch.empty(0, device="cpu" if some.is_meta else some.device, dtype=_summed(some))
            if "output_gradients" in self.kinds:
                sides = 1 if target.of_vocabulary else 2
                self.sums["output_gradients"].setdefault(target.name, like.new_zeros([target.out_features] * sides))
            for kind in self.kinds & {"fisher", "taylor"}:
                self.sums[kind].setdefault(f"{target.name}.input", like.new_zeros(target.in_features))
                self.sums[kind].setdefault(f"{target.name}.output", like.new_zeros(target.out_features))

    def finish(self) -> Statistics:
        if not self.samples:
            raise ValueError("there is no calibration sample: raise data.sizes.calibration")
        self._fill()
        for kind, sums in self.sums.items():
            for key, value in sums.items():
                if kind in ("inputs", "output_gradients") and value.ndim == 2:
                    mirror(value)
                edges = torch.stack(value.div_(self.samples).aminmax())  # isfinite of all would copy it
                if not torch.isfinite(edges).all():
                    raise ValueError(f"{kind} of {key} is not finite: the model overflows on the calibration data")
                if kind == "tokens" and not value:
                    raise ValueError(f"{key} sees no token: the mask of the calibration data is 0 everywhere")
        return self.sums


def has_gradients(statistics: Statistics) -> bool:
    """Whether statistics of gradients are other than zero for any target; else they weigh nothing."""
    return any(bool(value.any()) for kind in OF_GRADIENTS for value in statistics.get(kind, {}).values())


NO_GRADIENT = (
    "the loss has a gradient of zero for every target, so the calibration data say nothing of what matters: look "
    "whether any label counts, and whether the loss depends on the targets"
)


SquareSums = dict[str, tuple[Tensor, Tensor]]
"""fisher or taylor → its squares summed over outputs `(in,)` and over inputs `(out,)`."""


def square_sums(x: Tensor, delta: Tensor, weight: Tensor, kinds: Collection[str]) -> SquareSums:
    """Fisher's Σ_n G_n ⊙ G_n and Taylor's Σ_n (G_n ⊙ W) ⊙ (G_n ⊙ W), those of them that are in `kinds`.

    Args:
        x: `(batch, tokens, in)`.
        delta: `(batch, tokens, out)`.
        weight: `(out, in)`.
    """
    tokens, columns, rows = x.shape[1], x.shape[2], delta.shape[2]
    if set(kinds) == {"fisher"} and 2 * tokens * (rows + columns) <= rows * columns:
        return {"fisher": _fisher_of_few_tokens(x, delta)}
    squares, sums = _squared_gradients(x, delta), {}
    if "fisher" in kinds:
        sums["fisher"] = squares.sum(0), squares.sum(1)
    if "taylor" in kinds:
        squares.mul_(weight.to(x.dtype).square())  # W² is the same for all samples
        sums["taylor"] = squares.sum(0), squares.sum(1)
    return sums


def lookup_sums(ids: Tensor, delta: Tensor, weight: Tensor, kinds: Collection[str]) -> SquareSums:
    """`square_sums` of an embedding: only columns that a sample looks up have gradients.

    Args:
        ids: `(batch, tokens, 1)`.
        delta: `(batch, tokens, out)`, zero where the token is padding.
        weight: `(out, in)`.
    """
    sums = {kind: (delta.new_zeros(weight.shape[1]), delta.new_zeros(weight.shape[0])) for kind in kinds}
    for one_ids, one_delta in zip(ids.squeeze(-1), delta, strict=True):
        seen, places = one_ids.unique(return_inverse=True)
        gradient = delta.new_zeros(len(seen), weight.shape[0]).index_add_(0, places, one_delta)
        for kind, (by_input, by_output) in sums.items():
            squares = (gradient * weight.T[seen] if kind == "taylor" else gradient).square()
            by_input[seen] += squares.sum(1)
            by_output += squares.sum(0)
    return sums


_PANEL = 128  # rows, of a Gram matrix
_STRIP = 256  # rows, of squared gradients: with a gradient's as many they stay in the cache


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add Xᵀ X of `x` `(tokens, features)` to the upper triangle of `total` `(features, features)`, in place.

    One product of all would compute both triangles, and takes up to 1.9 times as long. Blocks on the diagonal are
    whole; what is below them is left to `mirror`.
    """
    for rows in _parts(total, _PANEL):
        total[rows, rows.start :].addmm_(x[:, rows].T, x[:, rows.start :])


def mirror(total: Tensor) -> None:
    """Fill what `add_gram` left with the mirror image of what it added to."""
    for end in range(_PANEL, len(total), _PANEL):
        rows = slice(end - _PANEL, end)
        total[end:, rows] = total[rows, end:].T


def _parts(matrix: Tensor, size: int) -> Iterator[slice]:
    """Its rows, `size` at a time; all at once on accelerators, which want few products, and mps no sums into parts."""
    size = size if matrix.device.type == "cpu" else len(matrix)
    return (slice(start, start + size) for start in range(0, len(matrix), size))


def _counts(ids: Tensor, real: Tensor | None, size: int) -> Tensor:
    """How often each of `size` ids is looked up `(size,)`: the diagonal of Σ_n X_nᵀ X_n of one-hot rows."""
    flat = ids.flatten() if real is None else ids.flatten()[real.flatten() != 0]
    return torch.bincount(flat, minlength=size)


def _fisher_of_few_tokens(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Fisher's sums without forming G_n: Σ_i G_ij² = [Xᵀ (Δ Δᵀ) X]_jj, and likewise for the other axis."""
    by_input = (x * (delta @ delta.mT @ x)).sum((0, 1))
    by_output = (delta * (x @ x.mT @ delta)).sum((0, 1))
    return by_input.clamp(min=0), by_output.clamp(min=0)  # sums of squares, but for cancellation


def _squared_gradients(x: Tensor, delta: Tensor) -> Tensor:
    """Σ_n G_n ⊙ G_n `(out, in)`; one sample's gradient at a time."""
    squares = x.new_zeros(delta.shape[2], x.shape[2])
    for rows in _parts(squares, _STRIP):
        for one_x, one_delta in zip(x, delta, strict=True):
            gradient = one_delta[:, rows].T @ one_x
            squares[rows].addcmul_(gradient, gradient)
    return squares


def _summed(values: Tensor) -> torch.dtype:
    """The type that statistics of `values` are summed in: sums of squares in bfloat16 would soon stop growing."""
    return torch.promote_types(values.dtype, torch.float32)


def _batch_size(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def save_statistics(statistics: Statistics, folder: Path, part: int | None = None) -> None:
    """Write `KIND.safetensors` for each kind; of statistics that come in parts `KIND-00001.safetensors`, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if part is None else f"-{part:05}"
    for kind, tensors in statistics.items():
        file = folder / f"{kind}{suffix}.safetensors"
        save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, file)


def load_statistics(folder: Path) -> Statistics:
    """Read what `save_statistics` wrote, of all parts; a tensor comes from the disk when it is asked for."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        files.setdefault(path.stem.partition("-")[0], []).append(path)
    return {kind: _Stored(paths) for kind, paths in files.items()}


class _Stored(Mapping[str, Tensor]):
    """Safetensors files as one mapping that reads one tensor at a time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self._path_of |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, key: str) -> Tensor:
        # An open file is mapped: all that was ever read of it would count as memory of this process.
        with safe_open(self._path_of[key], framework="pt") as file:
            return file.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def __len__(self) -> int:
        return len(self._path_of)
