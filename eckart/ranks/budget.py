"""Budgets: keep ↔ ranks ↔ parameters.

`keep` is parameters of all targets after ÷ before, in (0, 1]. Biases stay and are not counted on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eckart.model.targets import Storage, Target

Rank = int | None
"""The rank of a target, or None where it stays dense."""

Ranks = Mapping[str, Rank]
"""Target → rank."""


class NoRank(ValueError):
    """A keep is too small for rank 1 of every target."""


def stored(targets: Iterable[Target], storage: Storage) -> tuple[Target, ...]:
    """Return `targets` with this storage, by which a recipe counts their parameters.

    Targets of two layers stay as they are: those of a product lose rows, an embedding and its head have factors.
    """
    return tuple(
        target if len(target.layers) > 1 else target.model_copy(update={"storage": storage}) for target in targets
    )


def cost(target: Target, rank: Rank) -> int:
    """Return the parameters of `target` at `rank`: r (out + in) as factors, r (out + in − r) pivoted."""
    if rank is None:
        return target.parameters
    return rank * (target.step - (rank if target.storage == "pivoted" else 0))


def largest_rank(target: Target) -> int:
    """Return the largest rank at which it has fewer parameters than the dense weight; 0 if there is none."""
    if target.storage == "pivoted":
        return min(target.out_features, target.in_features) - 1
    return (target.parameters - 1) // target.step


def rank_or_dense(target: Target, rank: int) -> Rank:
    """Return `rank`, or None where the dense weight is no larger."""
    return rank if rank <= largest_rank(target) else None


def total(targets: Iterable[Target], ranks: Ranks) -> int:
    """Return the parameters of all `targets` at `ranks`."""
    return sum(cost(target, ranks[target.name]) for target in targets)


def allowance(targets: Iterable[Target], keep: float) -> int:
    """Return the parameters that `keep` leaves to all `targets`.

    Raises:
        ValueError: keep lies outside (0, 1].
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is no share: write a number above 0 and up to 1")
    # rounded first, so that 0.29 of 100 is 29, not 28
    return int(round(keep * sum(target.parameters for target in targets), 6))


def ranked_allowance(targets: Sequence[Target], keep: float) -> int:
    """Return the `allowance`, if it pays for rank 1 of every target, or for its dense weight where no rank is smaller.

    Raises:
        NoRank: `keep` does not pay for that.
    """
    budget = allowance(targets, keep)
    if budget < sum(cost(target, rank_or_dense(target, 1)) for target in targets):
        candidates = [target for target in targets if largest_rank(target)] or targets
        largest = max(candidates, key=lambda target: target.step)
        raise NoRank(
            f"keep={keep:g} leaves no rank to some of {len(candidates)} targets, of which {largest.name} asks for "
            f"{cost(largest, 1)} parameters a rank: raise keep or exclude targets"
        )
    return budget
