"""The results in plain words, all of them computed."""

from __future__ import annotations

from tasks.report.numbers import count, counted, percent, score
from tasks.report.results import CandidateResults, Results


def summary(results: Results) -> list[str]:
    """Sentences that together are the paragraph on top of the page."""
    sentences = [_dense(results), *(_best_at(results, keep) for keep in results.keeps)]
    return [sentence for sentence in (*sentences, _setbacks(results), _chance(results)) if sentence]


def _dense(results: Results) -> str:
    dense, metric = results.dense, results.metric
    return (
        f"The dense model has {count(dense.size.model_parameters)} parameters, {count(results.target_parameters)} of "
        f"them in {counted(len(results.targets), 'target')}, and reaches {metric.title} {score(dense.score.metric)} on "
        f"{counted(dense.score.rows, 'test row')}{'; lower is better' if metric.lower_is_better else ''}."
    )


def _best_at(results: Results, keep: str) -> str:
    """Who is best at `keep`, how much of dense that is, and what it saves."""
    ranked = results.at(keep)
    best = ranked[0]
    retained = results.retained(best.recovered)
    of_dense = "" if retained is None else f", {percent(retained)} of dense"
    return (
        f"At keep {keep}, {_winners(results, ranked)} {results.metric.title} {score(best.recovered)}{of_dense}, "
        f"{_savings(results, best)}{_rivals(results, ranked)}."
    )


def _winners(results: Results, ranked: list[CandidateResults]) -> str:
    names = [one.recipe for one in ranked if results.is_best(one)]
    if len(ranked) == 1:
        return f"{names[0]} recovers to"
    return f"{_enumerated(names)} {'recover' if len(names) > 1 else 'recovers'} best:"


def _savings(results: Results, one: CandidateResults) -> str:
    small, dense = one.evaluation.size, results.dense.size
    parameters, macs = small.model_parameters / dense.model_parameters, small.macs_per_token / dense.macs_per_token
    return (
        f"with {percent(parameters)} of the model’s parameters and {percent(macs)} of its multiply-accumulates, "
        f"{one.benchmark.speedup:.2f} times as fast"
    )


def _rivals(results: Results, ranked: list[CandidateResults]) -> str:
    """How many others the test split cannot tell from the best."""
    error, best, others = results.standard_error, ranked[0], ranked[1:]
    if error is None or not others:
        return ""
    close = sum(results.metric.worse_by(one.recovered, best.recovered) <= error for one in others)
    if len(others) == 1:
        return "; the other recipe lies within one standard error of it" if close else ""
    verb = "lies" if close == 1 else "lie"
    return f"; {close or 'none'} of the other {len(others)} recipes {verb} within one standard error of it"


def _setbacks(results: Results) -> str:
    """Recovery does not always help, and a reader of the best values alone would not see it."""
    worse = [
        one.name
        for one in results.candidates
        if one.factorized is not None and results.metric.worse_by(one.recovered, one.factorized) > 0
    ]
    if not worse:
        return ""
    which = _enumerated(worse) if len(worse) <= 3 else f"{len(worse)} of {len(results.candidates)} candidates"
    return f"Recovery worsened the {results.metric.title} of {which}."


def _chance(results: Results) -> str:
    error = results.standard_error
    if error is None:
        return ""
    return f"One standard error of the dense accuracy is about {score(error)}: differences of that order may be chance."


def _enumerated(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
