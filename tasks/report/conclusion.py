"""What a study comes to, in a few sentences: which candidate is chosen and why, how sure that is, what it costs, and
what to do next."""

from __future__ import annotations

from collections import Counter

from tasks.config.promotion_limits import Chosen
from tasks.nlp_tasks import kind_of
from tasks.report.goals import asked, words
from tasks.report.non_inferiority import non_inferior, smallest, verdict
from tasks.report.numbers import between, counted, percent, score, size, times, times_between
from tasks.report.results import DENSE, TRIVIAL, CandidateResults, Results
from tasks.scoring.trivial_baseline import warning


def conclusion(results: Results) -> list[str]:
    """The sentences; commands stand between backticks."""
    one = results.named(results.choice.nearest)
    sentences = [
        teacher_warning(results),
        _choice(results, one),
        _goals(results),
        _one_answer(results, one),
        verdict(results, one),
        _alternative(results),
        _cost(results, one),
        _next(results, one),
    ]
    return [sentence for sentence in sentences if sentence]


def chosen(results: Results) -> Chosen:
    """The same for a program."""
    choice, other = results.choice, alternative(results)
    return Chosen(
        candidate=choice.chosen,
        non_inferior=choice.chosen is not None and non_inferior(results, results.named(choice.chosen)),
        alternative=other and other.name,
    )


def teacher_warning(results: Results) -> str | None:
    """Where the dense model has hardly learned the task: then nothing below says much."""
    dense, trivial = (results.metric_of(one) for one in (DENSE, TRIVIAL))
    return warning(results.task, dense, trivial, results.difference(DENSE, TRIVIAL), results.dense.score.rows)


def alternative(results: Results) -> CandidateResults | None:
    """The smallest candidate that is non-inferior and that a promotion would take by its name, where that is another.

    Which is one that is small and fast enough. Its metric is held against the limits on the test rows.
    """
    choice = results.choice
    others = {name: [gate for gate in some if gate.standard_error is None] for name, some in choice.gates.items()}
    able = [one for one in results.candidates if all(gate.passed for gate in others[one.name])]
    found = smallest(results, [one for one in able if non_inferior(results, one)])
    return None if found is None or found.name == choice.chosen else found


def _choice(results: Results, one: CandidateResults) -> str:
    choice, validation = results.choice, results.dense.validation
    rows = counted(validation.rows, "validation row")
    if choice.chosen:
        by_chance = "; ".join(filter(None, [gate.by_chance for gate in choice.gates[one.name]]))
        return (
            f"`eckart promote` takes {one.name}: of the candidates within the limits of promotion in params.yaml it "
            f"has the best {results.metric.title} on {rows}, {score(one.evaluation.validation.metric)} where the dense "
            f"model has {score(validation.metric)}{f' ({by_chance})' if by_chance else ''}."
        )
    counts = Counter(gate.name for closed in choice.closed.values() for gate in closed)
    limits = ", ".join(f"{name} of {counted(number, 'candidate')}" for name, number in counts.most_common())
    reasons = "; ".join(gate.refusal for gate in choice.closed[one.name])
    return (
        f"`eckart promote` takes none: no candidate is within the limits of promotion in params.yaml on {rows} "
        f"(beyond them: {limits}). The nearest is {one.name}: {reasons}."
    )


def _goals(results: Results) -> str | None:
    """Which goals another candidate meets, and why it is another."""
    others = [each for each in asked(results) if each.met and each.candidate.name != results.choice.chosen]
    if not others:
        return None
    named = "; ".join(f"{words(each.goal)}: {each.candidate.name}" for each in others)
    return (
        f"Goals ask for something else, of a drop the smallest candidate, and are met by others ({named}): `eckart "
        f"promote {others[0].candidate.name}` takes that one to the gates."
    )


def _one_answer(results: Results, one: CandidateResults) -> str | None:
    answer = results.only_answers.get(one.after)
    return None if answer is None else f"It answers {answer} to every test row."


def _alternative(results: Results) -> str:
    other = alternative(results)
    if other:
        found = results.difference(other.after, DENSE)
        return (
            f"The smallest of which test rows show it is {other.name}, {score(other.recovered)} "
            f"({between(found.low, found.high, other.recovered)}): `eckart promote {other.name}` takes that to the "
            "gates."
        )
    if chosen(results).non_inferior:
        return "They show it of no smaller candidate."
    return "They show it of no candidate that is small and fast enough."


def _cost(results: Results, one: CandidateResults) -> str:
    dense, small, speedup = results.dense, one.evaluation.size, one.benchmark.speedup
    slower = ", which is slower than the dense model" if speedup.high < 1 else ""
    return (
        f"The {results.metric.title} of {one.name} on test rows is {score(one.recovered)} in place of the dense "
        f"model’s {score(dense.score.metric)}, and it has "
        f"{percent(small.model_parameters / dense.size.model_parameters)} of the parameters, {size(small.bytes)} in "
        f"place of {size(dense.size.bytes)}, and {times(speedup.median)} the speed "
        f"({times_between(speedup.low, speedup.high)}){slower}."
    )


def _next(results: Results, one: CandidateResults) -> str:
    name = one.name
    ship = f"`eckart export {name} {name}.onnx` writes {name} as ONNX"
    if not kind_of(results.task).one_graph:
        ship = f"`eckart publish {name} USER/NAME` brings {name} to the Hugging Face hub"
    if results.choice.chosen:
        return f"Next, `eckart promote` makes it the champion, if it passes the gates on test rows, and {ship}."
    return f"Next, change promotion or study.keeps in params.yaml; {ship} as it is."
