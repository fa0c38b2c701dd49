"""What a study comes to, in three sentences: what is best, what it costs, what to do next."""

from __future__ import annotations

from tasks.report.numbers import between, counted, percent, score, size, times, times_between
from tasks.report.results import DENSE, CandidateResults, Results


def conclusion(results: Results) -> list[str]:
    """The three sentences; commands stand between backticks."""
    best = recommended(results)
    return [_best(results, best), _cost(results, best), _next(results, best)]


def recommended(results: Results) -> CandidateResults:
    """Of the smallest keep at which a candidate loses nothing that test rows can see, the first on validation rows.

    Of all candidates where each loses something. Of equal metrics the one with fewest parameters is first, as in a
    promotion, which has limits besides.
    """
    sound = [one for one in results.candidates if _is_sound(results, one)]
    smallest = min((float(one.keep) for one in sound), default=None)
    some = [one for one in sound if float(one.keep) == smallest] or results.candidates
    goodness = results.metric.goodness
    return max(some, key=lambda one: (goodness(one.evaluation.validation.metric), -one.evaluation.target_parameters))


def _is_sound(results: Results, one: CandidateResults) -> bool:
    return results.gain(one.after, DENSE) >= 0


def _best(results: Results, best: CandidateResults) -> str:
    rows = counted(results.dense.score.rows, "test row")
    if not _is_sound(results, best):
        return f"Best is {best.name}, by validation rows; every candidate loses something that {rows} can see."
    return (
        f"Best is {best.name}: keep {best.keep} is the smallest at which a candidate loses nothing that {rows} can "
        "see, and validation rows put it first there."
    )


def _cost(results: Results, best: CandidateResults) -> str:
    dense, small, speedup = results.dense, best.evaluation.size, best.benchmark.speedup
    found = results.difference(best.after, DENSE)
    slower = ", which is slower than the dense model" if speedup.high < 1 else ""
    return (
        f"Its {results.metric.title} is {score(best.recovered)} in place of the dense model’s "
        f"{score(dense.score.metric)} ({between(found.low, found.high, best.recovered)}), and it has "
        f"{percent(small.model_parameters / dense.size.model_parameters)} of the parameters, {size(small.bytes)} in "
        f"place of {size(dense.size.bytes)}, and {times(speedup.median)} the speed "
        f"({times_between(speedup.low, speedup.high)}){slower}."
    )


def _next(results: Results, best: CandidateResults) -> str:
    name = best.name
    ship = f"`eckart export {name} {name}.onnx` writes this one as ONNX"
    if results.task.kind == "summarization":  # an encoder, a decoder and its cache are more than one ONNX graph
        ship = f"`eckart publish {name} USER/NAME` brings this one to the Hugging Face hub"
    return f"Next, `eckart promote` makes the best within the limits of params.yaml the champion, and {ship}."
