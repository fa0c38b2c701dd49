"""Draw the charts of the results pages and of README.md: SVG files in docs/images/, each light and dark.

`python -m benchmarks.results` calls this. Backgrounds are transparent and text stays text, so files are small. A file
names a digest of the numbers that it shows and of this code: a chart is stale if one of them has changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import results
from benchmarks.result_files import CONTROL, NAMES, ORIGINAL, REPOSITORY, pair, read, rows
from tasks.report.rounding import rounded

IMAGES = REPOSITORY / "docs/images"
_DIGEST = re.compile(r"numbers: (\w+)")


class Theme(NamedTuple):
    text: str
    faint: str
    ours: str
    other: str
    third: str
    grid: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#0969da", "#bc4c00", "#1a7f37", "#d1d9e0"),
    "dark": Theme("#f0f6fc", "#9198a1", "#4493f8", "#f0883e", "#3fb950", "#3d444d"),
}

Numbers = Mapping[str, Any]


def _mean(values: Any) -> tuple[float, float]:
    """Return mean and sample standard deviation × 100."""
    scaled = [100 * float(value) for value in values]
    return fmean(scaled), stdev(scaled) if len(scaled) > 1 else 0.0


# numbers


def ship_numbers() -> Numbers:
    """Return size in MB, accuracy and its spread of each int8 file of studies/ship.yaml."""
    default = results.default_row()
    files = [
        ("original, default quantize_dynamic", "default", default.megabytes, default.accuracy, default.accuracy_sd)
    ]
    for task, model in results.shipped():
        own = results.exported(task, model)
        name = "original, Eckart's int8" if model == "dense" else results.title(task, model)
        kind = {"dense": "dense", "control": "control"}.get(model, task)
        files.append((name, kind, own.bytes.mean() / 1e6, *_mean(own.metric)))
    control = _mean(results.control_of(results.TASKS[0]))[0]
    return {"files": files, "control": control, "megabytes": results.megabytes(results.TASKS[0], "dense", "torch")}


def sizes_numbers() -> Numbers:
    """Return differences on movie reviews at three keeps: from the original before, from the control after."""
    return {
        step: {
            recipe: [
                [100 * value for value in pair("anchored-reviews", recipe, reference, step, keep)[:3]]
                for keep in results.KEEPS
            ]
            for recipe in recipes
        }
        for step, reference, recipes in (
            ("factorized", ORIGINAL, ("drone", "anchored")),
            ("recovered", CONTROL, ("drone", "losparse", "anchored")),
        )
    }


def methods_numbers() -> Numbers:
    """Return accuracy before and after fine-tuning of each method, at keep 0.33 on movie reviews."""
    table = read("fair-reviews")
    recipes = table[table.recipe != CONTROL].groupby("recipe").recovered.mean().sort_values().index
    shown = []
    for recipe in map(str, recipes):
        own = rows("fair-reviews", recipe)
        before = None if own.factorized.isna().any() else _mean(own.factorized)
        shown.append((NAMES[recipe], before, _mean(own.recovered)))
    control = rows("fair-reviews", CONTROL)
    return {"methods": shown, "control": _mean(control.recovered)[0], "original": _mean(control.dense)[0]}


def language_numbers() -> Numbers:
    """Return perplexities of SmolLM2 on WikiText-2 with the interval of their difference from the reference."""
    study = "smollm2-wikitext"
    control = rows(study, CONTROL).iloc[0]
    shown: dict[str, dict[str, list[tuple[float, float, float]]]] = {"factorized": {}, "recovered": {}}
    for step, reference, at in (
        ("factorized", ORIGINAL, control.dense),
        ("recovered", CONTROL, control.recovered),
    ):
        for recipe in ("drone", "kfac", "anchored"):
            values = []
            for keep in (0.8, 0.6):
                own = pair(study, recipe, reference, step, keep)
                values.append((at + own.mean, at + own.low, at + own.high))
            shown[step][recipe] = values
    return {**shown, "original": control.dense, "control": control.recovered}


# drawings


def _plain(axes: Axes, theme: Theme, grid: str = "y") -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(colors=theme.faint, labelcolor=theme.faint, length=0)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_color(theme.text)
    axes.yaxis.label.set_color(theme.text)


def _title(axes: Axes, theme: Theme, text: str) -> None:
    axes.set_title(text, loc="left", color=theme.text, fontsize=10.5, fontweight="bold", pad=10)


def _bars(axes: Axes, x: Any, y: Any, low: Any, high: Any, color: str, **style: Any) -> None:
    axes.errorbar(
        x, y, yerr=(low, high), color=color, elinewidth=1.2, capsize=2.5, markersize=6, linewidth=1.4, zorder=3, **style
    )


_AT = {  # where a label of the chart of files stands: offset in points, and alignment
    "original, default quantize_dynamic": ((10, -8), "left"),
    "original, Eckart's int8": ((10, 4), "left"),
    "original, fine-tuned like Eckart's": ((10, -14), "left"),
    "keep 0.33": ((-9, 0), "right"),
    "keep 0.1": ((-9, 0), "right"),
    "keep 0.2 with embeddings": ((8, 10), "left"),
    "keep 0.15 with embeddings": ((-8, 14), "right"),
    "keep 0.1 with embeddings": ((9, -12), "left"),
}
_GROUPS = {"linear-layers": (11.5, 82.9), "embeddings": (5.6, 82.6)}
"""Where the names of the two groups of candidates stand, in data coordinates."""


def draw_ship(figure: Figure, theme: Theme, numbers: Numbers) -> None:
    axes = figure.subplots()
    figure.set_size_inches(7.6, 3.9)
    _plain(axes, theme)
    colors = {"linear-layers": theme.ours, "embeddings": theme.ours, "control": theme.third}
    markers = {"linear-layers": "o", "embeddings": "D", "control": "s", "default": "X", "dense": "s"}
    for kind in ("linear-layers", "embeddings"):
        line = sorted((size, score) for _, own, size, score, _ in numbers["files"] if own == kind)
        axes.plot(*zip(*line, strict=True), color=theme.ours, linewidth=1, alpha=0.45, zorder=2)
        words = "linear layers\nfactorized" if kind == "linear-layers" else "linear layers and\nembeddings factorized"
        axes.text(*_GROUPS[kind], words, color=theme.ours, fontsize=8.5, fontstyle="italic", va="center")
    for name, kind, size, score, spread in numbers["files"]:
        color = colors.get(kind, theme.other)
        _bars(axes, [size], [score], [spread], [spread], color, fmt=markers[kind])
        offset, align = _AT.get(name, ((8, 8), "left"))
        label = name.removesuffix(" with embeddings").replace(", ", ",\n")
        axes.annotate(
            f"{label}\n{rounded(size)} MB",
            (size, score),
            xytext=offset,
            textcoords="offset points",
            ha=align,
            va="center",
            color=color,
            fontsize=8.5,
            linespacing=1.15,
        )
    axes.axhline(numbers["control"], color=theme.faint, linestyle=(0, (1, 2)), linewidth=1.4, zorder=1)
    axes.annotate(
        f"original, fine-tuned like Eckart's, float32: {numbers['megabytes']} MB",
        (2.35, numbers["control"]),
        xytext=(0, 5),
        textcoords="offset points",
        color=theme.faint,
        fontsize=8.5,
    )
    axes.set_xscale("log")
    axes.set_xlim(2.3, 46)
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, numbers["control"] + 0.35))
    axes.xaxis.set_major_locator(FixedLocator([2.5, 5, 10, 20]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(["2.5 MB", "5 MB", "10 MB", "20 MB"])
    axes.set_xlabel("size of the int8 file (log scale)")
    _title(axes, theme, "Accuracy on movie reviews, % (mean ± standard deviation, three seeds)")


def _line_label(axes: Axes, x: float, y: float, text: str, color: str, up: float = 0) -> None:
    axes.annotate(
        text, (x, y), xytext=(9, up), textcoords="offset points", color=color, fontsize=8.5, va="center", ha="left"
    )


def draw_sizes(figure: Figure, theme: Theme, numbers: Numbers) -> None:
    figure.set_size_inches(7.6, 3.3)
    colors = {"drone": theme.other, "losparse": theme.third, "anchored": theme.ours}
    titles = {"factorized": "Before fine-tuning, minus the original", "recovered": "After it, minus the control"}
    shifts = {"drone": -0.03, "losparse": 0.0, "anchored": 0.03}
    ups = {("recovered", "drone"): 5, ("recovered", "losparse"): -4}
    for axes, (step, series) in zip(figure.subplots(1, 2, sharey=True), numbers.items(), strict=True):
        _plain(axes, theme)
        axes.axhline(0, color=theme.faint, linewidth=1)
        for recipe, values in series.items():
            x = [place + shifts[recipe] for place in range(len(values))]
            middle, low, high = zip(*values, strict=True)
            below = [one - two for one, two in zip(middle, low, strict=True)]
            above = [two - one for one, two in zip(middle, high, strict=True)]
            _bars(axes, x, middle, below, above, colors[recipe], marker="o")
            _line_label(axes, x[-1], middle[-1], recipe_name(recipe), colors[recipe], ups.get((step, recipe), 0))
        axes.set_xticks(range(len(results.KEEPS)), [f"keep {keep:g}" for keep in results.KEEPS])
        axes.set_xlim(-0.25, 2.75)
        _title(axes, theme, titles[step])
        if step == "factorized":
            axes.set_ylabel("difference in accuracy, points")


def recipe_name(recipe: str) -> str:
    return {"drone": "DRONE", "losparse": "LoSparse"}.get(recipe, recipe)


def draw_methods(figure: Figure, theme: Theme, numbers: Numbers) -> None:
    figure.set_size_inches(7.6, 3.6)
    axes = figure.subplots()
    _plain(axes, theme, grid="x")
    axes.axvline(numbers["original"], color=theme.faint, linewidth=1, linestyle=(0, (4, 2)))
    axes.axvline(numbers["control"], color=theme.faint, linewidth=1.4, linestyle=(0, (1, 2)))
    for place, (name, before, after) in enumerate(numbers["methods"]):
        color = theme.ours if "ours" in name else theme.other
        if before is not None:
            axes.plot([before[0], after[0]], [place, place], color=color, linewidth=1, alpha=0.4)
            axes.errorbar(
                before[0],
                place,
                xerr=before[1],
                fmt="o",
                color=color,
                markerfacecolor="none",
                markersize=6,
                capsize=2.5,
            )
        axes.errorbar(after[0], place, xerr=after[1], fmt="o", color=color, markersize=6, capsize=2.5, zorder=4)
    axes.set_yticks(range(len(numbers["methods"])), [name for name, _, _ in numbers["methods"]])
    axes.tick_params(axis="y", labelcolor=theme.text)
    top = len(numbers["methods"]) - 0.35
    axes.set_ylim(-0.6, top + 0.55)
    axes.annotate(
        "original", (numbers["original"], top), xytext=(-4, 0), textcoords="offset points", ha="right",
        color=theme.faint, fontsize=8.5,
    )  # fmt: skip
    axes.annotate(
        "control", (numbers["control"], top), xytext=(4, 0), textcoords="offset points", color=theme.faint, fontsize=8.5
    )
    axes.set_xlim(45, 88)
    axes.set_xlabel("accuracy, %: open before fine-tuning, filled after it (mean ± standard deviation, three seeds)")
    _title(axes, theme, "Each method at its best, keep 0.33, movie reviews")


def draw_language(figure: Figure, theme: Theme, numbers: Numbers) -> None:
    figure.set_size_inches(7.6, 3.3)
    colors = {"drone": theme.other, "kfac": theme.third, "anchored": theme.ours}
    parts = (
        ("factorized", "original", "Before fine-tuning"),
        ("recovered", "control", "After 30 steps of fine-tuning"),
    )
    for axes, (step, reference, title) in zip(figure.subplots(1, 2, sharey=True), parts, strict=True):
        _plain(axes, theme)
        axes.axhline(numbers[reference], color=theme.faint, linestyle=(0, (1, 2)), linewidth=1.4)
        axes.annotate(
            f"{reference}: {numbers[reference]:.1f}", (-0.2, numbers[reference]), xytext=(0, -10),
            textcoords="offset points", color=theme.faint, fontsize=8.5,
        )  # fmt: skip
        for recipe, values in numbers[step].items():
            middle, low, high = zip(*values, strict=True)
            below = [one - two for one, two in zip(middle, low, strict=True)]
            above = [two - one for one, two in zip(middle, high, strict=True)]
            _bars(axes, [0, 1], middle, below, above, colors[recipe], marker="o")
            _line_label(axes, 1, middle[-1], recipe_name(recipe), colors[recipe])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator([25, 50, 100, 200]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_yticklabels(["25", "50", "100", "200"])
        axes.set_ylim(19, 215)
        axes.set_xticks([0, 1], ["keep 0.8", "keep 0.6"])
        axes.set_xlim(-0.25, 1.6)
        _title(axes, theme, title)
        if step == "factorized":
            axes.set_ylabel("perplexity (log scale), lower is better")


Chart = tuple[Callable[[], Numbers], Callable[[Figure, Theme, Numbers], None]]
CHARTS: Mapping[str, Chart] = {
    "ship": (ship_numbers, draw_ship),
    "sizes": (sizes_numbers, draw_sizes),
    "methods": (methods_numbers, draw_methods),
    "language": (language_numbers, draw_language),
}


def files(name: str) -> Sequence[str]:
    return [f"{name}-{theme}.svg" for theme in THEMES]


def digest(numbers: Numbers) -> str:
    """Return a digest of this code and of the numbers, rounded, so that it is the same on every processor."""
    text = json.dumps(numbers, default=float)
    short = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.6f}", text)
    return hashlib.sha256(Path(__file__).read_bytes() + short.encode()).hexdigest()[:16]


def svg(name: str, theme: str) -> str:
    """Return a chart as the text of an SVG file."""
    numbers, draw = CHARTS[name][0](), CHARTS[name][1]
    fonts = ["-apple-system", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans", "sans-serif"]
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "font.family": "DejaVu Sans"}
    with mpl.rc_context(settings):
        figure = Figure(layout="constrained")
        draw(figure, THEMES[theme], numbers)
        stream = io.StringIO()
        figure.savefig(
            stream,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Description": f"code and numbers: {digest(numbers)}"},
        )
    text = stream.getvalue().replace("'DejaVu Sans'", ", ".join(f"'{font}'" if " " in font else font for font in fonts))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def stale() -> list[str]:
    """Return the names of the charts whose files are missing, or of other code or numbers than there are now."""
    return [name for name in CHARTS if any(_shown(file) != digest(CHARTS[name][0]()) for file in files(name))]


def _shown(file: str) -> str | None:
    path = IMAGES / file
    found = _DIGEST.search(path.read_text()) if path.exists() else None
    return found[1] if found else None


def write(name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    for theme in THEMES:
        (IMAGES / f"{name}-{theme}.svg").write_text(svg(name, theme))
