"""An LSTM language model made of nn.Linear layers, as an ordinary Hugging Face model that can be compressed.

`torch.nn.LSTM` runs all of its weights in one kernel, in which no layer can be hooked or replaced. Here an LSTM layer
has two `nn.Linear`: `input_map` `(4 hidden, in)` runs once over the whole sequence, `hidden_map` `(4 hidden, hidden)`
runs once for each token. DRONE compresses these matrices and the softmax layer `lm_head` `(vocabulary, hidden)` of a
language model of Penn Treebank (section 4 and appendix D.1). The sizes of that model are the defaults.

Importing this module registers the model, so that AutoModelForCausalLM can load it.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils.generic import can_return_tuple


class LSTMConfig(PreTrainedConfig):
    """The configuration of an LSTM language model.

    Attributes:
        bias: whether the linear layers of an LSTM layer have biases.
        head_bias: whether the softmax layer has a bias.
        dropout: dropout probability on the inputs of each LSTM layer and of the softmax layer, never on the state
            (Zaremba et al. 2014).
        tie_word_embeddings: whether the softmax layer shares the embedding's weight. This needs embedding_size equal to
            hidden_size.
        use_cache: must stay false: no state is kept, so `generate` reads the whole text again for each token.
    """

    model_type = "eckart_lstm"

    vocab_size: int = 10000
    embedding_size: int = 1500
    hidden_size: int = 1500
    num_hidden_layers: int = 2
    bias: bool = True
    head_bias: bool = True
    dropout: float = 0.65
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool = False


class LSTMLayer(nn.Module):
    """One LSTM layer, with gates in torch's order: input, forget, cell, output.

    The bias of `input_map` is b_ih in torch.nn.LSTM, and the bias of `hidden_map` is b_hh.
    """

    def __init__(self, in_features: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.input_map = nn.Linear(in_features, 4 * hidden, bias=bias)
        self.hidden_map = nn.Linear(hidden, 4 * hidden, bias=bias)

    def forward(self, x: Tensor, carries: Tensor | None) -> Tensor:
        """Run the layer over a sequence, x `(batch, tokens, in)` → `(batch, tokens, hidden)`.

        The operations have the same order as in torch's kernel.

        Args:
            carries: `(batch, tokens, 1)`; 1 if a token continues from the state before it, 0 if the token starts from a
                state of zeros. None if all tokens continue.
        """
        inputs = self.input_map(x).unbind(1)
        hidden = cell = x.new_zeros(len(x), self.hidden_size)
        outputs = []
        for token, gates in enumerate(inputs):
            if carries is not None:
                hidden, cell = hidden * carries[:, token], cell * carries[:, token]
            enter, forget, new, leave = (gates + self.hidden_map(hidden)).chunk(4, -1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class LSTMPreTrainedModel(PreTrainedModel):
    """Common base class of the LSTM models."""

    config_class = LSTMConfig
    base_model_prefix = "model"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights uniformly within ±1/√hidden, like `torch.nn.LSTM`; (choice) also for embedding and head."""
        if isinstance(module, nn.Linear | nn.Embedding):
            bound = self.config.hidden_size**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)


class LSTMModel(LSTMPreTrainedModel):
    """The LSTM model without its head: the embedding and the LSTM layers."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        widths = [config.embedding_size] + [config.hidden_size] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(LSTMLayer(width, config.hidden_size, config.bias) for width in widths)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the outputs of the last layer, and on request the embeddings and each layer's outputs, before dropout.

        Args:
            input_ids, attention_mask: `(batch, tokens)`. Padding may be on either side: no state passes through padding
                tokens, so the outputs at real tokens do not depend on them.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.embed_tokens(input_ids)
        carries = _carries(attention_mask, x.dtype)
        states = [x]
        for layer in self.layers:
            states.append(layer(self.dropout(states[-1]), carries))
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if output_hidden_states else None,
        )


def _carries(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return for each token 1 if neither it nor the token before it is padding, else 0, `(batch, tokens, 1)`.

    None if there is no padding.
    """
    if mask is None or bool(mask.all()):
        return None
    real = mask.bool()
    before = torch.nn.functional.pad(real[:, :-1], (1, 0), value=True)  # the first state is zero anyway
    return (real & before).unsqueeze(-1).to(dtype)


class LSTMForCausalLM(LSTMPreTrainedModel, GenerationMixin):
    """A causal LSTM language model: the logits at a token predict the next token. Every text starts from a zero state.

    Raises:
        ValueError: the configuration ties the embedding to the head, but embedding_size differs from hidden_size.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LSTMConfig) -> None:
        if config.tie_word_embeddings and config.embedding_size != config.hidden_size:
            raise ValueError(
                f"tie_word_embeddings needs one width, but embedding_size is {config.embedding_size} and hidden_size "
                f"is {config.hidden_size}: make them equal or untie"
            )
        super().__init__(config)
        self.model = LSTMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Return logits `(batch, tokens, vocabulary)`, and the loss if there are labels.

        Args:
            input_ids, attention_mask: as in `LSTMModel`.
            labels: `(batch, tokens)`, the same as `input_ids`; the loss shifts them by one and ignores -100.
            options: arguments of the loss, as the Trainer passes them.
        """
        outputs = self.model(input_ids, attention_mask, output_hidden_states=output_hidden_states, return_dict=True)
        logits = self.lm_head(self.model.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    @classmethod
    def from_torch(cls, embedding: nn.Embedding, lstm: nn.LSTM, head: nn.Linear) -> Self:
        """Convert the torch model `head(lstm(embedding(input_ids))[0])` to this class, in eval mode, weights copied.

        The logits are the same up to rounding, because oneDNN and cuDNN add in another order. The dropout probability
        of `lstm` is kept, but dropout here also applies to the inputs of the first layer and of the head.

        Args:
            embedding: embedding with a weight `(vocabulary, in)`.
            lstm: LSTM `(…, in)` → `(…, hidden)`, in one direction and without projection.
            head: head `(…, hidden)` → `(…, vocabulary)`. A weight shared with the embedding stays shared.

        Raises:
            ValueError: the parts do not fit together, or have a feature that this class lacks.
        """
        _check(embedding, lstm, head)
        tied = head.weight is embedding.weight
        config = LSTMConfig(
            vocab_size=embedding.num_embeddings,
            embedding_size=lstm.input_size,
            hidden_size=lstm.hidden_size,
            num_hidden_layers=lstm.num_layers,
            bias=lstm.bias,
            head_bias=head.bias is not None,
            dropout=lstm.dropout,
            tie_word_embeddings=tied,
            pad_token_id=embedding.padding_idx,
        )
        weights = {"model.embed_tokens.weight": embedding.weight}
        weights |= {f"lm_head.{name}": parameter for name, parameter in head.named_parameters()}
        for name, parameter in lstm.named_parameters():  # weight_ih_l0 and so on
            kind, which, layer = name.split("_")
            part = {"ih": "input_map", "hh": "hidden_map"}[which]
            weights[f"model.layers.{layer.removeprefix('l')}.{part}.{kind}"] = parameter
        with torch.device("meta"):  # draws no random weights
            model = cls(config)
        model.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()}, assign=True)
        model.tie_weights()
        return model.eval()


def _check(embedding: nn.Embedding, lstm: nn.LSTM, head: nn.Linear) -> None:
    if not isinstance(lstm, nn.LSTM):
        raise ValueError(f"the LSTM is a {type(lstm).__name__}: give an nn.LSTM")
    if lstm.bidirectional:
        raise ValueError(
            "the LSTM is bidirectional, but a causal language model only reads forward: give one that does"
        )
    if lstm.proj_size:
        raise ValueError(f"the LSTM projects its outputs to {lstm.proj_size}: give one with proj_size=0")
    if embedding.max_norm is not None:
        raise ValueError("the embedding changes its weights when it runs: give one with max_norm=None")
    if embedding.embedding_dim != lstm.input_size:
        raise ValueError(
            f"the embedding gives {embedding.embedding_dim} features, but the LSTM reads {lstm.input_size}: give parts "
            "of one model"
        )
    if (head.in_features, head.out_features) != (lstm.hidden_size, embedding.num_embeddings):
        raise ValueError(
            f"the head maps {head.in_features} features to {head.out_features} tokens, but the LSTM gives "
            f"{lstm.hidden_size} and the vocabulary has {embedding.num_embeddings}: give parts of one model"
        )


AutoConfig.register(LSTMConfig.model_type, LSTMConfig)
AutoModel.register(LSTMConfig, LSTMModel)
AutoModelForCausalLM.register(LSTMConfig, LSTMForCausalLM)
