"""Draw waterfill.svg: `PYTHONPATH=. python docs/images/waterfill.py WORKSPACE > docs/images/waterfill.svg`.

WORKSPACE is the folder of a study that has gathered the calibration statistics of kfac. A bar is one block of 8 ranks
of a layer. Its height is the predicted loss that the block saves for each of its parameters, as waterfill
(eckart/ranks/waterfill.py) compares them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file

from eckart.factorization.weighted_svd import spectrum
from eckart.factorization.weightings import Kfac, weigh
from eckart.model.targets import Targets
from eckart.ranks.search_problem import losses_of_components
from eckart.ranks.waterfill import Waterfill

KEEP = 0.33
BLOCK = 8  # ranks in a bar; the default `multiple` of waterfill
SHOWN = "attention.self.value"
LEFT, TOP, WIDTH, HEIGHT, GAP, BAR = 70, 50, 120, 210, 10, 4
LOW, HIGH = -11.0, -6.0  # powers of ten at the bottom and at the top


def main(workspace: Path) -> None:
    targets = Targets.model_validate_json((workspace / "data/importance/targets.json").read_text()).targets
    kinds = ("inputs", "output_gradients", "tokens")
    statistics = {kind: load_file(workspace / f"data/importance/{kind}.safetensors") for kind in kinds}
    weights = load_file(workspace / "models/teacher/model.safetensors")
    spectra = {
        target.name: spectrum(weights[f"{target.name}.weight"], weigh(Kfac(), target, statistics)) for target in targets
    }
    ranks = Waterfill(multiple=BLOCK).ranks(targets, spectra, KEEP)
    savings, dropped = {}, []
    for target in targets:
        losses = losses_of_components(spectra[target.name].double()) / target.step
        blocks = [float(losses[start : start + BLOCK].mean()) for start in range(0, len(losses), BLOCK)]
        if (rank := ranks[target.name]) is not None and rank >= BLOCK:
            dropped.append(blocks[rank // BLOCK])
        if target.name.endswith(SHOWN):
            count = target.parameters // target.step // BLOCK  # blocks below the break-even rank
            savings[target.name] = blocks[:count]
    print("\n".join(lines(savings, ranks, max(dropped))))


def height(value: float) -> float:
    """Return the height of a bar, on a logarithmic scale."""
    return HEIGHT * min(max((math.log10(value) - LOW) / (HIGH - LOW), 0), 1)


def lines(savings: dict[str, list[float]], ranks: dict[str, int | None], level: float) -> Iterator[str]:
    right = LEFT + len(savings) * (WIDTH + GAP)
    bottom, water = TOP + HEIGHT, TOP + HEIGHT - height(level)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 20} {bottom + 78}" width="{right + 20}" '
        f'height="{bottom + 78}" role="img"\n  font-family="Helvetica, Arial, sans-serif" font-size="15" '
        'text-anchor="middle" fill="#757e8a">'
    )
    yield "  <title>Waterfill keeps the blocks of ranks that save more loss for each parameter than one level</title>"
    yield f'  <text x="{LEFT}" y="20" text-anchor="start">predicted loss that a parameter saves, logarithmic</text>'
    for power in range(int(LOW), int(HIGH) + 1):
        y = bottom - HEIGHT * (power - LOW) / (HIGH - LOW)
        yield f'  <text x="{LEFT - 8}" y="{y + 5:.0f}" text-anchor="end">10{superscript(power)}</text>'
    for number, (name, blocks) in enumerate(savings.items()):
        x = LEFT + number * (WIDTH + GAP) + (WIDTH - BAR * len(blocks)) / 2
        rank = ranks[name]
        kept = len(blocks) if rank is None else rank // BLOCK
        for color, part in (("#2f6fb3", range(kept)), ("#a9b0b9", range(kept, len(blocks)))):
            if part:
                bars = "".join(
                    f"M{x + BAR * i:.0f} {bottom}v-{height(blocks[i]):.1f}h{BAR - 1}v{height(blocks[i]):.1f}z"
                    for i in part
                )
                yield f'  <path fill="{color}" d="{bars}"/>'
        middle = LEFT + number * (WIDTH + GAP) + WIDTH / 2
        yield f'  <text x="{middle:.0f}" y="{bottom + 22}">layer {number + 1}</text>'
        what = "dense: all kept" if rank is None else f"rank {rank}"
        yield f'  <text x="{middle:.0f}" y="{bottom + 42}" font-weight="bold">{what}</text>'
    yield f'  <path d="M{LEFT} {water:.1f}H{right}" stroke="#c0641f" stroke-width="2.5"/>'
    yield (
        f'  <text x="{right}" y="20" text-anchor="end" fill="#c0641f" font-weight="bold">'
        "— water level, where the budget is spent</text>"
    )
    yield (
        f'  <text x="{(LEFT + right) / 2:.0f}" y="{bottom + 70}">'
        f"value layers of MiniLM-L6 (384 × 384), movie reviews, keep {KEEP}; a bar is {BLOCK} ranks</text>"
    )
    yield "</svg>"


def superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
