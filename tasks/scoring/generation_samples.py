"""Samples of the text that a language model writes: a good perplexity can hide bad text."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.artifacts.results_schema import Continuation
from tasks.artifacts.task_spec import load_split, load_task
from tasks.models.model_io import inputs_device
from tasks.nlp_tasks import kind_of

_COUNT = 3  # texts: enough to see what they are like, few enough to be read


@torch.inference_mode()
def continuations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[Continuation, ...]:
    """Continue the beginnings of three blocks, spread evenly over the test split, greedily; none without running text.

    Args:
        tokens: number of tokens that are read of each block, and written at most; never more than half a block, so that
            the model has positions for both.
    """
    task = load_task()
    kind, tokens = kind_of(task), min(tokens, task.max_length // 2)
    if not kind.running_text or not tokens:
        return ()
    blocks = kind.columns(load_split("test"), tokenizer, "test")["input_ids"]
    places = sorted({part * len(blocks) // _COUNT for part in range(_COUNT)})
    ids = torch.from_numpy(blocks[places][:, :tokens]).to(inputs_device(model))
    written = model.eval().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        num_beams=1,
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = zip(
        tokenizer.batch_decode(ids), tokenizer.batch_decode(written[:, tokens:], skip_special_tokens=True), strict=True
    )
    return tuple(Continuation(beginning=before, text=after) for before, after in texts)
