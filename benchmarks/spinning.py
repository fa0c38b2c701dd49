"""Measure how much spinning threads slow down a training step on two threads, on a quiet and on a busy machine.

    python benchmarks/spinning.py    # as Markdown; some minutes

A thread of OpenMP that waits for others spins for a while, unless OMP_WAIT_POLICY is PASSIVE. If the machine is busy,
spinning takes processor time from the threads that are waited for. Each measurement is a process of its own, which
trains a BERT of six layers and prints the median time of its steps. Both settings take turns, so that other programs
slow down both, and the last column is the median of the ratios of these pairs. The load average measured before each
row is that of other programs. On a quiet machine it is zero before the first row, and the ratio in this row is the cost
of passive waiting.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

THREADS = 2
EXAMPLES, TOKENS = 16, 32
STEPS, WARM = 6, 1
POLICIES = ("", "PASSIVE")
"""OpenMP's default, and Eckart's setting."""


def steps() -> Iterator[float]:
    """Yield the seconds of each training step, without the first as warm-up."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids, labels = torch.randint(config.vocab_size, (EXAMPLES, TOKENS)), torch.randint(2, (EXAMPLES,))
    for step in range(WARM + STEPS):
        start = time.perf_counter()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM:
            yield time.perf_counter() - start


@contextmanager
def beside(busy: int) -> Iterator[None]:
    """While the block runs, run `busy` other processes that use the processor all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(policy: str) -> float:
    """Return the median seconds of a training step in a new process with this OMP_WAIT_POLICY ("": the default)."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    command = [sys.executable, __file__, "--steps"]
    finished = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(finished.stdout)


def row(busy: int, pairs: int) -> str:
    load = os.getloadavg()[0]
    with beside(busy):
        seconds = [[measured(policy) for policy in POLICIES] for _ in range(pairs)]
    spinning, passive = (median(column) for column in zip(*seconds, strict=True))
    ratio = median(spin / wait for spin, wait in seconds)
    return f"| {busy} | {load:.1f} | {spinning:.2f} | {passive:.2f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="measurements with each setting")
    parser.add_argument(
        "--busy", type=int, nargs="*", default=[0, THREADS], help="numbers of busy processes, a row for each"
    )
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps:
        print(median(steps()))
        return
    print(
        f"{os.cpu_count()} cores\n\n| busy processes beside | load before | s a step, as it is | s, PASSIVE | ratio |"
    )
    print("|---:|---:|---:|---:|---:|")
    for busy in arguments.busy:
        print(row(busy, arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
