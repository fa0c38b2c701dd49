"""Measure the memory and the time of recovery steps of a LLaMA with 1.1 B random weights on a GPU.

    PYTHONPATH=. python benchmarks/recovery_memory.py            # a Markdown table, row by row
    PYTHONPATH=. python benchmarks/recovery_memory.py --small    # a tiny model, on a CPU too, to check the code

The model is TinyLlama's: hidden 2048, MLP 5632, 22 layers, 32 heads, 4 key-value heads, vocabulary 32,000. All linear
layers but the head are factors that keep half of the parameters. A step has one block of 2,048 tokens, with recomputed
activations, as `recovery: {batch_size: N}` and `trainer: {micro_batch: 1, checkpoint_activations: true}` run it N times
for each update. The loop here is the pipeline's (tasks/training/loop.py) without the Trainer, so that torch,
transformers and eckart suffice.

Columns: parameters, and those that are trained; the peak of torch.cuda.max_memory_allocated, from loading the model on;
seconds of a forward and backward pass and of an update, each the least of the steps after the first.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

from eckart.model.layers import factorize_target
from eckart.recovery.distillation import Distillation, DistillationRule, TopLogitsRule
from eckart.recovery.lora import Lora, LoraRule
from eckart.recovery.teacher_logits import TeacherLogits, keys, teach
from eckart.training.rules import Rule

GIB = 2**30
BF16, F32 = torch.bfloat16, torch.float32
BIG = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
ADAMW = partial(torch.optim.AdamW, fused=True)  # as the Trainer does
ADAFACTOR = partial(Adafactor, scale_parameter=False, relative_step=False)
TAUGHT = Distillation(layers=0.0, logits=1.0, temperature=1.0)


@dataclass(frozen=True)
class Case:
    """A row of the table: how the model is trained."""

    title: str
    dtype: torch.dtype = BF16
    mixed: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    lora: Lora | None = None
    teacher: str | None = None


CASES = [
    Case("float32 weights, mixed precision, AdamW", F32, mixed=True),
    Case("bfloat16 weights, AdamW"),
    Case("bfloat16 weights, Adafactor", optimizer=ADAFACTOR),
    Case("bfloat16 weights, LoRA of rank 8, AdamW", lora=Lora(rank=8)),
    Case("bfloat16 weights, AdamW, saved logits", teacher="saved"),
    Case("bfloat16 weights, AdamW, teacher beside", teacher="beside"),
    Case("float32 weights, mixed precision, AdamW, saved logits", F32, mixed=True, teacher="saved"),
    Case("float32 weights, mixed precision, AdamW, teacher beside", F32, mixed=True, teacher="beside"),
    Case("bfloat16 weights, LoRA of rank 8, AdamW, saved logits", lora=Lora(rank=8), teacher="saved"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, to check the code")
    parser.add_argument("--steps", type=int, default=3, help="steps of each case; the first is not timed (default: 3)")
    parser.add_argument("--top", type=int, default=64, help="classes of each prediction that are saved (default: 64)")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the factorized weights (default: 0.5)")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, whose memory is not measured"
    print(f"{name}, torch {torch.__version__}\n")
    print("| weights, optimizer, teacher | parameters, M | trained, M | peak GiB | pass, s | update, s |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    for case in CASES:
        cells = measured(case, asked, device)
        print(f"| {case.title} | {' | '.join(cells)} |", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def measured(case: Case, asked: argparse.Namespace, device: str) -> list[str]:
    """Return the cells of a case after its title."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens = 64 if asked.small else 2048
    ids = torch.randint(0, 1000, (asked.steps, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    blocks = [{"input_ids": block, "attention_mask": torch.ones_like(block), "labels": block} for block in ids.split(1)]
    rules: list[Rule] = []
    if case.teacher:
        teacher = dense(case.dtype, asked.small, device).eval()
        rules.append(taught(teacher, blocks, asked.top if case.teacher == "saved" else None, case, device))
        del teacher
    model = factorized(dense(case.dtype, asked.small, device), asked.keep)
    if case.lora:
        rules.insert(0, LoraRule(model, case.lora, seed=0))
    checkpointing(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = case.optimizer(trained, lr=1e-5)
    passes, updates = [], []
    for block in blocks:
        start = now(device)
        with precision(case, device):
            outputs = model(**block)
            loss = outputs.loss
            for rule in rules:
                extra = rule.extra_loss(model, block, outputs)
                loss = loss if extra is None else loss + extra
        loss.backward()
        del outputs
        middle = now(device)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        passes.append(middle - start)
        updates.append(now(device) - middle)
    if not torch.isfinite(loss):
        raise SystemExit(f"{case.title}: the loss is {float(loss)}")
    peak = f"{torch.cuda.max_memory_allocated() / GIB:.1f}" if device == "cuda" else "–"
    sizes = [sum(parameter.numel() for parameter in model.parameters()), sum(p.numel() for p in trained)]
    times = [min(values[1:] or values) for values in (passes, updates)]
    return [f"{size / 1e6:.3g}" for size in sizes] + [peak] + [f"{seconds:.3f}" for seconds in times]


def dense(dtype: torch.dtype, small: bool, device: str) -> LlamaForCausalLM:
    sizes = SMALL if small else BIG
    groups = {"num_key_value_heads": 2 if small else 4, "vocab_size": 1000 if small else 32000}
    config = LlamaConfig(**sizes, **groups, max_position_embeddings=2048, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    assert isinstance(model, LlamaForCausalLM)
    return model.train()


def factorized(model: LlamaForCausalLM, keep: float) -> LlamaForCausalLM:
    """Replace all linear layers but the head by random factors with the share `keep` of their parameters."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    for name in names:
        rows, columns = model.get_submodule(name).weight.shape
        rank = int(keep * rows * columns / (rows + columns))
        options: dict[str, Any] = {"device": model.device, "dtype": model.dtype}
        left, right = torch.randn(rows, rank, **options), torch.randn(rank, columns, **options)
        factorize_target(model, name, left * 0.02 / rank**0.5, right)
    return model


def taught(
    teacher: LlamaForCausalLM, blocks: list[dict[str, Tensor]], top: int | None, case: Case, device: str
) -> Rule:
    """Return the rule of a teacher beside the model or, if `top` is given, of its saved logits."""

    def predictions(outputs: Any, batch: Any) -> Tensor:
        logits: Tensor = outputs["logits"][:, :-1].flatten(0, 1)
        return logits

    if top is None:
        return DistillationRule(teacher, TAUGHT, classification=True, predictions=predictions)
    with precision(case, device):
        parts = [teach(teacher, block, predictions, top, TAUGHT.temperature) for block in blocks]
    arrays = (torch.cat([torch.from_numpy(part) for part in each]).numpy() for each in zip(*parts, strict=True))
    rows: Iterator[bytes] = (key for block in blocks for key in keys(block))
    return TopLogitsRule(TeacherLogits({key: row for row, key in enumerate(rows)}, *arrays), TAUGHT, predictions)


def checkpointing(model: LlamaForCausalLM) -> None:
    """Recompute the activations of each layer in the backward pass; transformers has renamed the method in 5.2x."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def precision(case: Case, device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, BF16) if case.mixed else nullcontext()


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
