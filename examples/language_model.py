"""Compress a causal language model with a text file, without any training, and save it to a folder.

    pip install .
    python examples/language_model.py MODEL book.txt small --keep 0.8

MODEL is a folder, or an id on the hub. The perplexity on the end of the text, which is left out of the calibration
data, is printed before and after.
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
parser.add_argument("folder", help="where to save the small model")
parser.add_argument("--keep", type=float, default=0.8, help="share of the linear layers' parameters that is kept")
parser.add_argument("--tokens", type=int, default=128, help="tokens of a block")
parser.add_argument("--blocks", type=int, default=256, help="the most blocks to calibrate with")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)

ids = tokenizer(Path(args.text).read_text(), return_tensors="pt")["input_ids"][0]
blocks = ids[: len(ids) // args.tokens * args.tokens].view(-1, args.tokens)
last = max(1, len(blocks) // 10)
if len(blocks) < 2:
    raise SystemExit(f"{args.text} has {len(ids)} tokens: give a text of at least two blocks of {args.tokens}")
calibration = blocks[:-last][: args.blocks]

# With as much text that the model writes itself, it loses less on texts of other kinds.
batches = [{"input_ids": chunk, "labels": chunk} for chunk in calibration.split(4)]
batches += eckart.write_text(model, len(calibration), args.tokens)
small, report = eckart.compress(model, batches, args.keep)
print(report)


@torch.no_grad()
def perplexity(model: PreTrainedModel) -> float:
    losses = [model.eval()(input_ids=block[None], labels=block[None]).loss for block in blocks[-last:]]
    return float(torch.stack(losses).mean().exp())


print(f"perplexity of {last} blocks: {perplexity(model):.4g} → {perplexity(small):.4g}")
eckart.save(small, args.folder, tokenizer)
print(f"saved to {args.folder}: after `import eckart`, from_pretrained loads it")
