"""The layers that take a factorized target's place."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Layer = TypeVar("Layer", bound="LowRankMap")


class LowRankMap(nn.Module):
    """y = x Ŵᵀ + bias with Ŵ of low rank: x `(…, in)` → `(…, out)`. How Ŵ is stored is a subclass's.

    Its parts are parameters, not Linear modules: no code that looks for linear maps mistakes them for such.
    """

    right: nn.Parameter
    """`(rank, in)`."""
    bias: nn.Parameter | None
    transposed = False
    """Whether the dense module is a Conv1D, which the architecture asks for where `merge` puts it back."""

    @staticmethod
    def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """x matrixᵀ + bias `(…, n)` for a matrix `(n, in)`."""
        return linear(x, matrix, bias)

    @property
    def rank(self) -> int:
        return self.right.shape[0]

    @property
    def dense_bias(self) -> Tensor | None:
        """`(out,)`."""
        return self.bias

    @property
    def out_features(self) -> int:
        """As a Linear's: some models look at it to draw their first weights."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """As a Linear's."""
        return self.shape[1]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Ŵ `(out, in)`."""

    @property
    def weight(self) -> Tensor:
        """Memory of the dense weight's shape, unfilled: models look at its type and place in every forward (T5 does).

        Ŵ itself would cost more than the forward. No target is a map whose weight is used for more
        (eckart/model/targets.py).
        """
        return self.right.new_empty(self.shape[::-1] if self.transposed else self.shape)


class LowRankLinear(LowRankMap):
    """y = (x rightᵀ) leftᵀ + bias: x `(…, in)` → `(…, rank)` → `(…, out)`.

    With a residual, y[rows] += x residualᵀ: some outputs get a row of a matrix of full rank besides (LoSparse, eq. 5).
    """

    rows: Tensor | None

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool, rows: int = 0) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(out_features, rank))
        self.right = nn.Parameter(torch.empty(rank, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.residual = nn.Parameter(torch.empty(rows, in_features)) if rows else None
        self.register_buffer("rows", torch.arange(rows) if rows else None)
        self.gate: Tensor | None = None
        """`(rank,)` that scales the components while a search trains; never saved."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), self.right.shape[1]

    def dense(self) -> Tensor:
        weight = (self.left if self.gate is None else self.left * self.gate) @ self.right
        return weight if self.residual is None or self.rows is None else weight.index_add(0, self.rows, self.residual)

    def forward(self, x: Tensor) -> Tensor:
        components = self.project(x, self.right)
        if self.gate is not None:
            components = components * self.gate
        y = linear(components, self.left, self.bias)
        if self.residual is None or self.rows is None:
            return y
        return y.index_add(-1, self.rows, self.project(x, self.residual))


class PivotedLinear(LowRankMap):
    """Factors of which the left is stored without the identity in it: x `(…, in)` → `(…, rank)` → `(…, out)`.

    `right` are rows of Ŵ itself, its pivots, and `others` `(out − rank, rank)` what its other rows are of these
    (eckart/factorization/pivoted_storage.py).
    """

    places: Tensor
    """Where each output stands among the pivots and, behind them, the others `(out,)`."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.others = nn.Parameter(torch.empty(out_features - rank, rank))
        self.right = nn.Parameter(torch.empty(rank, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_buffer("places", torch.arange(out_features, dtype=torch.int32))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.places), self.right.shape[1]

    def left(self) -> Tensor:
        """`(out, rank)`: the pivots' rows are those of the identity."""
        identity = torch.eye(self.rank, dtype=self.others.dtype, device=self.others.device)
        return torch.cat([identity, self.others]).index_select(0, self.places)

    def dense(self) -> Tensor:
        return torch.cat([self.right, self.others @ self.right]).index_select(0, self.places)

    def forward(self, x: Tensor) -> Tensor:
        pivots = self.project(x, self.right)
        if torch.compiler.is_compiling() or pivots.shape[:-1].numel() > self.rank:  # a graph for any number is for many
            return linear(pivots, self.left(), self.bias)  # puts rows into order, where outputs would be more numbers
        y = torch.cat([pivots, linear(pivots, self.others)], -1).index_select(-1, self.places)
        return y if self.bias is None else y + self.bias


class _OfIds(LowRankMap):
    """x are one-hot rows, given by their ids `(…,)`: y `(…, out)` is a row of the vocabulary, which is in.

    W `(out, in)` is the transpose of what an embedding stores. The row of a padding token is what the parts make it.
    """

    @staticmethod
    def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Columns of a matrix `(n, in)` by ids: `(…, n)`."""
        columns = embedding(x, matrix.T)
        return columns if bias is None else columns + bias


class LowRankEmbedding(_OfIds, LowRankLinear):
    """Factors in place of an embedding."""


class PivotedEmbedding(_OfIds, PivotedLinear):
    """Pivots in place of an embedding."""


class TiedHead(nn.Module):
    """The head with the weight of an embedding, in that one's factors: x `(…, out)` → `(…, rank)` → `(…, in)`.

    The factors are the embedding's parameters and no others, so nothing has to be tied.
    """

    transposed = False

    def __init__(self, embedding: LowRankEmbedding, bias: bool) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, which hides it from parameters() and state_dict()
        self.bias = nn.Parameter(embedding.right.new_empty(embedding.right.shape[1])) if bias else None

    @property
    def embedding(self) -> LowRankEmbedding:
        return self._embedding[0]

    @property
    def weight(self) -> Tensor:
        """As that of a LowRankMap."""
        out_features, in_features = self.embedding.shape
        return self.embedding.right.new_empty(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        left, right, gate = self.embedding.left, self.embedding.right, self.embedding.gate
        components = linear(x, left.T)
        return linear(components if gate is None else components * gate, right.T, self.bias)


class HeadRows(nn.Module):
    """The first outputs of each head, and zeros at the others.

    x `(…, in)` → `(…, heads · rank)` → `(…, heads · width)`.
    For maps whose outputs meet in inner products alone (eckart/model/attention_products.py), to which zeros add
    nothing.
    """

    def __init__(self, in_features: int, out_features: int, heads: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.width = out_features // heads
        self.factor = nn.Parameter(torch.empty(heads * rank, in_features))
        self.bias = nn.Parameter(torch.empty(heads * rank)) if bias else None

    transposed = False

    @property
    def rank(self) -> int:
        return len(self.factor) // self.heads

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return self.heads * self.width, self.factor.shape[1]

    @property
    def dense_bias(self) -> Tensor | None:
        """`(out,)`."""
        return None if self.bias is None else self._spread(self.bias[:, None])[:, 0]

    @property
    def out_features(self) -> int:
        """As a Linear's."""
        return self.heads * self.width

    @property
    def in_features(self) -> int:
        """As a Linear's."""
        return self.factor.shape[1]

    def dense(self) -> Tensor:
        """Ŵ `(out, in)`, with rows of zeros."""
        return self._spread(self.factor)

    def _spread(self, rows: Tensor) -> Tensor:
        """`(heads · rank, n)` → `(heads · width, n)`."""
        return pad(rows.unflatten(0, (self.heads, self.rank)), (0, 0, 0, self.width - self.rank)).flatten(0, 1)

    @property
    def weight(self) -> Tensor:
        """As that of a LowRankLinear."""
        return self.factor.new_empty(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.factor, self.bias).unflatten(-1, (self.heads, self.rank))
        return pad(y, (0, self.width - self.rank)).flatten(-2)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """`(out, in)` of a Linear, a Conv1D, an Embedding or what took its place."""
    if isinstance(module, LowRankMap):
        return module.shape
    if isinstance(module, Conv1D):
        columns, rows = module.weight.shape
        return rows, columns
    if isinstance(module, nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    return module.out_features, module.in_features  # type: ignore[return-value]


def low_rank_like(module: nn.Module, rank: int, rows: int = 0) -> LowRankLinear:
    """An unfilled low-rank layer of `rank` with the shape, bias, type and device of a Linear, Conv1D or Embedding."""
    return _like(module, LowRankEmbedding if _reads_ids(module) else LowRankLinear, rank=rank, rows=rows)


def pivoted_like(module: nn.Module, rank: int) -> PivotedLinear:
    """The same as a pivoted layer; also of a module whose place a low-rank layer took, from that."""
    return _like(module, PivotedEmbedding if _reads_ids(module) else PivotedLinear, rank=rank)


def _like(module: nn.Module, kind: type[Layer], **sizes: int) -> Layer:
    out_features, in_features = shape_of(module)
    like = module.right if isinstance(module, LowRankMap) else module.get_parameter("weight")
    with torch.device(like.device):
        layer = kind(in_features, out_features, bias=getattr(module, "bias", None) is not None, **sizes)
    layer.transposed = isinstance(module, Conv1D) or getattr(module, "transposed", False)
    return layer.to(like.dtype)


def _reads_ids(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | _OfIds)


def head_rows_like(module: nn.Module, heads: int, rank: int) -> HeadRows:
    """An unfilled layer of `rank` a head with the shape, bias, type and device of a Linear or Conv1D."""
    out_features, in_features = shape_of(module)
    weight = module.get_parameter("weight")
    with torch.device(weight.device):
        layer = HeadRows(in_features, out_features, heads, rank, bias=getattr(module, "bias", None) is not None)
    layer.transposed = isinstance(module, Conv1D)
    return layer.to(weight.dtype)


def replace(model: PreTrainedModel, name: str, layer: nn.Module) -> None:
    """Put `layer` where the module `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def factorize_target(
    model: PreTrainedModel, name: str, left: Tensor, right: Tensor, residual: Tensor | None = None
) -> LowRankLinear:
    """Replace the target `name` by the factors left `(out, rank)` and right `(rank, in)`; its bias is kept.

    Args:
        residual: `(out, in)`, added to their product.

    Raises:
        ValueError: a device map left the target on the CPU or the disk.
    """
    module = present(model, name)
    layer = low_rank_like(module, right.shape[0], 0 if residual is None else len(residual))
    with torch.no_grad():
        layer.left.copy_(left)
        layer.right.copy_(right)
        if layer.bias is not None:
            layer.bias.copy_(module.get_parameter("bias"))
        if layer.residual is not None and residual is not None:
            layer.residual.copy_(residual)
    replace(model, name, layer)
    return layer


def tie_head(model: PreTrainedModel, name: str, embedding: str) -> TiedHead:
    """Replace the head `name` by one in the factors of `embedding`, which has factors already; its bias is kept."""
    layer = model.get_submodule(embedding)
    assert isinstance(layer, LowRankEmbedding)
    bias = getattr(model.get_submodule(name), "bias", None)
    head = TiedHead(layer, bias is not None)
    if bias is not None and head.bias is not None and not bias.is_meta:
        with torch.no_grad():
            head.bias.copy_(bias)
    replace(model, name, head)
    _say_tied(model, False)  # of weights there are none
    return head


def present(model: PreTrainedModel, name: str) -> nn.Module:
    """The module `name`, whose weight can be read and replaced.

    Raises:
        ValueError: a device map left it on the CPU or the disk.
    """
    module = model.get_submodule(name)
    if module.get_parameter("weight").is_meta:
        raise ValueError(
            f"{name} waits on the CPU or the disk, where it cannot be replaced: use no device map for this"
        )
    return module


def set_weight(module: nn.Module, weight: Tensor) -> None:
    """Make `weight` `(out, in)` the weight of a Linear, a Conv1D or an Embedding."""
    with torch.no_grad():
        module.get_parameter("weight").copy_(weight.T if isinstance(module, Conv1D | nn.Embedding) else weight)


def merge(model: PreTrainedModel, name: str) -> nn.Module:
    """Replace the factorized target `name` by the dense module of the architecture, with Ŵ for its weight.

    Raises:
        ValueError: the target is not factorized.
    """
    layer = model.get_submodule(name)
    if not isinstance(layer, LowRankMap | HeadRows):
        raise ValueError(f"{name} is not factorized, so there is nothing to merge: leave it out")
    with torch.device("meta"):  # draws no random weights
        module = _dense(layer)
    weight, bias = layer.dense(), layer.dense_bias
    module = module.to_empty(device=weight.device).to(weight.dtype).train(layer.training)
    set_weight(module, weight)
    if bias is not None:
        with torch.no_grad():
            module.get_parameter("bias").copy_(bias)
    for head, owner in tied_heads(model).items():
        if owner == name:
            _untie(model, head, module)
    replace(model, name, module)
    return module


def _untie(model: PreTrainedModel, name: str, embedding: nn.Module) -> None:
    """Give the head `name` the weight of the dense `embedding`."""
    weight, bias = embedding.get_parameter("weight"), model.get_submodule(name).bias
    rows, columns = weight.shape
    with torch.device("meta"):
        head = nn.Linear(columns, rows, bias=bias is not None)
    head.weight, head.bias = weight, bias  # type: ignore[assignment]
    replace(model, name, head)
    _say_tied(model, True)


def _say_tied(model: PreTrainedModel, tied: bool) -> None:
    """In the config, and where that has one of the text in it, in both."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = tied


def _dense(layer: LowRankMap | HeadRows) -> nn.Module:
    out_features, in_features = layer.shape
    if _reads_ids(layer):
        return nn.Embedding(in_features, out_features)
    if layer.transposed:
        return Conv1D(out_features, in_features)
    return nn.Linear(in_features, out_features, bias=layer.bias is not None)


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """Name → layer of every target in `model` that is stored as factors."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LowRankLinear)}


def factorized(model: nn.Module) -> dict[str, int]:
    """Name → rank of every factorized map in `model`; that of a head where it is one of a product."""
    kinds = LowRankMap | HeadRows
    return {name: layer.rank for name, layer in model.named_modules() if isinstance(layer, kinds)}


def pivoted(model: nn.Module) -> list[str]:
    """Names of the factorized targets in `model` that are stored as pivots."""
    return [name for name, layer in model.named_modules() if isinstance(layer, PivotedLinear)]


def head_counts(model: nn.Module) -> dict[str, int]:
    """Name → heads of every map of a factorized product in `model`."""
    return {name: layer.heads for name, layer in model.named_modules() if isinstance(layer, HeadRows)}


def tied_heads(model: nn.Module) -> dict[str, str]:
    """Name of each head in an embedding's factors → name of that embedding."""
    names = {module: name for name, module in model.named_modules()}
    return {name: names[head.embedding] for head, name in names.items() if isinstance(head, TiedHead)}


def residual_rows(model: nn.Module) -> dict[str, int]:
    """Name → rows of the residual of every factorized target that has one."""
    return {name: len(layer.rows) for name, layer in low_rank_layers(model).items() if layer.rows is not None}
