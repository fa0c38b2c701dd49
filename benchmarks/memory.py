"""Predict the memory that statistics and factorization need, and measure memory and time on small LLaMAs.

    python -m benchmarks.memory              # the tables of docs/explanation/memory-and-time.md; some minutes
    python -m benchmarks.memory --predict    # only the predictions for LLaMA-7B, 8B and 70B, and the plan of these
    python -m benchmarks.memory --wide       # the layers of a LLaMA of 1.1 billion parameters; minutes on idle cores

Each point (a row of a table) is measured in a process of its own. Its peak is the largest resident memory (ru_maxrss of
getrusage), minus the memory of Python and its libraries before the model is created. Weights are random, in the data
type that the table names. MALLOC_MMAP_THRESHOLD_ makes glibc return freed memory at once, as it always does for tensors
above 32 MiB, so that small models behave as big ones do. Seconds are processor time on one thread, which other
processes hardly change.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

KINDS = {"inputs": ("inputs",), "kfac": ("inputs", "output_gradients")}
"""Weighting → kinds of statistics that it reads."""
BYTES = {"float32": 4, "bfloat16": 2}
BATCHES = 2
MIB = 2**20
SPEED = 1e14
"""Operations a second of one GPU: the assumption of the plan."""
DECOMPOSED, SPECTRUM = 0.73, 0.37
"""Seconds of one H200 for a target of 4096 × 11008 under kfac; its decomposition, and its spectrum alone."""


@dataclass(frozen=True)
class Point:
    """Settings of a measurement: the shape of a LLaMA, and its calibration.

    `key_values` is the width of keys and values; None: that of queries. `decomposed` is the number of layers that a
    measurement decomposes; None: all.
    """

    hidden: int
    mlp: int
    layers: int
    dtype: str
    weighting: str
    layers_at_once: int | None
    examples: int = 4
    tokens: int = 256
    vocabulary: int = 1000
    key_values: int | None = None
    decomposed: int | None = None

    @property
    def narrow(self) -> int:
        """Return the width of keys and values."""
        return self.key_values or self.hidden

    @property
    def group(self) -> int:
        """Return how many layers have their statistics in memory at the same time."""
        return min(self.layers_at_once or self.layers, self.layers)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Return (smaller, larger) side of each linear layer of a layer: four of the attention, three of the MLP."""
        sides = [self.hidden] * 2 + [self.narrow] * 2 + [self.mlp] * 3
        return [(min(side, self.hidden), max(side, self.hidden)) for side in sides]

    @property
    def linear(self) -> int:
        """Return the parameters of all linear layers, without a head."""
        return self.layers * sum(small * large for small, large in self.shapes)

    @property
    def weights(self) -> int:
        """Return the bytes of the model's weights."""
        return (self.linear + self.vocabulary * self.hidden) * BYTES[self.dtype]

    @property
    def statistics(self) -> int:
        """Return the bytes of one layer's second moments, in float32.

        There are four C_in, for the inputs of: query, key and value; the attention's output; gate and up; down. With
        kfac there are seven C_out, one for each linear layer.
        """
        h, m, kv = self.hidden**2, self.mlp**2, self.narrow**2
        return 4 * (3 * h + m + (3 * h + 2 * kv + 2 * m if self.weighting == "kfac" else 0))

    @property
    def activations(self) -> int:
        """Return the bytes of a batch's activations at the peak: those of all layers for kfac, else of one layer.

        kfac needs gradients, so the graph of all layers is in memory.

        The graph of a layer holds the inputs of two norms in float32, query, key, value and output of the attention,
        and three tensors of the MLP. It holds no inputs of linear layers: their weights are frozen, and kfac does not
        need the inputs in the backward pass.
        """
        size, tokens = BYTES[self.dtype], self.examples * self.tokens
        layer = 2 * self.hidden * 4 + (2 * self.hidden + 2 * self.narrow + 3 * self.mlp) * size
        return tokens * layer * (self.layers if self.weighting == "kfac" else 1)

    @property
    def term(self) -> int:
        """Return the bytes of one batch's input vectors at the widest linear layer (down), in float32.

        Their product is added to the sum in place, so it needs no memory of its own.
        """
        return 4 * self.examples * self.tokens * self.mlp

    @property
    def decomposition(self) -> int:
        """Return the bytes that are needed besides the model's weights while the largest target is decomposed.

        In float64: W, W B, two factors and their balanced copies, C of the wider side, and three matrices of the size
        of the narrower side. In float32: C of the wider side, as the statistics are stored.
        """
        h, m = self.hidden, self.mlp
        return 4 * m**2 + 8 * (2 * h * m + 2 * (h * m + h * h) + m * m + 3 * h * h)

    def streams(self, blocks: int) -> int:
        """Return the bytes of two streams of hidden states, in float32, of `blocks` blocks of `tokens` tokens.

        A refinement of one decoder block after the other holds what the next block reads in the original model and in
        the compressed one.
        """
        return 2 * 4 * blocks * self.tokens * self.hidden

    def plan(self, blocks: int, steps: int, batch: int, keep: float) -> dict[str, tuple[float, int]]:
        """Return stage → (seconds on one GPU, bytes there), under kfac.

        Args:
            blocks: blocks of `tokens` tokens that calibrate, and as many that score.
            steps, batch: steps of fine-tuning, and blocks in each.
            keep: share of the linear layers' parameters that is kept. The head is one more matrix, and stays.
        """
        calibrated, head = blocks * self.tokens, self.vocabulary * self.hidden
        passes = -(-self.layers // self.group)
        sums = self.layers * self.statistics // 4  # a symmetric product takes one operation for each of its numbers
        gathered = calibrated * (3 * passes * self.linear + sums)  # a pass: forward, and half of the backward pass
        targets = self.layers * sum(small**2 * large for small, large in self.shapes) / (4096**2 * 11008)
        left = int(keep * self.linear) + head
        trained = 8 * left * steps * batch * self.tokens  # forward twice, because activations are recomputed
        scored = 2 * 2 * left * calibrated  # before and after fine-tuning
        return {
            "importance": (gathered / SPEED, self.predicted("importance")),
            "search": (SPECTRUM * targets, self.decomposition),
            "factorize": (DECOMPOSED * targets, self.decomposition),
            "finetune, AdamW": (trained / SPEED, 16 * (left + head)),  # with an embedding
            "finetune, LoRA": (trained / SPEED, 2 * (left + head)),
            "evaluate": (scored / SPEED, 2 * (left + head) + self.weights),  # beside the original model
        }

    def predicted(self, stage: str) -> int:
        """Return the predicted bytes at the peak of a stage, `importance` or `factorize`."""
        if stage == "factorize":
            return self.weights + self.decomposition
        return self.weights + self.group * self.statistics + self.activations + self.term


POINTS = [
    Point(hidden, 43 * hidden // 16, layers, dtype, weighting, at_once)
    for hidden, layers, weighting, dtype in [
        (256, 8, "inputs", "float32"),
        (256, 8, "kfac", "float32"),
        (512, 8, "kfac", "float32"),
        (512, 8, "kfac", "bfloat16"),
    ]
    for at_once in (None, 1)
]
WIDE = [Point(2048, 5632, 22, "bfloat16", "kfac", 8, 2, 128, vocabulary=32000, key_values=256, decomposed=1)]
"""A LLaMA of 1.1 billion parameters; one of its layers is decomposed."""
BIG = [
    Point(hidden, mlp, layers, "bfloat16", weighting, at_once, 1, 2048, vocabulary=128256, key_values=1024)
    for hidden, mlp, layers in [(4096, 14336, 32), (8192, 28672, 80)]
    for weighting, at_once in product(KINDS, [8, 1])
]
"""LLaMA-3 of 8 and of 70 billion parameters."""
SEVEN = [
    Point(4096, 11008, 32, dtype, weighting, at_once, examples=1, tokens=2048, vocabulary=32000)
    for weighting, dtype, at_once in product(KINDS, BYTES, [None, 8, 1])
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--wide", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18)}  # of the processes that measure
    if arguments.wide:
        _table(WIDE, measured=True)
        return
    if not arguments.predict:
        _table(POINTS, measured=True)
    _table(SEVEN, measured=False)
    _table(BIG, measured=False)
    _plans([point for point in BIG if point.weighting == "kfac" and point.layers_at_once == 8])
    for point in (BIG[0], BIG[-1]):
        print(f"two streams of 256 blocks, hidden {point.hidden}: {point.streams(256) // MIB} MiB")


def _table(points: list[Point], measured: bool) -> None:
    print(
        "| hidden | layers | weighting | weights | layers_at_once | weights MiB | statistics MiB | importance MiB | ",
        end="",
    )
    print("measured | seconds | factorize MiB | measured | seconds |" if measured else "factorize MiB |")
    print("|---" * (13 if measured else 9) + "|", flush=True)
    for point in points:
        cells = [point.hidden, point.layers, point.weighting, point.dtype, point.layers_at_once or "null"]
        cells += [point.weights // MIB, point.group * point.statistics // MIB]
        with tempfile.TemporaryDirectory() as folder:
            for stage in ("importance", "factorize"):
                cells.append(point.predicted(stage) // MIB)
                if measured and stage == "factorize" and point.layers_at_once and not point.decomposed:
                    cells += ["as above"] * 2  # the stage always reads the statistics of one target at a time
                elif measured:
                    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                        cells += pool.submit(_measure, point, stage, Path(folder)).result()
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _plans(points: list[Point]) -> None:
    plans = [point.plan(blocks=256, steps=1000, batch=16, keep=0.6) for point in points]
    print(f"| stage |{''.join(f' {point.linear / 1e9:.0f} billion: minutes | GiB |' for point in points)}")
    print("|---" * (1 + 2 * len(points)) + "|")
    for stage in plans[0]:
        cells = [cell for plan in plans for cell in (f"{plan[stage][0] / 60:.1f}", f"{plan[stage][1] / 2**30:.0f}")]
        print(f"| {' | '.join([stage, *cells])} |")


def _measure(point: Point, stage: str, folder: Path) -> tuple[int, str]:
    """Return the peak in MiB and the seconds of a stage of a point."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from eckart.calibration.passes import passes
    from eckart.calibration.statistics import collect
    from eckart.calibration.statistics_files import load_statistics, save_statistics
    from eckart.factorization.factorize import factorize_at_once
    from eckart.factorization.weightings import Inputs, Kfac
    from eckart.model.targets import find_targets
    from eckart.ranks.budget import largest_rank

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(BATCHES):
            ids = torch.randint(1, point.vocabulary, (point.examples, point.tokens), generator=generator)
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}

    before = _resident()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=point.vocabulary,
        hidden_size=point.hidden,
        intermediate_size=point.mlp,
        num_hidden_layers=point.layers,
        num_attention_heads=point.hidden // 64,
        num_key_value_heads=point.narrow // 64,
        num_labels=2,
        pad_token_id=0,
        dtype=point.dtype,
    )
    model = LlamaForSequenceClassification._from_config(config, dtype=getattr(torch, point.dtype)).eval()
    probe = {key: values[:1, :8] if values.dim() > 1 else values[:1] for key, values in next(batches()).items()}
    targets = find_targets(model, probe).targets
    start = time.process_time()
    if stage == "importance":
        parts = passes(targets, point.layers_at_once)
        for number, part in enumerate(parts, 1):
            save_statistics(
                collect(model, batches(), part.targets, KINDS[point.weighting], then=part.then), folder, number
            )
    else:
        weighting = Kfac(kind="kfac", shrinkage=0.0) if point.weighting == "kfac" else Inputs(kind="inputs")
        layers = passes(targets, 1)[: point.decomposed]
        targets = tuple(target for layer in layers for target in layer.targets)
        ranks = {target.name: largest_rank(target) // 2 for target in targets}
        factorize_at_once(model, targets, ranks, weighting, load_statistics(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - before) // MIB, f"{time.process_time() - start:.1f}"


def _resident() -> int:
    """Return the present resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
