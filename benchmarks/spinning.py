"""Measure what waiting threads cost: a training step on two threads, on a quiet and on a busy machine.

    python benchmarks/spinning.py    # as Markdown; some minutes

A thread of OpenMP that waits for the others spins for a while, unless OMP_WAIT_POLICY is PASSIVE. Where other work
needs the processor, it spins on time that the thread it waits for could have used. Each point is a process of its own,
which trains a BERT of six layers and says the median of its steps; both settings take turns, so that what else the
machine does falls on both, and the last column is the median over these pairs. The load before each row is what other
programs did then: on a quiet machine the first row has none, and the ratio there is what passive waiting costs.
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
ROWS, TOKENS = 16, 32
STEPS, WARM = 6, 1
POLICIES = ("", "PASSIVE")
"""OpenMP's own default, and Eckart's."""


def steps() -> Iterator[float]:
    """Return the seconds of each training step, after some that are not counted."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids, labels = torch.randint(config.vocab_size, (ROWS, TOKENS)), torch.randint(2, (ROWS,))
    for step in range(WARM + STEPS):
        start = time.perf_counter()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM:
            yield time.perf_counter() - start


@contextmanager
def beside(busy: int) -> Iterator[None]:
    """Run `busy` processes that never wait while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(policy: str) -> float:
    """Return the median seconds of a step in a process with this OMP_WAIT_POLICY; empty for the default."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    command = [sys.executable, __file__, "--steps"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def row(busy: int, pairs: int) -> str:
    load = os.getloadavg()[0]
    with beside(busy):
        seconds = [[measured(policy) for policy in POLICIES] for _ in range(pairs)]
    spinning, passive = (median(column) for column in zip(*seconds, strict=True))
    ratio = median(one / other for one, other in seconds)
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
