"""Summarize a study in a few sentences: the chosen candidate and why, its significance and cost, and the next steps."""

from __future__ import annotations

from collections import Counter

from tasks.nlp_tasks import kind_of
from tasks.report.choose_candidate import Chosen
from tasks.report.goals import goal_results, goal_text
from tasks.report.non_inferiority import non_inferior, verdict
from tasks.report.numbers import between, counted, percent, score, size, times, times_between
from tasks.report.results import DENSE, TRIVIAL, CandidateResults, Results
from tasks.scoring.trivial_baseline import warning


def conclusion(results: Results) -> list[str]:
    """Return the sentences of the conclusion, with commands in backticks."""
    candidate = results.named(results.choice.nearest)
    answer = results.only_answers.get(candidate.after)
    sentences = [
        dense_warning(results),
        _choice(results, candidate),
        _best_on_test(results),
        _goals(results),
        f"It answers {answer} to every test example." if answer else None,
        verdict(results, candidate),
        _alternative(results),
        _cost(results, candidate),
        _setbacks(results),
        _next(results, candidate),
    ]
    return [sentence for sentence in sentences if sentence]


def chosen(results: Results) -> Chosen:
    """Return the choice that the conclusion names, in the form of reports/choice.json."""
    choice, other = results.choice, alternative(results)
    return Chosen(
        candidate=choice.chosen,
        non_inferior=choice.chosen is not None and non_inferior(results, results.named(choice.chosen)),
        alternative=other and other.name,
    )


def dense_warning(results: Results) -> str | None:
    """Return a warning if the original model has hardly learned the task, because then the study says little."""
    dense, trivial = results.metric_of(DENSE), results.metric_of(TRIVIAL)
    return warning(results.task, dense, trivial, results.difference(DENSE, TRIVIAL), results.dense.score.examples)


def alternative(results: Results) -> CandidateResults | None:
    """Return the smallest non-inferior candidate within the limits of size and speed, unless it is the chosen one.

    The limit on the drop of the metric is checked later, on the test examples, when the candidate is promoted by name.
    """
    exact = {
        name: [gate for gate in gates if gate.standard_error is None] for name, gates in results.choice.gates.items()
    }
    able = [candidate for candidate in results.candidates if all(gate.passed for gate in exact[candidate.name])]
    smallest = results.smallest(candidate for candidate in able if non_inferior(results, candidate))
    return None if smallest is None or smallest.name == results.choice.chosen else smallest


def _choice(results: Results, candidate: CandidateResults) -> str:
    choice, validation = results.choice, results.dense.validation
    examples = counted(validation.examples, "validation example")
    if choice.chosen:
        by_chance = "; ".join(filter(None, [gate.by_chance for gate in choice.gates[candidate.name]]))
        return (
            f"`eckart promote` takes {candidate.name}: within the limits of promotion in params.yaml it has the best "
            f"{results.metric.title} on {examples}, {score(candidate.evaluation.validation.metric)} (original model: "
            f"{score(validation.metric)}){f'; {by_chance}' if by_chance else ''}."
        )
    counts = Counter(gate.name for closed in choice.closed.values() for gate in closed)
    limits = ", ".join(f"{name} by {counted(number, 'candidate')}" for name, number in counts.most_common())
    reasons = "; ".join(gate.refusal for gate in choice.closed[candidate.name])
    return (
        f"`eckart promote` takes none: no candidate is within the limits of promotion in params.yaml on {examples} "
        f"(limits exceeded: {limits}). The nearest is {candidate.name}: {reasons}."
    )


def _best_on_test(results: Results) -> str | None:
    """If another candidate has the best test score, name it and say why it is not chosen."""
    within = [candidate for candidate in results.candidates if candidate.name not in results.choice.closed]
    best = min(within, key=results.best_on_test, default=None)
    if best is None or best.recovered == results.named(results.choice.nearest).recovered:
        return None
    return (
        f"On test examples {best.name} scores better, {score(best.recovered)}; validation examples choose, so that the "
        "test score of the chosen model is unbiased."
    )


def _goals(results: Results) -> str | None:
    """Return a sentence on the goals that candidates other than the chosen one meet; None if there are none."""
    others = [goal for goal in goal_results(results) if goal.met and goal.candidate.name != results.choice.chosen]
    if not others:
        return None
    named = "; ".join(f"{goal_text(goal.goal)}: {goal.candidate.name}" for goal in others)
    return (
        f"The goals choose other candidates ({named}), because they take the smallest model within a drop: `eckart "
        f"promote {others[0].candidate.name}` takes that one to the gates."
    )


def _alternative(results: Results) -> str:
    if other := alternative(results):
        ends = results.difference(other.after, DENSE)
        return (
            f"The smallest candidate for which they show this is {other.name}, {score(other.recovered)} "
            f"({between(ends.low, ends.high, other.recovered)}): `eckart promote {other.name}` takes it to the gates."
        )
    if chosen(results).non_inferior:
        return f"{results.choice.chosen} is the smallest candidate for which they show this."
    return "They show this for no candidate that is small and fast enough."


def _cost(results: Results, candidate: CandidateResults) -> str:
    dense, small, speedup = results.dense, candidate.evaluation.size, candidate.benchmark.speedup
    slower = ", slower than the original model" if speedup.high < 1 else ""
    return (
        f"On test examples {candidate.name} has {results.metric.title} {score(candidate.recovered)} (original model: "
        f"{score(dense.score.metric)}). It has {percent(small.model_parameters / dense.size.model_parameters)} of the "
        f"parameters, is {size(small.bytes)} instead of {size(dense.size.bytes)}, and runs {times(speedup.median)} as "
        f"fast ({times_between(speedup.low, speedup.high)}){slower}."
    )


def _setbacks(results: Results) -> str | None:
    """Name the candidates that recovery fine-tuning made significantly worse."""
    scored = [candidate for candidate in results.candidates if candidate.factorized is not None]
    worse = [candidate.name for candidate in scored if results.gain(candidate.after, candidate.before) < 0]
    if not worse:
        return None
    names = ", ".join(worse) if len(worse) <= 3 else f"{len(worse)} of {len(results.candidates)} candidates"
    return f"Recovery fine-tuning significantly worsened the {results.metric.title} of {names}."


def _next(results: Results, candidate: CandidateResults) -> str:
    name = candidate.name
    ship = f"`eckart export {name} {name}.onnx` writes it as ONNX"
    if not kind_of(results.task).one_graph:
        ship = f"`eckart publish {name} USER/NAME` uploads it to the Hugging Face hub"
    if results.choice.chosen:
        return f"Next: `eckart promote` makes it the champion if it passes the gates on test examples; {ship}."
    return f"Next: change promotion or study.keeps in params.yaml; {ship} as it is."
