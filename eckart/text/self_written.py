"""Text that a causal language model writes itself, to calibrate it with.

Such text belongs to nobody's domain, needs no data, and there is as much of it as one likes. At temperature 1 each
label in it is drawn from the model's own prediction, so that gradients of its loss give the true Fisher information, as
`importance.labels: drawn` does.

- Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", Findings of ACL 2024,
  arXiv 2305.17888, section 2.1: text from the model itself, from a random first token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from eckart.model.batches import Batch
from eckart.model.module_context import eval_mode
from eckart.model.positions import longest_text
from eckart.progress import Progress, bar
from eckart.text.generation import special_tokens, with_settings

First = Literal["bos", "random"]
"""First token of a document: the token with which the model's texts begin, or any token of its vocabulary."""


@torch.no_grad()  # and not in inference mode, whose tensors no gradient can be computed from
def write_text(
    model: PreTrainedModel,
    examples: int,
    length: int,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    first: First = "random",
    temperature: float = 1.0,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress = bar,
) -> list[Batch]:
    """Let a causal language model write blocks of text, as batches for `eckart.compress`.

    Each block starts with a document. After an end-of-text token the next document starts in the same block, as in the
    packed text that models are trained with. Other settings for generation that the model came with are not used.

    Args:
        model: any model of `AutoModelForCausalLM`, on any device.
        examples: number of blocks.
        length: tokens of a block.
        prompts: beginnings of documents, as token ids: each document starts with one of them, drawn at random.
        first: first token of each document, if there are no prompts. random: any token of the vocabulary, with equal
            probabilities. bos: the beginning-of-text token; where the model has none, the end-of-text token. Many chat
            models were never trained to predict what follows it, so that they begin with scraps.
        temperature: the logits are divided by it: below 1, the text is more predictable than the model's.
        batch_size: blocks that are written at the same time.
        seed: seed of all draws. The same arguments give the same text on one machine. Torch's global random state is
            neither read nor changed.
        progress: function that shows progress.

    Returns:
        Batches of `input_ids`, `attention_mask` and `labels` `(batch, length)`, on the CPU. A block includes the
        prompts and first tokens, and the labels are the ids.

    Raises:
        ValueError: the model cannot write, the block is longer than the model's positions, the temperature is not
            above 0, there is nothing to write, a prompt is empty, too long or has a token that the model lacks, or the
            documents have no beginning.
    """
    _check(model, length, temperature)
    if min(examples, batch_size) < 1:
        raise ValueError(f"examples={examples} and batch_size={batch_size}: give whole numbers above 0")
    generator = torch.Generator().manual_seed(seed)
    draws = _Draws(
        _beginnings(model, prompts, first, length, generator), special_tokens(model, "eos_token_id"), temperature, seed
    )
    sizes = [min(batch_size, examples - start) for start in range(0, examples, batch_size)]
    batches: list[Batch] = []
    device = "cpu" if model.device.type == "meta" else model.device
    settings = GenerationConfig(max_new_tokens=length - 1, use_cache=model.generation_config.use_cache)
    with eval_mode(model):
        writer = with_settings(model, settings)
        for size in progress(sizes, "text", "batch"):
            start = draws.start(size, length).to(device)
            written = writer.generate(  # type: ignore[operator]
                input_ids=start, attention_mask=torch.ones_like(start), logits_processor=LogitsProcessorList([draws])
            )
            ids = written.cpu()
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return batches


class _Draws(LogitsProcessor):
    """Draws each next token, and leaves `generate` no other choice.

    `generate` itself would draw with the global random state, and would fill a block with padding after an end of text.
    """

    def __init__(
        self, beginning: Callable[[], list[int]], ends: Collection[int], temperature: float, seed: int
    ) -> None:
        self.beginning, self.temperature, self.seed = beginning, temperature, seed
        self.ends = torch.tensor([*ends], dtype=torch.long)
        self.generator: torch.Generator | None = None

    def start(self, size: int, length: int) -> Tensor:
        """Return the first token of each of `size` new blocks, `(size, 1)`."""
        self.given = torch.full((size, length), -1)  # tokens of beginnings, which are not drawn; -1 elsewhere
        for row in range(size):
            self._begin(row, 0)
        return self.given[:, :1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Change the scores `(batch, vocabulary)` so that they are finite for one token only, the next one."""
        if self.generator is None:
            self.generator = torch.Generator(scores.device).manual_seed(self.seed)
        position = input_ids.shape[1]
        chances = (scores / self.temperature).softmax(-1)
        drawn = chances.multinomial(1, generator=self.generator)[:, 0].cpu()
        given = self.given[:, position]
        for row in (torch.isin(drawn, self.ends) & (given < 0)).nonzero()[:, 0].tolist():
            self._begin(row, position + 1, after=int(drawn[row]))
        tokens = torch.where(given < 0, drawn, given).to(scores.device)
        return scores.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)

    def _begin(self, row: int, position: int, after: int | None = None) -> None:
        """Let a document begin at a position. `after` is the token before, which some models begin texts with, too."""
        beginning = self.beginning()
        if beginning[0] == after:
            beginning = beginning[1:]
        part = beginning[: self.given.shape[1] - position]
        self.given[row, position : position + len(part)] = torch.tensor(part, dtype=torch.long)


def _check(model: PreTrainedModel, length: int, temperature: float) -> None:
    if model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(f"{type(model).__name__} writes no text: load the model with AutoModelForCausalLM")
    if length < 2:
        raise ValueError(f"length is {length}, which leaves no token to write: give at least 2")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: give a number above 0")
    positions = longest_text(model)
    if positions is not None and length > positions:
        raise ValueError(f"length is {length}, but the model has {positions} positions: lower it")


def _beginnings(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]] | None,
    first: First,
    length: int,
    generator: torch.Generator,
) -> Callable[[], list[int]]:
    """Return a function that draws the first tokens of a document."""

    def below(number: int) -> int:
        return int(torch.randint(number, (), generator=generator))

    if prompts is not None:
        given = [[int(token) for token in prompt] for prompt in prompts]
        if not given or not all(0 < len(prompt) < length for prompt in given):
            raise ValueError(f"prompts need 1 to {length - 1} tokens, fewer than the blocks: change them or length")
        words = model.config.get_text_config().vocab_size
        if not all(0 <= token < words for prompt in given for token in prompt):
            raise ValueError(f"prompts have a token that is not in 0 … {words - 1}: use the model's own tokenizer")
        return lambda: given[below(len(given))]
    if first == "random":
        return lambda: [below(model.config.get_text_config().vocab_size)]
    if first != "bos":
        raise ValueError(f"first is {first!r}: write one of {', '.join(get_args(First))}")
    start = (special_tokens(model, "bos_token_id") or special_tokens(model, "eos_token_id"))[:1]
    if not start:
        raise ValueError("the model has neither a beginning-of-text nor an end-of-text token: write first='random'")
    return lambda: start
