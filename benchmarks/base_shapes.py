"""Time calibration statistics and decompositions on BERT-base's shapes, and compare with naive implementations.

    python -m benchmarks.base_shapes     # Markdown tables; some minutes, no study needed

The first table has the time to gather the statistics of two batches of 16 examples of 128 tokens, divided by the time
of a forward and backward pass of the same examples without statistics (but with gradients of weights, as in training).
In its rows named naive, simple hooks sum XᵀX, DᵀD and each example's squared gradient.
The second table compares our decomposition with two others: an SVD after whitening both sides with Cholesky roots, and
the plain SVD.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from eckart.calibration.statistics import STATISTIC_KINDS, StatisticKind, collect
from eckart.factorization.weighted_svd import decompose, spectrum, weighted_loss
from eckart.factorization.weightings import ErrorNorm
from eckart.model.batches import Batch
from eckart.model.targets import Target, find_targets
from tasks.scoring.timing import in_rounds

BATCHES, EXAMPLES, TOKENS, LAYERS, RUNS = 2, 16, 128, 4, 5
"""Four of BERT-base's twelve layers are enough, since all cost the same.

There are two batches, since the first starts the sums, and the second is added to them.
"""

KFAC: tuple[StatisticKind, ...] = ("inputs", "output_gradients")
SHAPES = ((768, 768), (768, 3072))


def seconds(*jobs: Callable[[], object]) -> list[list[float]]:
    """Run all jobs once in each round; return the seconds of each job in each round, without warm-up rounds."""
    forwards = {number: lambda _, job=job: job() for number, job in enumerate(jobs)}
    return list(in_rounds(forwards, {}, RUNS).values())


def trained(model: PreTrainedModel, batches: Sequence[Batch]) -> None:
    for batch in batches:
        model(**batch).loss.backward()
        model.zero_grad()


def naively(model: PreTrainedModel, batches: Sequence[Batch], targets: Sequence[Target], squares: bool) -> None:
    """Compute the same sums as `collect`, but with simple hooks.

    They compute full products, and the squared gradients of one example after the other.

    Args:
        squares: whether to sum the squared gradients, too.
    """
    sums: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value if name in sums else value

    def before(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs[name] = given[0].detach()
            flat = inputs[name].flatten(0, -2)
            add(f"{name}.inputs", flat.T @ flat)

        return hook

    def after(name: str) -> Callable[[nn.Module, object, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, __: object, deltas: tuple[Tensor, ...]) -> None:
            flat = deltas[0].flatten(0, -2)
            add(f"{name}.gradients", flat.T @ flat)
            if squares:
                for x, delta in zip(inputs[name], deltas[0], strict=True):
                    add(f"{name}.fisher", (delta.mT @ x).square())

        return hook

    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    hooks = []
    for target in targets:
        module = model.get_submodule(target.name)
        hooks.append(module.register_forward_pre_hook(before(target.name)))
        hooks.append(module.register_full_backward_hook(after(target.name)))
    for batch in batches:
        model(**batch).loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    model.requires_grad_(True)


def calibration() -> None:
    config = BertConfig(num_hidden_layers=LAYERS, vocab_size=1000)
    model = BertForSequenceClassification(config).eval()
    words = torch.randint(1000, (EXAMPLES, TOKENS))
    batch: Batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.arange(EXAMPLES) % 2}
    batches = [batch] * BATCHES
    targets = find_targets(model, batch, include=["*.encoder.*"]).targets
    jobs: dict[str, Callable[[], object]] = {
        "forward and backward": lambda: trained(model, batches),
        "for kfac": lambda: collect(model, batches, targets, KFAC),
        "for kfac, naive": lambda: naively(model, batches, targets, squares=False),
        "all kinds": lambda: collect(model, batches, targets, STATISTIC_KINDS),
        "inputs, gradients and Fisher, naive": lambda: naively(model, batches, targets, squares=True),
    }
    base, *others = seconds(*jobs.values())
    print("| calibration statistics | time ÷ forward and backward | fastest to slowest |\n|---|---|---|")
    for name, times in zip(list(jobs)[1:], others, strict=True):
        ratios = sorted(own / plain for own, plain in zip(times, base, strict=True))
        print(f"| {name} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")


def whitened(weight: Tensor, norm: ErrorNorm) -> Callable[[int], Tensor]:
    """Whiten the weight with Cholesky roots of both sides and decompose it with an SVD.

    Returns:
        A function: rank → best approximation of the weight with this rank.
    """
    assert norm.left is not None
    assert norm.right is not None
    outer, inner = torch.linalg.cholesky(norm.left), torch.linalg.cholesky(norm.right)
    u, s, v = torch.linalg.svd(outer.T @ weight @ inner, full_matrices=False)
    left = torch.linalg.solve_triangular(outer.T, u * s, upper=True)
    right = torch.linalg.solve_triangular(inner, v, upper=False, left=False)
    return lambda rank: left[:, :rank] @ right[:rank]


def moments(size: int) -> Tensor:
    """Return a random matrix `(size, size)` of second moments of features that are correlated and differ in scale."""
    values = torch.randn(4 * size, size, dtype=torch.float64) @ torch.randn(size, size, dtype=torch.float64)
    values *= torch.rand(size, dtype=torch.float64) ** 3 + 1e-3
    return values.T @ values / len(values)


def decompositions() -> None:
    print(
        "\n| linear layer | decomposition, ms | spectrum alone, ms | Cholesky and SVD, ms | plain SVD, ms "
        "| loss at rank 192 ÷ Cholesky's − 1 |"
    )
    print("|---|---|---|---|---|---|")
    for out, in_ in SHAPES:
        weight = torch.randn(out, in_, dtype=torch.float64) / in_**0.5
        norm = ErrorNorm(left=moments(out), right=moments(in_))
        times = seconds(
            lambda weight=weight, norm=norm: decompose(weight, norm),
            lambda weight=weight, norm=norm: spectrum(weight, norm),
            lambda weight=weight, norm=norm: whitened(weight, norm),
            lambda weight=weight: torch.linalg.svd(weight, full_matrices=False),
        )
        left, right = decompose(weight, norm).truncate(192)
        lost, theirs = (
            float(weighted_loss(weight - product, norm)) for product in (left @ right, whitened(weight, norm)(192))
        )
        cells = [f"{1e3 * statistics.median(seconds):.0f}" for seconds in times]
        print(f"| {out} × {in_} | {' | '.join(cells)} | {lost / theirs - 1:.1e} |")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    calibration()
    decompositions()
    batches = f"{BATCHES} batches of {EXAMPLES} examples of {TOKENS} tokens"
    print(f"\n1 thread, {batches}, medians of {RUNS} rounds.")


if __name__ == "__main__":
    main()
