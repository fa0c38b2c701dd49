"""The results in words, all computed."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.report.numbers import between, count, counted, percent, score
from tasks.report.results import CONTROL, DENSE, CandidateResults, Results, ScoredModel


def summary(results: Results) -> list[str]:
    """Return a paragraph about the original model, one per keep, and one on metrics that recovery worsened, if any."""
    keeps = (" ".join(_best_at(results, keep)) for keep in results.keeps)
    paragraphs = [f"{_dense(results)} {parameters(results)}", *keeps, _setbacks(results)]
    return [paragraph for paragraph in paragraphs if paragraph]


def _dense(results: Results) -> str:
    dense, metric = results.dense, results.metric
    return (
        f"The original model has {count(dense.size.model_parameters)} parameters and "
        f"{counted(len(results.targets), 'target layer')}, and reaches {metric.title} {score(dense.score.metric)} on "
        f"{counted(dense.score.rows, 'test example')}{'; lower is better' if metric.lower_is_better else ''}. "
        f"{_control(results)}"
    )


def parameters(results: Results) -> str:
    """Return in a sentence where the parameters of the original model are."""
    each = [f"{count(amount)} are in {name}" for name, amount in results.census.rows]
    return f"Of its parameters {_enumerated(each)}."


def _control(results: Results) -> str:
    if not results.control_curve:
        return f"The control is the same model, because the recovery of {results.control} takes no step."
    reached = score(results.dense.control.score.metric)
    return f"With the recovery fine-tuning of {results.control} it reaches {reached}: this is the control."


def _best_at(results: Results, keep: str) -> Iterator[str]:
    """Yield sentences on the best candidate at `keep`: its metric, size, rivals, and the verdict on both references."""
    ranked = results.at(keep)
    best = ranked[0]
    yield (
        f"At keep {keep}, {_winners(results, ranked)} {results.metric.title} {score(best.recovered)}"
        f"{_retained(results, best)}, {_savings(results, best)}{_rivals(results, ranked)}."
    )
    dense, control = (_verdict(results, best, reference) for reference in (DENSE, CONTROL))
    yield f"Against the original model this is {dense}, against the control {control}."


def _retained(results: Results, candidate: CandidateResults) -> str:
    shares = [results.retained(candidate.recovered, reference) for reference in (DENSE, CONTROL)]
    if None in shares:
        return ""
    dense, control = (percent(share) for share in shares if share is not None)
    return f", {dense} of the original and {control} of the control"


def _verdict(results: Results, candidate: CandidateResults, reference: ScoredModel) -> str:
    """Return the meaning of the interval of the difference, and nothing beyond it."""
    found = results.difference(candidate.after, reference)
    word = {1: "a gain", -1: "a loss", 0: "no significant difference"}[results.gain(candidate.after, reference)]
    return f"{word} ({between(found.low, found.high, candidate.recovered)})"


def _winners(results: Results, ranked: list[CandidateResults]) -> str:
    names = [candidate.recipe for candidate in ranked if results.is_best(candidate)]
    if len(ranked) == 1:
        return f"{names[0]} recovers to"
    return f"{_enumerated(names)} {'recover' if len(names) > 1 else 'recovers'} best:"


def _savings(results: Results, candidate: CandidateResults) -> str:
    small, dense = candidate.evaluation.size, results.dense.size
    parameters, macs = small.model_parameters / dense.model_parameters, small.macs_per_token / dense.macs_per_token
    return (
        f"with {percent(parameters)} of the model’s parameters and {percent(macs)} of its multiply-accumulates, "
        f"{candidate.benchmark.speedup.median:.2f} times as fast"
    )


def _rivals(results: Results, ranked: list[CandidateResults]) -> str:
    """Name the recipes that are not significantly different from the best."""
    rivals = [candidate.recipe for candidate in results.rivals(ranked[0])]
    if rivals:
        return f"; {_enumerated(rivals)} {'is' if len(rivals) == 1 else 'are'} not significantly different"
    worse = any(not results.is_best(candidate) for candidate in ranked)
    return "; every other recipe is significantly different" if worse else ""


def _setbacks(results: Results) -> str:
    """Name the candidates that recovery fine-tuning made worse."""
    scored = [candidate for candidate in results.candidates if candidate.factorized is not None]
    worse = [candidate.name for candidate in scored if results.gain(candidate.after, candidate.before) < 0]
    if not worse:
        return ""
    which = _enumerated(worse) if len(worse) <= 3 else f"{len(worse)} of {len(results.candidates)} candidates"
    return f"Recovery fine-tuning significantly worsened the {results.metric.title} of {which}."


def _enumerated(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
