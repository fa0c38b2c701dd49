"""Calibration statistics: second moments of every target's inputs and gradients, gathered in one streaming pass.

For example n, X_n `(tokens, in)` are the inputs of a target, and Δ_n `(tokens, out)` is the gradient of the example's
loss by the target's outputs. Then the gradient by its weight W is G_n = Δ_nᵀ X_n `(out, in)`. Over N examples::

    inputs            C_in  = (1/N) Σ X_nᵀ X_n               (DRONE, eq. 3: the Gram matrix of X)
    input_magnitudes  A     = (1/N) Σ_n Σ_t |x_t|            (ASVD: absolute values, summed over tokens t)
    output_gradients  C_out = (1/N) Σ Δ_nᵀ Δ_n               (K-FAC's other factor; may be made robust, as in LEMS)
    fisher            I     = (1/N) Σ G_n ⊙ G_n              (FWSVD: empirical Fisher, summed over one axis)
    taylor            T     = (1/N) Σ (G_n ⊙ W) ⊙ (G_n ⊙ W)  (IWSVD: Molchanov et al. 2019, summed over one axis)
    gradients         G     = (1/N) Σ G_n                    (ZS-SVD: the mean gradient)

For fisher and taylor, each example's gradient is squared: the square of a batch's mean gradient is another, smaller
number. If a target runs several times for a batch, the tokens of all calls count as its tokens.

While a model is factorized layer by layer (eckart/factorization/layerwise_forward.py), a target's inputs are X_n in
the original model and X̂_n in the partly factorized model. Error compensation
(eckart/factorization/error_compensation.py) also needs the outputs T_n `(tokens, out)` that the target should have::

    wanted_outputs    B     = (1/N) Σ T_nᵀ X̂_n
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.losses import Loss, mean_loss_times_batch
from eckart.calibration.robust_gradients import UNCHANGED, RobustGradients
from eckart.calibration.routed_tokens import RoutedRows, RoutedTokens
from eckart.calibration.second_moments import add_gram, gradient_sum, lookup_counts, lookup_sums, mirror, square_sums
from eckart.model.batches import ATTENTION, PICTURES, Batch, batch_size, masks_of
from eckart.model.module_context import frozen, hooked, with_gradient
from eckart.model.probing import is_embedding
from eckart.model.targets import Product, Target, weight_of
from eckart.precision import at_least_float32, sum_dtype

StatisticKind = Literal["inputs", "input_magnitudes", "output_gradients", "fisher", "taylor", "gradients"]
STATISTIC_KINDS: tuple[StatisticKind, ...] = get_args(StatisticKind)
OF_GRADIENTS: tuple[StatisticKind, ...] = ("output_gradients", "fisher", "taylor", "gradients")
Axis = Literal["input", "output"]
Statistics = Mapping[str, Mapping[str, Tensor]]
"""Calibration statistics: kind → key → tensor.

Each line shows a kind with its keys, shapes and meaning::

    inputs            Target.input_of            (in, in)    (in,) for an embedding: the diagonal, the rest is zero
    input_magnitudes  Target.input_of            (in,)
    tokens            Target.input_of            ()          mean tokens per example, gathered with both of these
    input_sums        Target.input_of            (in,)       (1/N) Σ of the inputs of a Product, gathered with inputs
    wanted_outputs    Target.name                (out, in)   only while factorizing in order; not for an embedding
    output_gradients  Target.name                (out, out)  (out,) for a head over a vocabulary: only the diagonal
    fisher, taylor    Target.name + ".input"     (in,)       summed over outputs
                      Target.name + ".output"    (out,)      summed over inputs
    gradients         Target.name                (out, in)   as large as the weight, so it is gathered on request only
    movement          Target.name + ".output"    (out,)      from shaping (eckart/shaping/), not from this pass
"""

NO_GRADIENT = (
    "the loss has a gradient of zero for every target, so there is nothing to weigh errors by: check that some labels "
    "count and that the loss depends on the targets; a model that computes its layers outside of autograd gives none"
)


def collect(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    targets: Iterable[Target],
    kinds: Iterable[StatisticKind] = STATISTIC_KINDS,
    loss: Loss = mean_loss_times_batch,
    then: Target | None = None,
    offload_activations: bool = False,
    robust: RobustGradients = UNCHANGED,
) -> Statistics:
    """Gather statistics of `kinds` for `targets` in one pass; memory does not grow with the number of examples.

    The model runs in eval mode and is restored afterwards. Padding (zeros of each target's mask) is left out. Gradients
    of targets that the loss does not reach are zero.

    Args:
        batches: model inputs with labels, each tensor `(batch, …)`.
        loss: loss for the gradients; if it returns several losses, their squared gradients are summed.
        then: a target that runs after all of `targets`. If only inputs are gathered, each forward pass stops before
            this target, unless the first batch shows that one of `targets` runs later after all.
        offload_activations: whether to keep the activations on the CPU until the backward pass needs them.
        robust: what of the gradients counts in output_gradients.

    Raises:
        ValueError: a statistic is not finite (the message names the target), tokens cannot be attributed to
            examples, or there is no example.
    """
    collector = Collector(model, targets, frozenset(kinds), robust)
    stop = None if then is None else _EarlyStop(model, collector.modules.values(), then)
    needs_gradients = bool(collector.kinds & {*OF_GRADIENTS})
    with frozen(model), collector.attached():
        for batch in batches:
            collector.start(batch)
            if not needs_gradients:
                with torch.no_grad(), stop or nullcontext():
                    loss(model, batch)
                continue
            with torch.enable_grad(), _activations_on_cpu(model) if offload_activations else nullcontext():
                losses = loss(model, batch).reshape(-1).unbind()
            if not losses[0].requires_grad:  # it reaches none of the targets, as an embedding model's pooler
                continue
            for number, scalar in enumerate(losses, 1):
                scalar.backward(retain_graph=number < len(losses))
                collector.join_calls()
            del losses, scalar  # also frees their graph, before the next batch builds one
    return collector.finish()


class _Stopped(Exception):
    """Exception that ends a forward pass early, once all hooked modules have run."""


class _EarlyStop:
    """Context for one forward pass at a time; it ends before the target `then` if none of `modules` runs after `then`.

    The first forward pass runs to its end, to see whether any of them does.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], then: Target) -> None:
        self.modules = tuple(modules)
        self.last = model.get_submodule(then.name)
        self.passed_last = False
        self.runs_later = False
        self.armed = False

    def __enter__(self) -> None:
        self.hooks = [module.register_forward_pre_hook(self._before_module) for module in self.modules]
        self.hooks.append(self.last.register_forward_pre_hook(self._before_last))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> bool:
        for hook in self.hooks:
            hook.remove()
        if error is None:
            self.armed = self.passed_last and not self.runs_later
            self.passed_last = False
        return error is _Stopped

    def _before_module(self, *_: object) -> None:
        self.runs_later |= self.passed_last

    def _before_last(self, *_: object) -> None:
        if self.armed:
            raise _Stopped
        self.passed_last = True


@contextmanager
def _activations_on_cpu(model: nn.Module) -> Iterator[None]:
    """Keep on the CPU what autograd saves for the backward pass, except weights, which stay on their device anyway."""
    resident = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if not parameter.is_meta}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        return tensor if tensor.untyped_storage().data_ptr() in resident else (tensor.device, tensor.cpu())

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class Collector:
    """Accumulates statistics in hooks on the targets: inputs in the forward pass, all others in the backward pass."""

    def __init__(
        self,
        model: nn.Module,
        targets: Iterable[Target],
        kinds: frozenset[str],
        robust: RobustGradients = UNCHANGED,
    ) -> None:
        targets = tuple(targets)
        self.modules = {layer: model.get_submodule(layer.name) for target in targets for layer in target.layers}
        self.product_inputs = {
            layer.input_of for target in targets if isinstance(target, Product) for layer in target.layers
        }
        self.routed = RoutedTokens(model, targets)
        self.kinds = kinds
        self.robust = robust
        self.squares = kinds & {"fisher", "taylor"}
        self.by_weight = kinds & {"fisher", "taylor", "gradients"}
        self.batch: Batch = {}
        self.calls: dict[Target, list[tuple[Tensor, Tensor] | None]] = {}
        """Target → its calls for this batch: inputs and output gradients of each, or None if they are not kept."""
        self.tokens_per_example: dict[str, int] = {}
        """Name of a target without a mask → tokens per example, which must be the same in all batches."""
        self.examples = 0
        self.sums: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATISTIC_KINDS if kind in kinds}

    def attached(self) -> AbstractContextManager[None]:
        """Hook all targets now, until the returned context ends."""
        hooks = [module.register_forward_hook(partial(self._forward, layer)) for layer, module in self.modules.items()]
        return hooked([*hooks, *self.routed.hooks()])

    def start(self, batch: Batch) -> None:
        """Begin the next batch. All inputs and gradients of the previous batch must have been added by now."""
        self.batch = batch
        self.calls = {}
        self.examples += batch_size(batch)

    def add_inputs(
        self, target: Target, inputs: Tensor, dense: Tensor | None = None
    ) -> tuple[Tensor, Tensor | RoutedRows | None]:
        """Add the inputs of one call of `target` to the statistics of inputs.

        Args:
            inputs: the call's input `(…, in)`, or ids `(…,)` for an embedding.
            dense: hidden states of the original model at the same tokens, `(…, n)`. The sum of their products with
                the inputs, `(n, in)`, becomes a statistic dense_products; None: gather none.

        Returns:
            The inputs as `(batch, tokens, in)`, and which rows of the call are not padding. For an expert's layer,
            `tokens` is the largest number of an example's tokens that it reads.
        """
        module = self.modules[target]
        ids = is_embedding(module)
        rows = self._rows(target, inputs.shape if ids else inputs.shape[:-1])
        rows = rows.to(inputs.device) if isinstance(rows, Tensor) else rows
        mask = rows.mask if isinstance(rows, RoutedRows) else rows
        x = self._by_example(inputs.unsqueeze(-1) if ids else inputs.detach(), rows)
        if not self.kinds & {"inputs", "input_magnitudes"} or target.input_of != target.name or not x.shape[1]:
            return x, rows
        dtype = sum_dtype(module.get_parameter("weight"))
        tokens = torch.tensor(x.shape[0] * x.shape[1], device=x.device) if mask is None else mask.sum()
        self._add("tokens", target.name, tokens.to(dtype))
        if "input_magnitudes" in self.kinds:
            sums = lookup_counts(x, mask, target.in_features) if ids else x.abs().sum((0, 1))
            self._add("input_magnitudes", target.name, sums.to(dtype))
        if "inputs" not in self.kinds:
            return x, rows
        if ids:
            self._add("inputs", target.name, lookup_counts(x, mask, target.in_features).to(dtype))
        else:
            self._add_gram("inputs", target.name, x.flatten(0, 1).to(dtype))
        if dense is not None and not ids:
            product = self._by_example(dense, rows).flatten(0, 1).T @ x.flatten(0, 1)
            self._add("dense_products", target.name, product.to(dtype))
        if target.name in self.product_inputs:
            self._add("input_sums", target.name, x.sum((0, 1)).to(dtype))
        return x, rows

    def _forward(self, target: Target, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, rows = self.add_inputs(target, args[0])
        call = len(self.calls[target]) - 1
        if not torch.is_grad_enabled() or not x.shape[1]:
            return output
        output = with_gradient(output)  # parameters are frozen, so the graph starts at the first targets
        output.register_hook(partial(self._backward, target, call, x if self.by_weight else None, rows))
        return output

    def _backward(
        self, target: Target, call: int, x: Tensor | None, rows: Tensor | RoutedRows | None, gradient: Tensor
    ) -> None:
        delta = self._by_example(gradient.detach(), rows)
        if "output_gradients" in self.kinds:
            flat = self.robust(delta, rows.mask if isinstance(rows, RoutedRows) else rows).flatten(0, 1)
            if target.of_vocabulary:
                self._add("output_gradients", target.name, flat.square().sum(0))
            else:
                self._add_gram("output_gradients", target.name, flat)
        if x is None:
            return
        if target.repeated:
            self.calls[target][call] = x, delta
        else:
            self._add_by_weight(target, x, delta)

    def _count_call(self, target: Target) -> int:
        """Count a call of `target` and return the call's number in this batch, from 0."""
        calls = self.calls.setdefault(target, [])
        if calls and not target.repeated:
            raise ValueError(f"{target.name}: its forward ran again for the same batch; exclude this target")
        calls.append(None)
        return len(calls) - 1

    def join_calls(self) -> None:
        """Add the gradients by weights of targets that ran several times, after the backward pass through all calls."""
        for target, calls in self.calls.items():
            if pairs := [pair for pair in calls if pair is not None]:
                self._add_by_weight(target, *(torch.cat(parts, 1) for parts in zip(*pairs, strict=True)))
            self.calls[target] = [None] * len(calls)

    def _add_by_weight(self, target: Target, x: Tensor, delta: Tensor) -> None:
        module = self.modules[target]
        if "gradients" in self.kinds:
            self._add("gradients", target.name, gradient_sum(x, delta, target.in_features, is_embedding(module)))
        if not self.squares:
            return
        sums = (lookup_sums if is_embedding(module) else square_sums)(x, delta, weight_of(module), self.squares)
        for kind, (by_input, by_output) in sums.items():
            self._add(kind, f"{target.name}.input", by_input)
            self._add(kind, f"{target.name}.output", by_output)

    def _rows(self, target: Target, shape: Sequence[int]) -> Tensor | RoutedRows | None:
        """Return which of the inputs of a call of `target` are not padding: a mask, or None if there is no padding.

        Args:
            shape: shape of the inputs, without the features.
        """
        call = self._count_call(target)
        if not target.routed_by:
            return self._token_mask(target, shape, call)
        size, count = batch_size(self.batch), self.routed.count(target)
        shape = (count,) if count % size else (size, count // size)
        return self.routed.rows(target, size, self._token_mask(target, shape, call))

    def _token_mask(self, target: Target, shape: Sequence[int], call: int) -> Tensor | None:
        """Return the padding mask `(batch, tokens)` of a call's inputs, or None if they have no padding.

        Args:
            shape: shape of the inputs, without the features.
            call: number of the call in this batch, from 0.
        """
        size, masks = batch_size(self.batch), masks_of(self.batch)
        mask = self.batch.get(target.mask) if target.mask and masks else None
        if target.mask and masks and target.mask not in masks:
            raise ValueError(f"{target.name}: the batch has no {target.mask}: add it, 0 where a token is padding")
        whole = mask is None or len(shape) == 1 or shape[0] in (size, math.prod(mask.shape[:-1]))
        if shape[0] % size or not whole:
            raise ValueError(
                f"{target.name}: inputs of {tuple(shape)} cannot be split into {size} examples; exclude this target"
            )
        tokens = math.prod(shape) // size
        if mask is None:
            self._check_tokens(target, tokens, len(shape) == 1)
            return None
        mask = mask.flatten(1)
        if target.repeated and tokens == 1:  # a recurrent cell: its calls are the tokens, in their order
            mask = mask[:, call : call + 1]
        if mask.shape != (size, tokens):
            raise ValueError(
                f"{target.name}: {tokens} tokens per example, but {target.mask} has {mask.shape[1]}, so it does not "
                "show the padding: exclude this target, or pad batches as the model itself pads them"
            )
        return None if bool(mask.all()) else mask

    def _check_tokens(self, target: Target, tokens: int, flat: bool) -> None:
        """Check that a target without a mask has the same number of tokens per example in all batches.

        Only batches with masks are checked, or all batches if the target's inputs are `flat`: the tokens of all
        examples are in one dimension, as for a router's expert. A single example without padding may have any number:
        its picture has more patches than another one's.
        """
        first = self.tokens_per_example.setdefault(target.name, tokens)
        if first == tokens or not (masks_of(self.batch) or flat):
            return
        masks = [values for name, values in self.batch.items() if name.endswith((ATTENTION, PICTURES))]
        if batch_size(self.batch) > 1 or not all(bool(mask.all()) for mask in masks):
            raise ValueError(
                f"{target.name}: {first} inputs per example of one batch and {tokens} of another, which belong to no "
                "mask; exclude this target"
            )

    def _by_example(self, values: Tensor, rows: Tensor | RoutedRows | None) -> Tensor:
        """Return `values` as `(batch, tokens, features)`, zero at padding; floats become at least float32."""
        if values.is_floating_point():
            values = at_least_float32(values)
        if isinstance(rows, RoutedRows):
            return rows.by_example(values)
        values = values.reshape(batch_size(self.batch), -1, values.shape[-1])
        return values if rows is None else values.masked_fill(rows.unsqueeze(-1) == 0, 0)

    def _add(self, kind: str, key: str, value: Tensor) -> None:
        sums = self.sums.setdefault(kind, {})
        sums[key] = sums[key].add_(value) if key in sums else value

    def _add_gram(self, kind: str, key: str, rows: Tensor) -> None:
        """Add XᵀX for X = `rows` to the upper triangle of a sum; `finish` fills in the lower triangle."""
        sums = self.sums.setdefault(kind, {})
        if key not in sums:
            sums[key] = rows.new_zeros(rows.shape[1], rows.shape[1])
        add_gram(sums[key], rows)

    def finish(self) -> Statistics:
        """Return the statistics: the sums over all batches ÷ the number of examples.

        Raises:
            ValueError: there was no example, a statistic is not finite, a target saw no token, or it has gradients
                only at edges, which do not count.
        """
        if not self.examples:
            raise ValueError(
                "there are no calibration examples: give some (in params.yaml: raise data.sizes.calibration)"
            )
        for name, value in self.sums.get("output_gradients", {}).items() if self.robust.edges else ():
            if not value.any():
                raise ValueError(
                    f"{name} has no gradient but at the edges of examples, as in a classifier that reads the first "
                    "token: set edges to 0, or exclude this target"
                )
        self._fill_missing()
        for kind, sums in self.sums.items():
            for key, value in sums.items():
                if kind in ("inputs", "output_gradients") and value.ndim == 2:
                    mirror(value)
                edges = torch.stack(value.div_(self.examples).aminmax())  # isfinite of all values would take a copy
                if not torch.isfinite(edges).all():
                    raise ValueError(f"{kind} of {key} is not finite: the model overflows on the calibration data")
                if kind == "tokens" and not value:
                    raise ValueError(f"{key} reads no token: the mask of the calibration data is 0 everywhere")
        return self.sums

    def _fill_missing(self) -> None:
        """Set gradient statistics to zero for targets that got no gradient, such as a pooler that the head ignores."""
        for target, module in self.modules.items():
            if target.routed_by and target.name not in self.routed.reached:
                continue  # no token reached the expert, which therefore has no statistics at all
            parameter = next(module.parameters())
            device = "cpu" if parameter.is_meta else parameter.device
            empty = torch.empty(0, device=device, dtype=sum_dtype(parameter))
            if "output_gradients" in self.kinds:
                sides = 1 if target.of_vocabulary else 2
                self.sums["output_gradients"].setdefault(target.name, empty.new_zeros([target.out_features] * sides))
            if "gradients" in self.kinds:
                shape = target.out_features, target.in_features
                self.sums["gradients"].setdefault(target.name, empty.new_zeros(shape))
            for kind in self.squares:
                self.sums[kind].setdefault(f"{target.name}.input", empty.new_zeros(target.in_features))
                self.sums[kind].setdefault(f"{target.name}.output", empty.new_zeros(target.out_features))
