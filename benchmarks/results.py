"""Write the tables and charts of the results pages and of README.md from the CSV files in docs/results/.

    python -m benchmarks.results             # write all pages and charts
    python -m benchmarks.results methods     # print the text `methods`
    python -m benchmarks.results --check     # write nothing; fail if a page or a chart is not up to date

In a page, a generated text stands between the comments `<!-- results: NAME -->` and `<!-- end of results -->`. All else
is written by hand. NAME is a text of TEXTS, or a number of `claims`, which may stand within a sentence.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import pandas as pd

from benchmarks.result_files import (
    CONTROL,
    NAMES,
    ORIGINAL,
    REPOSITORY,
    Difference,
    markdown,
    mean_and_spread,
    pair,
    ratio,
    read,
    rows,
)
from tasks.report.rounding import rounded

PAGES = ("README.md", *(f"docs/results/{name}.md" for name in ("index", "shipping", "claims", "papers")))
_MARKED = re.compile(r"<!-- results: ([\w. -]+?) -->.*?<!-- end of results -->", re.DOTALL)

FAIR = ("fair-reviews", "fair-sts-b")
ANCHORED = {"anchored-reviews": "movie reviews", "anchored-products": "product reviews"}
ANCHORED |= {"anchored-tweets": "tweets", "anchored-sts-b": "STS-B"}
SEVERAL_SEEDS: Mapping[str, tuple[str, str | None]] = {
    "anchored-products": ("anchored-seeds", "products"),
    "anchored-tweets": ("anchored-seeds", "tweets"),
    "anchored-sts-b": ("fair-sts-b", None),
}
"""Study of one seed → the study that has three seeds of its task, at keep 0.33 alone, and the task's name there."""
KEEPS = (0.5, 0.33, 0.2)
_STEPS = ("factorized", "recovered")


# methods: docs/results/index.md and claims.md


def _best_first(study: str) -> list[str]:
    """Return the recipes of a study, the best after recovery fine-tuning first."""
    table = read(study)
    means = table[table.recipe != CONTROL].groupby("recipe").recovered.mean()
    return [str(name) for name in means.sort_values(ascending=False, kind="stable").index]


def methods() -> str:
    """Return the table of all methods, each at its best, at keep 0.33."""
    heads = ["method", "before, %", "after, %", "after vs. control, points", "minutes"]
    heads += ["STS-B: before", "STS-B: after", "STS-B: after vs. control"]
    reviews, pairs = (rows(study, ORIGINAL) for study in FAIR)
    lines = [["original", mean_and_spread(reviews.dense), "", "", "", mean_and_spread(pairs.dense), "", ""]]
    for recipe in (CONTROL, *_best_first(FAIR[0])):
        line = [NAMES[recipe]]
        for study in FAIR:
            own = rows(study, recipe)
            line += [mean_and_spread(own[step]) if recipe != CONTROL else "" for step in _STEPS[:1]]
            line += [mean_and_spread(own.recovered)]
            line += [pair(study, recipe, CONTROL).points if recipe != CONTROL else ""]
            line += [rounded(own.seconds.mean() / 60)] if study == FAIR[0] else []
        lines.append(line)
    return markdown(heads, lines)


def _with_most_seeds(study: str, keep: float) -> tuple[str, str | None]:
    """Return the study with the most seeds of the task of `study` at `keep`, and the task's name there, or None."""
    return SEVERAL_SEEDS.get(study, (study, None)) if keep == 0.33 else (study, None)


def _pair_of_sizes(study: str, model: str, reference: str, step: str, keep: float) -> Difference:
    place, task = _with_most_seeds(study, keep)
    return pair(place, model, reference, step, keep, task)


def ties(recipe: str, step: str = "recovered") -> str:
    """List tasks and keeps at which a recipe does not differ significantly from `anchored`."""
    found = []
    for study, task in ANCHORED.items():
        differences = {keep: _pair_of_sizes(study, recipe, "anchored", step, keep) for keep in KEEPS}
        if keeps := [f"{keep:g}" for keep, difference in differences.items() if difference.low <= 0 <= difference.high]:
            found.append(f"{task} {', '.join(keeps)}")
    return "; ".join(found)


def as_good() -> str:
    """Return the paragraph about published methods that are as good as ours."""
    reviews, sts = (
        {recipe: mean_and_spread(rows(study, recipe).recovered) for recipe in ("losparse", "anchored", CONTROL)}
        for study in FAIR
    )
    after = pair("fair-reviews", "losparse", "anchored")
    fast = {recipe: ratio(rows("fair-sts-b", recipe).speedup.mean()) for recipe in ("losparse", "anchored")}
    soft = {recipe: mean_and_spread(rows("fair-softlm", recipe).factorized) for recipe in ("softlm", "kfac")}
    before, steps = pair("fair-softlm", "softlm", "kfac", "factorized"), rows("fair-softlm", "softlm").search_steps
    return _wrapped(
        f"- **LoSparse** does not differ significantly from `anchored` after fine-tuning at these keeps: "
        f"{ties('losparse')} (three seeds on movie reviews and at keep 0.33, else one).",
        f"- The same holds for DRONE before fine-tuning at {ties('drone', 'factorized')}, and after it at "
        f"{ties('drone')}.",
        f"- SoftLM at its paper's rates has {soft['softlm']} % before recovery fine-tuning, our `kfac` {soft['kfac']} "
        f"% (`anchored` was not run), a difference of {before.points} points. SoftLM's search is itself a training of "
        f"{steps.min():,} to {steps.max():,} steps.",
        "- In the two studies below, with three seeds at keep 0.33, no published method is as good after fine-tuning. "
        f"Accuracy on movie reviews in percent: LoSparse {reviews['losparse']}, `anchored` {reviews['anchored']}, the "
        f"control {reviews[CONTROL]}. LoSparse minus `anchored`: {after.points} points. Pearson correlation × 100 on "
        f"STS-B: {sts['losparse']}, {sts['anchored']} and {sts[CONTROL]}, and "
        f"{pair('fair-sts-b', 'losparse', 'anchored').points} points. On STS-B in torch, LoSparse is "
        f"{fast['losparse']} as fast as the original, `anchored` {fast['anchored']}.",
    )


def equal_cost() -> str:
    """Return the table of all methods with 6,000 training examples each."""
    study = "equal-cost"
    lines = []
    for recipe in (CONTROL, *_best_first(study)):
        own, steps = rows(study, recipe), rows(study, recipe).search_steps
        before = mean_and_spread(own.factorized) if recipe != CONTROL else ""
        line = [NAMES[recipe], before, mean_and_spread(own.recovered)]
        line += [pair(study, recipe, CONTROL).points if recipe != CONTROL else ""]
        lines.append([*line, " to ".join(dict.fromkeys((f"{steps.min():.0f}", f"{steps.max():.0f}")))])
    return markdown(["method", "before, %", "after, %", "after vs. control, points", "steps of search"], lines)


_COMPARED = (
    ("FWSVD", "weighting by Fisher information beats plain SVD", "fwsvd", "svd"),
    ("IWSVD", "weighting by a Taylor expansion beats plain SVD", "iwsvd", "svd"),
    ("DRONE", "weighting by the inputs beats plain SVD", "drone", "svd"),
    ("ARS", "learned ranks beat uniform ones (FWSVD)", "ars", "fwsvd"),
    ("LPAF (sensitivity)", "pruning before factorization beats plain SVD", "lpaf_sensitivity", "svd"),
    ("LPAF (sensitivity)", "… and DRONE", "lpaf_sensitivity", "drone"),
    ("LoSparse", "low rank plus sparse beats SVD", "losparse", "svd"),
    ("LoSparse", "… and DRONE", "losparse", "drone"),
    ("kfac (ours)", "two-sided weighting and waterfill beat DRONE", "kfac", "drone"),
    ("kfac (ours)", "… and LoSparse", "kfac", "losparse"),
    ("anchored (ours)", "… with anchoring, DRONE", "anchored", "drone"),
    ("anchored (ours)", "… LoSparse", "anchored", "losparse"),
    ("anchored (ours)", "… and kfac", "anchored", "kfac"),
)


def compared() -> str:
    """Return the table of the papers' claims, each as a difference of two recipes."""
    lines = []
    for method, claim, model, reference in _COMPARED:
        line = [method, claim]
        for study in FAIR:
            for step in _STEPS:
                # LoSparse has no small model before its training ends
                there = step == "recovered" or "losparse" not in (model, reference)
                line.append(pair(study, model, reference, step).points if there else "–")
        lines.append(line)
    heads = ["method", "claim", "reviews: before", "after", "STS-B: before", "after"]
    return markdown(heads, lines, left=2)


def softlm() -> str:
    """Return the table of SoftLM at its paper's rates."""
    study = "fair-softlm"
    lines = []
    for reference, name in ((ORIGINAL, "original"), (CONTROL, "control"), ("kfac", "kfac")):
        before = pair(study, "softlm", reference, "factorized").points if reference != CONTROL else "–"
        after = pair(study, "softlm", reference).points
        lines.append([f"SoftLM − {name}, points", before, after])
    return markdown(["difference", "before", "after"], lines)


_PARTS = (
    ("ars_unaligned", "ars", "ARS without R_align", "R_align on raw singular values (the paper's)"),
    ("ars_unaligned", "ars_normalized", "", "R_align on normalized singular values"),
    ("ars_unaligned", "ars_elements", "", "the chosen components, not as many leading ones"),
    ("ars", "ars_gates", "ARS", "free gates instead of the hypernetwork"),
    ("lpaf_sensitivity", "lpaf_base", "LPAF (sensitivity)", "an epoch of pruning from the base model"),
    ("lpaf_sensitivity", "lpaf_finetuned", "", "fine-tuning without mixed rank"),
    ("lpaf_sensitivity", "lpaf_plain_svd", "", "plain SVD"),
    ("lpaf_sensitivity", "lpaf_magnitude", "", "magnitudes as scores"),
    ("lpaf_sensitivity", "lpaf_signed", "", "signed scores (the paper's)"),
    ("losparse", "losparse_window", "LoSparse", "its authors' window"),
    ("losparse", "losparse_pruning", "", "rows alone (ITP)"),
    ("losparse", "losparse_factors", "", "factors alone"),
    ("kfac", "kfac_ars", "kfac", "ARS's ranks"),
    ("kfac", "kfac_losparse", "", "a fifth of the budget in LoSparse's rows"),
    ("kfac", "kfac_distilled", "", "distillation"),
)


def parts() -> str:
    """Return the table of methods with one part changed."""
    lines = []
    for reference, model, name, change in _PARTS:
        small = "losparse" not in model  # LoSparse has no small model before its training ends
        before = pair("variants", model, reference, "factorized", task="parts").points if small else "–"
        lines.append([name, change, before, pair("variants", model, reference, task="parts").points])
    return markdown(["method", "changed to", "before", "after"], lines, left=2)


_CLAIMED = [line for line in _COMPARED if not line[0].endswith("(ours)") and not line[1].startswith("…")]
"""Claims of the papers: the first recipe is better than the second; each at its best, and at equal cost."""
_CLAIMED_PARTS = (
    ("ARS", "R_align, as in the paper, helps", "ars", "ars_unaligned"),
    ("ARS", "the hypernetwork beats free gates", "ars", "ars_gates"),
    ("ARS", "ranks beat single components, which have no R_align", "ars", "ars_elements"),
    ("LPAF", "first-order scores beat magnitudes", "lpaf_signed", "lpaf_magnitude"),
    ("LPAF", "sparsity-aware SVD, by our scores, beats plain SVD", "lpaf_sensitivity", "lpaf_plain_svd"),
    ("LPAF", "mixed-rank fine-tuning, after our scores, helps", "lpaf_sensitivity", "lpaf_finetuned"),
    ("LoSparse", "factors beside the rows beat rows alone (ITP)", "losparse", "losparse_pruning"),
    ("LoSparse", "rows beside the factors beat factors alone", "losparse", "losparse_factors"),
)
_CLAIMED_PRUNING = (
    ("LPAF", "pruning before factorization beats plain SVD", "lpaf", "svd"),
    ("LPAF", "first-order scores beat magnitudes", "lpaf", "lpaf_magnitude"),
)
_CLAIMED_EXAMPLES = (
    ("ARS", "…, searched with 6,000 examples", "ars_6000", "fwsvd"),
    ("ARS", "6,000 examples for the search beat 4,000", "ars_6000", "ars"),
)
_CLAIMED_THRESHOLDS = (
    ("SoftLM", "learned thresholds, at its own rates, beat plain SVD", "softlm_merged", "svd"),
    ("SoftLM", "…, with frozen thresholds", "softlm_frozen", "svd"),
    ("SoftLM", "…, with one threshold for each block", "softlm_block", "svd"),
)
_CLAIMED_ROWS = (
    ("LoSparse", "factors beside the rows beat rows alone (ITP)", "losparse", "itp"),
    ("LoSparse", "… and movement pruning", "losparse", "movement_pruning"),
)


ARS_TASKS = {"mrpc": "MRPC, F1", "stsb": "STS-B, Pearson", "cola": "CoLA, Matthews", "sst2": "SST-2, accuracy"}
"""Tasks of the study ars-glue → their names and metrics."""
_ARS_WAYS = {
    "fwsvd": "FWSVD: one rank for all",
    "ars": "ARS",
    "ars_unaligned": "ARS without R_align",
    "ars_gates": "ARS without the hypernetwork",
    "ars_elements": "ARS with the masks' own components",
}


def ars_tasks() -> str:
    """Return the table of ARS and its ablations on four tasks: metrics × 100 before → after recovery fine-tuning."""
    lines = []
    for recipe, name in {CONTROL: "original → control", **_ARS_WAYS}.items():
        cells = []
        for task in ARS_TASKS:
            first = "dense" if recipe == CONTROL else "factorized"
            own = rows("ars-glue", recipe, task=task).iloc[0] if _ran("ars-glue", recipe, task) else None
            cells.append("–" if own is None else f"{rounded(100 * own[first])} → {rounded(100 * own.recovered)}")
        lines.append([name, *cells])
    return markdown(["model", *ARS_TASKS.values()], lines)


def _ran(study: str, recipe: str, task: str) -> bool:
    table = read(study)
    return bool(((table.recipe == recipe) & (table.task == task)).any())


_LOSPARSE_KEEPS = (0.2, 0.15, 0.1)
LOSPARSE_TASKS = {
    "sst2": ("SST-2", "losparse-minilm", _LOSPARSE_KEEPS),
    "cola": ("CoLA", "losparse-minilm-cola", _LOSPARSE_KEEPS),
    "mrpc": ("MRPC", "losparse-minilm-mrpc", _LOSPARSE_KEEPS),
    "sts-b": ("STS-B", "losparse-minilm-sts-b", (0.2,)),
    "sts-b-smaller": ("STS-B", "losparse-minilm-sts-b-smaller", (0.15, 0.1)),
}
"""Tasks of the study losparse-minilm that were run → their names, pages and keeps."""
_PRUNED = ("losparse", "itp", "movement_pruning")


def losparse_keeps() -> str:
    """Return the table of LoSparse and of pruning alone where little is kept, each after its only training."""
    lines = []
    for task, (name, study, keeps) in LOSPARSE_TASKS.items():
        control = rows(study, CONTROL, task=task).recovered
        head = [name, "", mean_and_spread(control), *[""] * 5]
        lines += [] if head in lines else [head]  # one of STS-B, whose two pages have the same control
        for keep in keeps:
            scores = [mean_and_spread(rows(study, recipe, keep, task).recovered) for recipe in _PRUNED]
            gains = [pair(study, _PRUNED[0], recipe, keep=keep, task=task).points for recipe in _PRUNED[1:]]
            lines.append(["", f"{keep:g}", "", *scores, *gains])
    heads = ["task", "keep", "control", *(NAMES[recipe] for recipe in _PRUNED), "vs. ITP", "vs. movement pruning"]
    return markdown(heads, lines)


def unconfirmed() -> str:
    """Return the table of the papers' claims whose difference is not significantly above 0 in our runs."""
    at_cost = (
        *_CLAIMED,
        ("SoftLM", "learned thresholds, at higher rates than its own, beat plain SVD", "softlm", "svd"),
    )
    ars = [("ars-glue", f"{name.partition(',')[0]}, keep 0.48", task) for task, name in ARS_TASKS.items()]
    ars.append(("ars-glue-short", "STS-B, keep 0.48, short search, three seeds", "stsb-short"))
    ars.append(("ars-glue-mrpc", "MRPC, keep 0.48, again", "mrpc-ablations"))
    ars.append(("ars-glue-mrpc-seeds", "MRPC, keep 0.48, three seeds", "mrpc-ablations"))
    ars.append(("ars-glue-cola", "CoLA, keep 0.48, three seeds", "cola-ablations"))
    ars.append(("ars-glue-examples", "SST-2, keep 0.48, again", "sst2-examples"))
    runs = [
        *(("fair-reviews", "reviews", None, 0.33, claim) for claim in _CLAIMED),
        *(("fair-sts-b", "STS-B", None, 0.33, claim) for claim in _CLAIMED),
        *(("equal-cost", "reviews, equal cost", None, 0.33, claim) for claim in at_cost),
        *(("variants", "reviews, parts", "parts", 0.33, claim) for claim in _CLAIMED_PARTS),
        *(
            (study, data, task, 0.48, claim)
            for study, data, task in ars
            for claim in (*_CLAIMED, *_CLAIMED_EXAMPLES, *_CLAIMED_PARTS)
            if all(_ran(study, recipe, task) for recipe in claim[2:])
        ),
        *(("softlm-parts", "SST-2, keep 0.5", None, 0.5, claim) for claim in _CLAIMED_THRESHOLDS),
        ("lpaf-glue-short", "STS-B, keep 0.25", None, 0.25, _CLAIMED_PRUNING[0]),
        *(("lpaf-glue-mrpc", "MRPC, keep 0.25", None, 0.25, claim) for claim in _CLAIMED_PRUNING),
        *(
            (study, f"{name}, keep {keep:g}", task, keep, claim)
            for task, (name, study, keeps) in LOSPARSE_TASKS.items()
            for keep in keeps
            for claim in _CLAIMED_ROWS
        ),
    ]
    lines = []
    for study, data, task, keep, (paper, claim, model, reference) in runs:
        for step, when in zip(_STEPS, ("before", "after"), strict=True):
            if step == "factorized" and "losparse" in model:  # it has no small model before its training ends
                continue
            if step == "factorized" and reference == "lpaf_finetuned":
                continue
            difference = pair(study, model, reference, step, keep, task)
            if difference.low <= 0:
                lines.append([paper, claim, f"[{data}]({study}.md)", when, difference.points])
    lines.sort(key=lambda line: line[0])
    return markdown(["paper", "claim", "data", "fine-tuning", "difference, points"], lines, left=4)


SERIES = (("drone", "factorized"), ("anchored", "factorized"))
SERIES += (("drone", "recovered"), ("losparse", "recovered"), ("anchored", "recovered"))


def sizes() -> str:
    """Return the table of differences from the original (before) and the control (after) at several keeps."""
    lines = []
    for study, task in ANCHORED.items():
        for keep in KEEPS:
            differences = [
                _pair_of_sizes(study, recipe, ORIGINAL if step == "factorized" else CONTROL, step, keep)
                for recipe, step in SERIES
            ]
            place, name = _with_most_seeds(study, keep)
            seeds = str(rows(place, "anchored", keep, name).seed.nunique())
            lines.append([task, f"{keep:g}", seeds, *(difference.points for difference in differences)])
    heads = [f"{NAMES[recipe]}, {'before' if step == 'factorized' else 'after'}" for recipe, step in SERIES]
    return markdown(["task", "keep", "seeds", *heads], lines, left=2)


def small() -> str:
    """Return the table of our recipe at keeps 0.1 and 0.05."""
    lines = []
    for keep in (0.1, 0.05):
        own = rows("small", "anchored", keep)
        before, after = (
            pair("small", "anchored", ORIGINAL, "factorized", keep),
            pair("small", "anchored", CONTROL, keep=keep),
        )
        line = [f"{keep:g}", mean_and_spread(own.factorized), before.points]
        lines.append([*line, mean_and_spread(own.recovered), after.points])
    return markdown(
        ["keep", "before, %", "before vs. original, points", "after, %", "after vs. control, points"], lines
    )


LANGUAGE = (
    ("smollm2-wikitext", "WikiText-2"),
    ("smollm2-editorials", "editorials"),
    ("smollm2-long", "WikiText-2, long"),
)


def language() -> str:
    """Return the table of perplexities of SmolLM2-135M."""
    lines = []
    for study, corpus in LANGUAGE:
        control = rows(study, CONTROL).iloc[0]
        after = f"{rounded(control.recovered)}, 1.00 ×"
        lines += [[corpus, "original", "", f"{rounded(control.dense)}, 1.00 ×", "", ""]]
        lines += [[corpus, "control", "", "", after, rounded(control.seconds / 60)]]
        for keep in sorted({*read(study).keep} - {1.0}, reverse=True):
            for recipe in ("drone", "kfac", "anchored"):
                if read(study).recipe.eq(recipe).any():
                    own = rows(study, recipe, keep).iloc[0]
                    before = f"{rounded(own.factorized)}, {ratio(own.factorized / own.dense)}"
                    after = f"{rounded(own.recovered)}, {ratio(own.recovered / own.control)}"
                    lines.append([corpus, NAMES[recipe], f"{keep:g}", before, after, rounded(own.seconds / 60)])
    heads = ["text", "model", "keep", "before, vs. original", "after, vs. control", "minutes"]
    return markdown(heads, lines, left=2)


def embedding() -> str:
    """Return the table of MiniLM as an embedding model on STS-B."""
    study = "embedding-sts-b"
    original = rows(study, ORIGINAL).iloc[0]
    lines = [["original", "", rounded(100 * original.dense), "", "", "", rounded(original.bytes / 1e6), ratio(1.0)]]
    for keep in (0.33, 0.15):
        for recipe in _best_first(study):
            own = rows(study, recipe, keep).iloc[0]
            line = [NAMES[recipe], f"{keep:g}"]
            for step in _STEPS:
                line += [rounded(100 * own[step]), pair(study, recipe, ORIGINAL, step, keep).points]
            lines.append([*line, rounded(own.bytes / 1e6), ratio(own.speedup)])
    heads = ["model", "keep", "before", "vs. original, points", "after", "vs. original, points", "MB", "speed"]
    return markdown(heads, lines, left=1)


_TEXTS = ("editorials", "news")


_NO_LANGUAGE_MODEL = 10_000
"""Perplexity above which the number itself says nothing: words drawn by their frequencies have some hundreds."""


def untrained(*studies: str) -> str:
    """Return the table of language models without fine-tuning, and how many times worse than the original they are.

    All `studies` score the same texts. A candidate of several studies is that of the first.
    """
    measured = pd.concat([read(study) for study in studies]).query("recipe != @CONTROL")
    measured = measured.drop_duplicates(["recipe", "keep", "seed"])
    return _perplexities(rows(studies[0], ORIGINAL).iloc[0], measured, "factorized")


def fine_tuned(study: str) -> str:
    """Return the same table with fine-tuning, also of the original model."""
    return _perplexities(rows(study, ORIGINAL).iloc[0], read(study), "recovered")


def _perplexities(original: pd.Series[float], measured: pd.DataFrame, step: str) -> str:
    """Return a table of perplexities; for each keep, the best on WikiText-2 is first."""
    first = [rounded(original.dense), *(rounded(original[f"dense.texts.{text}"]) for text in _TEXTS)]
    lines = [["original", "", first[0], "", *first[1:], "1.00 ×"]]
    texts = {text: f"texts.{text}" if step == "recovered" else f"{step}.texts.{text}" for text in _TEXTS}
    for _, own in measured.sort_values(["keep", step], ascending=[False, True]).iterrows():
        if own[step] > _NO_LANGUAGE_MODEL:
            cells = [f"> {_NO_LANGUAGE_MODEL:,}", "", "", ""]
        else:
            times = [1 + bound / own.dense for bound in (own.from_dense_low, own.from_dense_high)]
            others = [(own[column], own[f"dense.texts.{text}"]) for text, column in texts.items()]
            cells = [
                rounded(own[step]),
                f"{ratio(own[step] / own.dense)} ({times[0]:.2f} to {times[1]:.2f})",
                *(f"{rounded(value)}, {ratio(value / dense)}" for value, dense in others),
            ]
        lines.append([NAMES[own.recipe], f"{own.keep:g}", *cells, ratio(own.speedup)])
    columns = ["model", "keep", "WikiText-2", "vs. original", *_TEXTS, *["speed"] * bool(pd.notna(original.speedup))]
    return markdown(columns, [line[: len(columns)] for line in lines], left=1)


# files to ship: docs/results/shipping.md and README.md

TASKS = ("linear-layers", "embeddings")
MACHINES = {"A": "Zen 5, VNNI", "B": "no VNNI", "C": "Zen 4, VNNI"}
Model = tuple[str, str]
"""Task of studies/ship.yaml, and name of a model in its files."""


@cache
def exported(task: str, model: str, runtime: str = "int8") -> pd.DataFrame:
    """Return the rows of one file of studies/ship.yaml, indexed by seed; none if the model was not exported."""
    table = read(f"ship-{task}.runtimes")
    return table[(table.model == model) & (table.runtime == runtime)].set_index("seed")


def shipped() -> Iterator[Model]:
    """Yield our models with an int8 file: the original, the control if it was exported, and the candidates."""
    yield TASKS[0], "dense"
    for task in TASKS:
        names = dict.fromkeys(read(f"ship-{task}.runtimes").model)
        if task == TASKS[0] and "control" in names:
            yield task, "control"
        yield from ((task, name) for name in names if name not in ("dense", "control"))


def title(task: str, model: str) -> str:
    if model in ("dense", "control"):
        return "original" if model == "dense" else "original, fine-tuned like Eckart's"
    return f"keep {model.partition('-')[2]}" + (" with embeddings" if task == "embeddings" else "")


def original_of(task: str) -> pd.Series[float]:
    return exported(task, "dense", "torch").metric


def control_of(task: str) -> pd.Series[float]:
    """Return the accuracy of the equally fine-tuned original in torch, by seed."""
    return rows("ship", CONTROL, task=task).set_index("seed").recovered


class Speed(tuple[float, float, float]):
    """The median of several ratios, the lowest and the highest."""

    __slots__ = ()

    @property
    def text(self) -> str:
        middle, low, high = (rounded(value, 2) for value in self)
        return middle if low == high == middle else f"{middle} ({low} to {high})"


def speed(task: str, model: str, machine: str, shape: str = "8x64", reference: str = "of_same") -> Speed | None:
    """Return a file's speed ÷ the original's in the same runtime (or in torch), int8; None if it was not measured."""
    if machine == "A":
        found = exported(task, model)[f"{shape}.{reference}"]
        return None if found.isna().all() else Speed((found.median(), found.min(), found.max()))
    table = read("processors")
    name = {"of_same": "same runtime", "of_torch": "torch"}[reference]
    where = (table.machine == machine) & (table.study == f"ship, {task}") & (table.model == model)
    found = table[where & (table.runtime == "int8") & (table["shape"] == shape) & (table.reference == name)]
    if found.empty:
        return None
    line = found.iloc[0]
    return Speed((line.ratio, line.ratio, line.ratio) if pd.isna(line.low) else (line.ratio, line.low, line.high))


def across(task: str, model: str) -> str:
    """Format the range of a file's speeds over all machines that measured it: 1.53 to 1.85 ×."""
    if model == "dense":
        return ratio(1)
    medians = [found[0] for machine in MACHINES if (found := speed(task, model, machine)) is not None]
    if not medians:
        return "–"
    ends = dict.fromkeys(rounded(end, 2) for end in (min(medians), max(medians)))
    return f"{' to '.join(ends)} ×"


def of_default(task: str, model: str) -> str:
    """Format a file's speed ÷ that of onnxruntime's default `quantize_dynamic` of the original; a dash if unknown.

    The control has the original's shapes, and its speed.
    """
    table, model = read("quantize-dynamic"), "dense" if model == "control" else model
    found = table[(table.model == model) & (table.task == task)]
    return ratio(found.of_default.iloc[0]) if len(found) else "–"


def megabytes(task: str, model: str, runtime: str = "int8") -> str:
    return rounded(exported(task, model, runtime).bytes.mean() / 1e6)


def accuracy(task: str, model: str) -> str:
    return mean_and_spread(exported(task, model).metric)


def default_row() -> pd.Series:
    """Return the row of onnxruntime's default `quantize_dynamic` of the original."""
    table = read("quantize-dynamic")
    return table[table.model == "default"].iloc[0]


def ship() -> str:
    """Return the table of the int8 files of studies/ship.yaml."""
    default = default_row()
    first = ["original, default `quantize_dynamic`", rounded(default.megabytes)]
    first += [f"{rounded(default.accuracy)} ± {rounded(default.accuracy_sd)}"]
    first += [f"{rounded(default.from_dense, sign=True)} ± {rounded(default.from_dense_sd)}", "–", "–", ratio(1)]
    lines = [first]
    for task, model in shipped():
        metric = exported(task, model).metric
        name = "original, Eckart's int8" if model == "dense" else title(task, model)
        line = [name, megabytes(task, model), accuracy(task, model)]
        line += [mean_and_spread(metric - reference(task), sign=True) for reference in (original_of, control_of)]
        lines.append([*line, across(task, model), of_default(task, model)])
    heads = ["int8 file", "MB", "accuracy, %", "vs. original, points", "vs. control, points"]
    return markdown([*heads, "speed vs. original's int8", "vs. default `quantize_dynamic`"], lines)


def processors() -> str:
    """Return the table of speeds on each machine."""
    lines = []
    for task, model in shipped():
        if model not in ("dense", "control"):
            cells = [speed(task, model, machine) for machine in MACHINES]
            cells.append(speed(task, model, "A", "1x16"))
            cells.append(speed(task, model, "B", "1x16"))
            lines.append([title(task, model), *("–" if cell is None else cell.text for cell in cells)])
    heads = ["int8 file", *(f"{machine} ({what}), 8 × 64" for machine, what in MACHINES.items())]
    return markdown([*heads, "A, 1 × 16", "B, 1 × 16"], lines)


def of_torch() -> str:
    """Return the table of speeds relative to the original in torch."""
    lines = []
    for task, model in shipped():
        cells = [speed(task, model, machine, reference="of_torch") for machine in MACHINES]
        name = "original, Eckart's int8" if model == "dense" else title(task, model)
        lines.append([name, *("–" if cell is None else cell.text for cell in cells)])
    return markdown(["int8 file", *(f"{machine} ({what})" for machine, what in MACHINES.items())], lines)


def price() -> str:
    """Return the table of prices of embeddings in the rank search."""
    lines = [
        [
            *(f"{value:g}" for value in (line.price, line.keep)),
            str(line.rank_of_words),
            rounded(line.megabytes, 2),
            *(rounded(value) for value in (line.accuracy_torch, line.accuracy_int8)),
            ratio(line.of_dense_int8),
        ]
        for line in read("embedding-price").itertuples()
    ]
    heads = ["`embedding_price`", "keep", "rank of the word embedding", "MB", "torch, %", "int8, %"]
    return markdown([*heads, "speed vs. original's int8"], lines, left=0)


RUNTIMES = {"torch": "torch", "onnx": "onnxruntime", "int8": "onnxruntime, int8"}


def generation() -> str:
    """Return the table of text generation with SmolLM2."""
    lines = []
    for line in read("generation").itertuples():
        first, token = (
            f"{rounded(middle, 2)} ({rounded(low, 2)} to {rounded(high, 2)})"
            for middle, low, high in (
                (line.first_ratio, line.first_low, line.first_high),
                (line.token_ratio, line.token_low, line.token_high),
            )
        )
        times = [f"{rounded(value, 0)} → {rounded(new, 0)}" for value, new in ((line.first_dense_ms, line.first_ms),)]
        tokens = f"{rounded(line.dense_tokens_per_second, 0)} → {rounded(line.tokens_per_second, 0)}"
        lines.append([RUNTIMES[line.runtime], str(line.examples), first, *times, token, tokens])
    heads = ["runtime", "texts", "first token: speed vs. original", "ms", "later tokens: speed vs. original"]
    return markdown([*heads, "tokens per second"], lines)


def generation_files() -> str:
    """Return the table of the language model's int8 files."""
    names = {"default": "original, default `quantize_dynamic`", "dense": "original, Eckart's int8"}
    lines = [
        [names.get(line.model, "keep 0.2 with the tied embedding"), rounded(line.megabytes), rounded(line.perplexity)]
        for line in read("generation-files").itertuples()
    ]
    return markdown(["int8 file", "MB", "perplexity"], lines)


# README.md


def readme() -> str:
    """Return the table of README.md: int8 files of the original and of two candidates."""
    default = default_row()
    lines = [
        [
            "original, default `quantize_dynamic`",
            f"{rounded(default.megabytes)} MB",
            f"{rounded(default.accuracy)} ± {rounded(default.accuracy_sd)}",
            ratio(1),
            "–",
        ]
    ]
    chosen = {(TASKS[0], "anchored-0.33"), (TASKS[1], "anchored-0.15")}
    for task, model in shipped():
        if model in ("dense", "control") or (task, model) in chosen:
            ours = (task, model) in chosen
            name = {"dense": "original, Eckart's int8"}.get(model, title(task, model))
            name = f"**Eckart, {name}**" if ours else name
            size = f"{megabytes(task, model)} MB"
            lines.append([name, size, accuracy(task, model), of_default(task, model), across(task, model)])
    heads = ["int8 ONNX file", "size", "accuracy, %", "speed vs. `quantize_dynamic`"]
    return markdown([*heads, "speed vs. original's int8 by Eckart"], lines)


def claims() -> dict[str, str]:
    """Return the numbers that prose quotes, by name."""
    language_models = {recipe: rows("lm-standard", recipe, 0.6).iloc[0] for recipe in ("narrowed", "lems")}
    said = {
        f"fair.{recipe}.from-control": pair("fair-reviews", recipe, CONTROL).points
        for recipe in ("losparse", "anchored")
    }
    return said | {f"untrained.{name}": ratio(own.factorized / own.dense) for name, own in language_models.items()}


# pages

TABLES: Mapping[str, Callable[[], str]] = {
    "methods": methods,
    "equal-cost": equal_cost,
    "compared": compared,
    "softlm": softlm,
    "parts": parts,
    "ars-tasks": ars_tasks,
    "losparse-keeps": losparse_keeps,
    "unconfirmed": unconfirmed,
    "sizes": sizes,
    "small": small,
    "language": language,
    "untrained": partial(
        untrained, "lm-standard-short", "lm-standard-rows", "lm-standard-keeps", "lm-standard-refined"
    ),
    "untrained-windows": partial(untrained, "lm-standard"),
    "untrained-gemma": partial(untrained, "lm-gemma"),
    "fine-tuned-windows": partial(fine_tuned, "lm-recovered"),
    "embedding": embedding,
    "ship": ship,
    "processors": processors,
    "of-torch": of_torch,
    "price": price,
    "generation": generation,
    "generation-files": generation_files,
    "readme": readme,
}


def _table(name: str) -> str:
    rows_of = "Rows of [files to ship](docs/results/shipping.md#size-accuracy-speed): " if name == "readme" else ""
    return f"{TABLES[name]()}\n\n<sub>{rows_of}`python -m benchmarks.results {name}`</sub>"


TEXTS: Mapping[str, Callable[[], str]] = {"as-good": as_good} | {name: partial(_table, name) for name in TABLES}


def _wrapped(*paragraphs: str) -> str:
    """Break the lines of a list so that none is longer than 120 characters."""
    import textwrap

    return "\n".join(
        textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for text in paragraphs
    )


def filled(page: str) -> str:
    """Return the text of a page with all its generated parts made anew."""

    said: dict[str, str] = {}

    def part(found: re.Match[str]) -> str:
        name = found[1]
        if name in TEXTS:
            return f"<!-- results: {name} -->\n{TEXTS[name]()}\n<!-- end of results -->"
        if not said:
            said.update(claims())
        if name not in said:
            raise KeyError(f"no text or number has the name {name}; there are {', '.join([*TEXTS, *said])}")
        return f"<!-- results: {name} -->{said[name]}<!-- end of results -->"

    return _MARKED.sub(part, page)


def stale() -> dict[str, str]:
    """Return page → its text as it should be, for each page whose generated parts are not up to date."""
    made = {name: filled((REPOSITORY / name).read_text()) for name in PAGES}
    return {name: text for name, text in made.items() if text != (REPOSITORY / name).read_text()}


def main() -> None:
    from benchmarks import charts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", choices=[*TEXTS, "claims", []], help="texts to print instead")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page or chart is out of date")
    asked = parser.parse_args()
    if asked.texts:
        for name in asked.texts:
            said = [f"{key}: {value}" for key, value in claims().items()] if name == "claims" else [TEXTS[name]()]
            print(*said, sep="\n")
        return
    pages, old = stale(), charts.stale()
    if asked.check:
        sys.exit(f"not up to date: {', '.join([*pages, *old])}" if pages or old else 0)
    for name, text in pages.items():
        (REPOSITORY / name).write_text(text)
    for name in old:
        charts.write(name)
    print(f"written: {', '.join([*pages, *old]) or 'nothing; all is up to date'}")


if __name__ == "__main__":
    main()
