"""The results in plain words, all of them computed."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.report.numbers import between, count, counted, percent, score
from tasks.report.results import CONTROL, DENSE, CandidateResults, Results, ScoredModel


def summary(results: Results) -> list[str]:
    """A paragraph about the dense model, one for each keep, and one on what recovery worsened, if it did."""
    keeps = (" ".join(_best_at(results, keep)) for keep in results.keeps)
    paragraphs = [f"{_dense(results)} {parameters(results)}", *keeps, _setbacks(results)]
    return [one for one in paragraphs if one]


def _dense(results: Results) -> str:
    dense, metric = results.dense, results.metric
    return (
        f"The dense model has {count(dense.size.model_parameters)} parameters and "
        f"{counted(len(results.targets), 'target')}, and reaches {metric.title} {score(dense.score.metric)} on "
        f"{counted(dense.score.rows, 'test row')}{'; lower is better' if metric.lower_is_better else ''}. "
        f"{_control(results)}"
    )


def parameters(results: Results) -> str:
    """What the parameters of the whole dense model are, in a sentence."""
    each = [f"{count(amount)} are in {name}" for name, amount in results.census.rows]
    return f"Of its parameters {_enumerated(each)}."


def _control(results: Results) -> str:
    if not results.control_curve:
        return f"The control is this model, too: the recovery of {results.control} takes no step."
    reached = score(results.dense.control.score.metric)
    return f"With the recovery of {results.control} it reaches {reached}: this is the control."


def _best_at(results: Results, keep: str) -> Iterator[str]:
    """Who is best at `keep`, what that is beside the dense model and the control, what it saves, and who is as good."""
    ranked = results.at(keep)
    best = ranked[0]
    yield (
        f"At keep {keep}, {_winners(results, ranked)} {results.metric.title} {score(best.recovered)}"
        f"{_retained(results, best)}, {_savings(results, best)}{_rivals(results, ranked)}."
    )
    dense, control = (_verdict(results, best, reference) for reference in (DENSE, CONTROL))
    yield f"Against the dense model this is {dense}, against the control {control}."


def _retained(results: Results, one: CandidateResults) -> str:
    shares = [results.retained(one.recovered, reference) for reference in (DENSE, CONTROL)]
    if None in shares:
        return ""
    dense, control = (percent(share) for share in shares if share is not None)
    return f", {dense} of dense and {control} of the control"


def _verdict(results: Results, one: CandidateResults, reference: ScoredModel) -> str:
    """What the interval of the difference says, and nothing beyond it."""
    found = results.difference(one.after, reference)
    word = {1: "a gain", -1: "a loss", 0: "no significant difference"}[results.gain(one.after, reference)]
    return f"{word} ({between(found.low, found.high, one.recovered)})"


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
        f"{one.benchmark.speedup.median:.2f} times as fast"
    )


def _rivals(results: Results, ranked: list[CandidateResults]) -> str:
    """Which others the test rows cannot tell from the best."""
    rivals = [one.recipe for one in results.rivals(ranked[0])]
    if rivals:
        return f"; these rows cannot tell it from {_enumerated(rivals)}"
    return "; these rows tell it from every other recipe" if any(not results.is_best(one) for one in ranked) else ""


def _setbacks(results: Results) -> str:
    """Recovery does not always help, and a reader of the best values alone would not see it."""
    scored = [one for one in results.candidates if one.factorized is not None]
    worse = [one.name for one in scored if results.gain(one.after, one.before) < 0]
    if not worse:
        return ""
    which = _enumerated(worse) if len(worse) <= 3 else f"{len(worse)} of {len(results.candidates)} candidates"
    return f"Recovery worsened the {results.metric.title} of {which}, beyond what these rows leave to chance."


def _enumerated(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
