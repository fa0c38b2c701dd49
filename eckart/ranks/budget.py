"""Conversions between keep, ranks and numbers of parameters.

`keep` is the number of parameters of all targets after compression ÷ before, in (0, 1]. Biases do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eckart.model.targets import Storage, Target

Rank = int | None
"""Rank of a target, or None if the target stays dense."""

Ranks = Mapping[str, Rank]
"""Target name → rank."""


class NoRank(ValueError):
    """Error: `keep` is too small for the smallest ranks; the message says `keep=… is too small for …`."""


def stored(targets: Iterable[Target], storage: Storage) -> tuple[Target, ...]:
    """Return copies of `targets` with the recipe's `storage`, so that `cost` counts the parameters for this storage.

    Targets of two layers are returned unchanged, because their storage is always the same: an attention product loses
    outputs of each head, and an embedding tied to its head gets factors.
    """
    return tuple(
        target if len(target.layers) > 1 else target.model_copy(update={"storage": storage}) for target in targets
    )


def cost(target: Target, rank: Rank) -> int:
    """Return the number of parameters of `target` at `rank`: r (out + in) as factors, r (out + in − r) pivoted."""
    if rank is None:
        return target.parameters
    return rank * (target.step - (rank if target.storage == "pivoted" else 0))


def largest_rank(target: Target) -> int:
    """Return the largest rank at which `target` has fewer parameters than its dense weight, or 0 if there is none."""
    if target.storage == "pivoted":
        return min(target.out_features, target.in_features) - 1
    return (target.parameters - 1) // target.step


def rank_or_dense(target: Target, rank: int) -> Rank:
    """Return `rank`, or None (dense) if at this rank the target would not be smaller than its dense weight."""
    return rank if rank <= largest_rank(target) else None


def total(targets: Iterable[Target], ranks: Ranks) -> int:
    """Return the number of parameters of all `targets` at `ranks`."""
    return sum(cost(target, ranks[target.name]) for target in targets)


def allowance(targets: Iterable[Target], keep: float) -> int:
    """Return the number of parameters that all `targets` together may have at `keep`.

    Raises:
        ValueError: `keep` lies outside (0, 1].
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is not a share: write a number above 0 and up to 1")
    # rounded first, so that 0.29 of 100 is 29, not 28
    return int(round(keep * sum(target.parameters for target in targets), 6))


def ranked_allowance(targets: Sequence[Target], keep: float) -> int:
    """Return the `allowance`, after a check that it pays for the smallest choice of every target.

    The smallest choice is rank 1, or the dense weight if no rank makes the target smaller.

    Raises:
        NoRank: `keep` is too small for these choices.
    """
    budget = allowance(targets, keep)
    if budget < sum(cost(target, rank_or_dense(target, 1)) for target in targets):
        candidates = [target for target in targets if largest_rank(target)] or targets
        largest = max(candidates, key=lambda target: target.step)
        raise NoRank(
            f"keep={keep:g} is too small for rank 1 of all {len(candidates)} targets; the largest, {largest.name}, has "
            f"{cost(largest, 1)} parameters at rank 1: raise keep or exclude targets"
        )
    return budget
