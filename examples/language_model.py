"""A causal language model and a text → the same model in factors, without any training, in a folder.

    pip install .
    python examples/language_model.py MODEL book.txt small --keep 0.8

MODEL is a folder, or an id on the hub. What it loses on the end of the text, which is not calibrated with, is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import eckart

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("text", help="a file")
parser.add_argument("folder", help="where the small model goes")
parser.add_argument("--keep", type=float, default=0.8, help="parameters of the linear maps after ÷ before")
parser.add_argument("--tokens", type=int, default=128, help="of a block")
parser.add_argument("--blocks", type=int, default=256, help="to calibrate with, at most")
asked = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(asked.model)
tokenizer = AutoTokenizer.from_pretrained(asked.model)

ids = tokenizer(Path(asked.text).read_text(), return_tensors="pt")["input_ids"][0]
blocks = ids[: len(ids) // asked.tokens * asked.tokens].view(-1, asked.tokens)
last = max(1, len(blocks) // 10)
if len(blocks) < 2:
    raise SystemExit(f"{asked.text} has {len(ids)} tokens: two blocks of {asked.tokens} are the least")
calibration = blocks[:-last][: asked.blocks]

# Where much is kept, pivots hold more than factors in as many numbers.
recipe = eckart.recipes()["anchored"].model_copy(update={"storage": "pivoted"})
batches = [{"input_ids": some, "labels": some} for some in calibration.split(4)]
small, report = eckart.compress(model, batches, asked.keep, recipe)
print(report)


@torch.no_grad()
def perplexity(model: PreTrainedModel) -> float:
    losses = [model.eval()(input_ids=some[None], labels=some[None]).loss for some in blocks[-last:]]
    return float(torch.stack(losses).mean().exp())


print(f"perplexity of {last} blocks: {perplexity(model):.4g} → {perplexity(small):.4g}")
eckart.save(small, asked.folder, tokenizer)
print(f"{asked.folder}: after `import eckart`, from_pretrained reads it")
