"""Measure the memory and the time of recovery steps of a LLaMA with 1.1 B random weights, best on a GPU.

    python -m benchmarks.recovery_memory            # a Markdown table, row by row
    python -m benchmarks.recovery_memory --predict  # what weights, gradients and states take; nothing runs
    python -m benchmarks.recovery_memory --tokens 128 --most 7              # what a CPU with 10 GiB can do
    python -m benchmarks.recovery_memory --small    # a tiny model, to check the code

The model is TinyLlama's: hidden 2048, MLP 5632, 22 layers, 32 heads, 4 key-value heads, vocabulary 32,000. All linear
layers but the head are factors that keep half of the parameters. A step has one block of 2,048 tokens, with recomputed
activations, as `recovery: {batch_size: N}` and `trainer: {micro_batch: 1, checkpoint_activations: true}` run it N times
for each update. The loop here is the pipeline's (tasks/training/loop.py) without the Trainer, so that torch,
transformers and eckart suffice.

Columns: parameters, and those that are trained; GiB of weights, gradients, states and the teacher by their
sizes, without activations; the peak of torch.cuda.max_memory_allocated, or on a CPU of the process (ru_maxrss) above
what it has before the first model; seconds of a forward and backward pass and of an update, each the least of the steps
after the first. Each case has a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
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
    states: int = 2  # of a parameter's size; Adafactor's rows and columns hardly count
    lora: Lora | None = None
    teacher: str | None = None


CASES = [
    Case("float32 weights, mixed precision, AdamW", F32, mixed=True),
    Case("bfloat16 weights, AdamW"),
    Case("bfloat16 weights, Adafactor", optimizer=ADAFACTOR, states=0),
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
    parser.add_argument("--tokens", type=int, help="tokens of a block (default: 2048, or 64 with --small)")
    parser.add_argument("--predict", action="store_true", help="run nothing")
    parser.add_argument("--most", type=float, help="run only cases for which fewer GiB are predicted")
    asked = parser.parse_args()
    asked.tokens = asked.tokens or (64 if asked.small else 2048)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {asked.tokens} tokens\n")
    print(
        "| weights, optimizer, teacher | parameters, M | trained, M | predicted GiB | peak GiB | pass, s | update, s |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for case in CASES:
        sizes, held = predicted(case, asked)
        cells = [f"{size / 1e6:.3g}" for size in sizes] + [f"{held / GIB:.1f}"]
        if asked.predict or (asked.most and held / GIB > asked.most):
            cells += ["–"] * 3
        else:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                cells += pool.submit(measured, case, asked, device).result()
        print(f"| {case.title} | {' | '.join(cells)} |", flush=True)


def predicted(case: Case, asked: argparse.Namespace) -> tuple[list[int], int]:
    """Return the numbers of parameters and of trained ones, and the bytes of all that is held between passes."""
    model = dense(case.dtype, asked.small, "meta")
    layers = list(ranks(model, asked.keep))
    before = sum(parameter.numel() for parameter in model.parameters())
    after = before - sum(rows * columns - rank * (rows + columns) for _, rows, columns, rank in layers)
    each = case.dtype.itemsize
    held, trained = each * (after + before * (case.teacher == "beside")), after
    if case.lora:  # two updates of each pair of factors, in float32
        trained, each = sum(case.lora.rank * (rows + columns + 2 * rank) for _, rows, columns, rank in layers), 4
        held += each * trained
        after += trained
    return [after, trained], held + each * trained * (1 + case.states)  # gradients and states


def measured(case: Case, asked: argparse.Namespace, device: str) -> list[str]:
    """Return the measured cells of a case."""
    before = resident()
    ids = torch.randint(0, 1000, (asked.steps, asked.tokens), generator=torch.Generator().manual_seed(0)).to(device)
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
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    times = [min(values[1:] or values) for values in (passes, updates)]
    return [f"{peak / GIB:.1f}"] + [f"{seconds:.3f}" for seconds in times]


def resident() -> int:
    """Return the present resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
    for name, rows, columns, rank in [*ranks(model, keep)]:
        options: dict[str, Any] = {"device": model.device, "dtype": model.dtype}
        left, right = torch.randn(rows, rank, **options), torch.randn(rank, columns, **options)
        factorize_target(model, name, left * 0.02 / rank**0.5, right)
    return model


def ranks(model: LlamaForCausalLM, keep: float) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, rows, columns, rank) of each linear layer that is factorized."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            rows, columns = module.weight.shape
            yield name, rows, columns, int(keep * rows * columns / (rows + columns))


def taught(
    teacher: LlamaForCausalLM, blocks: list[dict[str, Tensor]], top: int | None, case: Case, device: str
) -> Rule:
    """Return the rule of a teacher beside the model or, if `top` is given, of its saved logits."""

    def predictions(outputs: Any, batch: Any) -> Tensor:
        logits: Tensor = outputs["logits"][:, :-1].flatten(0, 1)
        return logits

    if top is None:
        return DistillationRule(teacher, TAUGHT, classes=True, predictions=predictions)
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
