"""Summarize a study in a few sentences: the chosen candidate and why, its significance, what to ship and do next."""

from __future__ import annotations

from collections import Counter

from tasks.artifacts.results_schema import NEXT, Times
from tasks.report.choose_candidate import Chosen, GoalOutcome
from tasks.report.goals import goal_results, goal_text
from tasks.report.non_inferiority import non_inferior, verdict
from tasks.report.numbers import between, counted, score, size, times, times_between
from tasks.report.results import DENSE, TRIVIAL, CandidateResults, Results
from tasks.report.shipping import to_ship
from tasks.scoring.trivial_baseline import warning


def conclusion(results: Results) -> list[str]:
    """Return the sentences of the conclusion, with commands in backticks."""
    candidate = results.named(results.choice.nearest)
    answer = results.only_answers.get(candidate.after)
    sentences = [
        dense_warning(results),
        _choice(results, candidate),
        _best_on_test(results),
        f"{candidate.name} answers {answer} to every test example." if answer else None,
        verdict(results, candidate.after),
        _alternative(results),
        _goals(results),
        _ship(results),
        _setbacks(results),
        _next(results),
    ]
    return [sentence for sentence in sentences if sentence]


def chosen(results: Results) -> Chosen:
    """Return the choice that the conclusion names, in the form of reports/choice.json."""
    choice, other = results.choice, alternative(results)
    return Chosen(
        study=results.name,
        goals=tuple(
            GoalOutcome(
                goal=found.goal,
                recipe=found.recipe,
                met=found.met,
                candidate=found.candidate.name,
                next_keep=None if found.closer is None else float(found.closer),
            )
            for found in goal_results(results)
        ),
        candidate=choice.chosen,
        non_inferior=choice.chosen is not None and non_inferior(results, results.named(choice.chosen).after),
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
    smallest = results.smallest(candidate for candidate in able if non_inferior(results, candidate.after))
    return None if smallest is None or smallest.name == results.choice.chosen else smallest


def _choice(results: Results, candidate: CandidateResults) -> str:
    choice, validation = results.choice, results.dense.validation
    examples = counted(validation.examples, "validation example")
    if choice.chosen:
        by_chance = "; ".join(filter(None, [gate.by_chance for gate in choice.gates[candidate.name]]))
        return (
            f"`eckart promote` takes {candidate.name}. Of the candidates within the limits of promotion, it has the "
            f"best {results.metric.title} on {examples}: {score(candidate.evaluation.validation.metric)} (original "
            f"model: {score(validation.metric)}){f'; {by_chance}' if by_chance else ''}."
        )
    counts = Counter(gate.name for closed in choice.closed.values() for gate in closed)
    limits = ", ".join(f"{name} by {counted(number, 'candidate')}" for name, number in counts.most_common())
    reasons = "; ".join(gate.refusal for gate in choice.closed[candidate.name])
    return (
        f"`eckart promote` takes none: no candidate is within the limits of promotion on {examples} (limits exceeded: "
        f"{limits}). The nearest is {candidate.name}: {reasons}."
    )


def _best_on_test(results: Results) -> str | None:
    """If another candidate has the best test score, name it and say why it is not chosen."""
    within = [candidate for candidate in results.candidates if candidate.name not in results.choice.closed]
    best = min(within, key=results.best_on_test, default=None)
    if best is None or best.recovered == results.named(results.choice.nearest).recovered:
        return None
    return (
        f"On test examples, {best.name} scores better, {score(best.recovered)}. The validation examples make the "
        "choice, so that the test score of the chosen candidate is unbiased."
    )


def _goals(results: Results) -> str | None:
    """Return a sentence on the goals that candidates other than the chosen one meet; None if there are none."""
    others = [goal for goal in goal_results(results) if goal.met and goal.candidate.name != results.choice.chosen]
    if not others:
        return None
    named = "; ".join(f"{goal_text(goal.goal)}: {goal.candidate.name}" for goal in others)
    return (
        f"The goals of the study choose other candidates ({named}): `eckart promote {others[0].candidate.name}` takes "
        "that one to the gates."
    )


def _alternative(results: Results) -> str:
    if other := alternative(results):
        ends = results.difference(other.after, DENSE)
        return (
            f"Of the candidates that are small and fast enough, the smallest for which they show this is {other.name}, "
            f"{score(other.recovered)} ({between(ends.low, ends.high, other.recovered)}): "
            f"`eckart promote {other.name}` takes it to the gates."
        )
    if chosen(results).non_inferior:
        return (
            f"Of the candidates that are small and fast enough, {results.choice.chosen} is the smallest for which they "
            "show this."
        )
    return "They show this for no candidate that is small and fast enough."


def _ship(results: Results) -> str:
    ship, dense = to_ship(results), results.dense
    run, original = ship.run, ship.original
    ends, latency = results.difference(run.scored, DENSE), run.latency
    fast = _fast(latency.of_torch, "torch")
    if run.runtime != "torch":
        fast = f"{_fast(latency.of_same, 'the same runtime')}, and {fast}"
    beside = f" ({size(original.bytes)} in the same format)" if run.runtime == "int8" else ""
    return (
        f"The file to ship is `{ship.path}`. On test examples it has {results.metric.title} {score(run.metric)} "
        f"({between(ends.low, ends.high, run.metric)} vs. the original model’s {score(dense.score.metric)}). It is "
        f"{size(run.bytes)}; the original model is {size(dense.size.bytes)}{beside}. It is {fast}."
    )


def _fast(ratio: Times, where: str) -> str:
    slower = ": slower" if ratio.high < 1 else ""
    interval = times_between(ratio.low, ratio.high)
    return f"{times(ratio.median)} as fast as the original model in {where} ({interval}{slower})"


def _setbacks(results: Results) -> str | None:
    """Name the candidates that recovery fine-tuning made significantly worse."""
    scored = [candidate for candidate in results.candidates if candidate.factorized is not None]
    worse = [candidate.name for candidate in scored if results.gain(candidate.after, candidate.before) < 0]
    if not worse:
        return None
    names = ", ".join(worse) if len(worse) <= 3 else f"{len(worse)} of {len(results.candidates)} candidates"
    return f"Recovery fine-tuning significantly worsened the {results.metric.title} of {names}."


def _next(results: Results) -> str:
    ship = to_ship(results)
    command = f"`{ship.command}` {'uploads' if ship.run.runtime == 'torch' else 'writes'} the file to ship"
    if results.choice.chosen:
        return f"{NEXT}`eckart promote` makes it the champion if it passes the gates on test examples; {command}."
    return f"{NEXT}change promotion or study.keeps in params.yaml; {command} as it is."
