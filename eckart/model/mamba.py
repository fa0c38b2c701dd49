"""Mamba and Mamba-2 with a head for one answer per text; transformers has them as language models only.

SoftLM classifies with Mamba-130M (Bhatnagar et al., 2024, table 3). Its targets are `in_proj` and `out_proj` of every
block, and in Mamba the small `x_proj`. Mamba's `dt_proj` is not a target: its weight is used without its `forward`.

Importing this module registers the classes, so that AutoModelForSequenceClassification can load them.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    Mamba2Config,
    Mamba2Model,
    Mamba2PreTrainedModel,
    MambaConfig,
    MambaModel,
    MambaPreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.utils.generic import can_return_tuple


class _Classifier(PreTrainedModel):
    """Base class of classifiers: logits are a linear function of the last hidden state at a text's last token.

    The state at that token, the last that is not padding, has read the whole text. Padding may be on either side. The
    backbone reads zeros there, so logits do not depend on padding; with biases (`use_bias` of the config) this needs
    padding on the right.
    """

    backbone_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.backbone = self.backbone_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)  # type: ignore[arg-type]
        self.post_init()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but the mixers, which have nothing that depends on it but a fused kernel.

        In train mode, and with the package mamba-ssm, that kernel reads the weights of projections without calling
        them, so it would bypass their hooks and factors.
        """
        super().train(mode)
        for module in self.modules():
            if isinstance(module, MambaMixer | Mamba2Mixer):
                module.eval()
        return self

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Return logits `(batch, labels)`, and the loss if there are labels.

        Args:
            input_ids: `(batch, tokens)`, or `inputs_embeds` `(batch, tokens, hidden)` in their place.
            attention_mask: `(batch, tokens)`, 0 where a token is padding; None if none is.
            labels: `(batch,)` classes or numbers, or `(batch, labels)` of 0 and 1, as the config's problem_type says.
        """
        outputs = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            use_cache=False,
            return_dict=True,
        )
        states = outputs.last_hidden_state.to(self.score.weight.dtype)  # with residual_in_fp32 they are float32
        logits = self.score(states[torch.arange(len(states), device=states.device), _last(attention_mask, states)])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def _last(mask: Tensor | None, states: Tensor) -> Tensor:
    """Return the position of each text's last token that is not padding, `(batch,)`."""
    rows, tokens = states.shape[:2]
    places = torch.arange(tokens, device=states.device).expand(rows, tokens)
    return (places if mask is None else places * mask.bool()).argmax(1)


class MambaForSequenceClassification(_Classifier, MambaPreTrainedModel):
    """Mamba with one answer per text: a class, several classes or a number."""

    config_class = MambaConfig
    backbone_class = MambaModel


class Mamba2ForSequenceClassification(_Classifier, Mamba2PreTrainedModel):
    """Mamba-2 with one answer per text: a class, several classes or a number."""

    config_class = Mamba2Config
    backbone_class = Mamba2Model


for _family in (MambaForSequenceClassification, Mamba2ForSequenceClassification):
    # exist_ok: transformers may get such a class itself; what was saved with ours must still load
    AutoModelForSequenceClassification.register(_family.config_class, _family, exist_ok=True)
