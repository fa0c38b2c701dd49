"""Time the modules of candidates and of the original model: attention, and each linear layer outside it.

    make run && python -m benchmarks.modules anchored-0.5 anchored-0.33    # a Markdown table for the study here

So are tables 4 to 6 of DRONE (Chen et al., NeurIPS 2021): one example of 128 tokens, and the milliseconds that the same
module takes in all layers together, on the GPU if there is one. Attention is a model's innermost module of that name,
with its query, key and value layers, and in most decoders also the layer behind it. An LSTM layer is one module. All
else is in the row "others".
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from statistics import median

import torch
from torch import nn
from transformers import PreTrainedModel

import eckart as eckart  # registers the format of candidates with transformers
from benchmarks.cells import ORIGINAL, parser_of_candidates
from eckart.model.batches import Batch
from eckart.model.lstm import LSTMLayer
from eckart.model.targets import Targets
from tasks.artifacts.paths import FINETUNED, TARGETS
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Benchmark, Threads
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted
from tasks.report.rounding import rounded
from tasks.scoring.timing import in_rounds

SHAPE = (1, 128)
"""Numbers of examples and tokens of the inputs, as in the paper."""
_OTHERS, _TOTAL = "others", "total"


def modules_to_time(model: PreTrainedModel, targets: Iterable[str]) -> dict[str, list[str]]:
    """Return title of a row → names of its modules, in the order of the model. A number in a name becomes `*`.

    Args:
        targets: names of the linear layers that are factorized.
    """
    whole = [name for name, module in model.named_modules() if _is_whole(module)]
    single = {name for name in targets if not any(name.startswith(f"{outer}.") for outer in whole)}
    rows: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_modules():
        if name in single or name in whole:
            rows[re.sub(r"\b\d+\b", "*", name)].append(name)
    return rows


def _is_whole(module: nn.Module) -> bool:
    inner = (type(part).__name__ for part in module.modules() if part is not module)
    is_attention = "Attention" in type(module).__name__ and not any("Attention" in name for name in inner)
    return isinstance(module, LSTMLayer) or is_attention


class Stopwatch:
    """Times the forward passes of a model, and of its modules by hooks."""

    def __init__(self, model: PreTrainedModel, rows: Mapping[str, Iterable[str]]) -> None:
        self.model = model
        self.seconds: list[dict[str, float]] = []
        """For each forward pass, title of a row → seconds."""
        for title, names in rows.items():
            for name in names:
                module = model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._add, title, -1), with_kwargs=True)
                module.register_forward_hook(partial(self._add, title, 1), with_kwargs=True)

    def _add(self, title: str, sign: int, *_: object) -> None:
        self.seconds[-1][title] += sign * self._now()

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forward(self, inputs: Batch) -> None:
        self.seconds.append(defaultdict(float))
        start = self._now()
        self.model(**inputs)
        total = self._now() - start
        self.seconds[-1] |= {_OTHERS: total - sum(self.seconds[-1].values()), _TOTAL: total}


def table(watches: Mapping[str, Stopwatch], rows: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield the lines of a Markdown table: milliseconds of each row in each model, and how much faster it is."""
    taken = {
        name: {
            row: 1e3 * median(seconds[row] for seconds in watch.seconds[-rounds:]) for row in (*rows, _OTHERS, _TOTAL)
        }
        for name, watch in watches.items()
    }
    yield f"| module | {' | '.join(f'{name}, ms' for name in watches)} |"
    yield "|---" * (1 + len(watches)) + "|"
    for row in (*rows, _OTHERS, _TOTAL):
        cells = [_cell(taken[name][row], None if name == ORIGINAL else taken[ORIGINAL][row]) for name in watches]
        yield f"| {row if row in (_OTHERS, _TOTAL) else f'`{row}`'} | {' | '.join(cells)} |"


def _cell(milliseconds: float, original: float | None) -> str:
    return f"{milliseconds:.2f}" + (f" ({rounded(original / milliseconds, 2)} ×)" if original is not None else "")


@torch.inference_mode()
def main() -> None:
    asked = parser_of_candidates(__doc__).parse_args()
    threads, rounds = section("threads", Threads).candidate, section("benchmark", Benchmark).repetitions
    auto = kind_of(load_task()).auto
    torch.set_num_threads(threads)
    folders = {ORIGINAL: TEACHER} | {name: FINETUNED / name for name in asked.candidates}
    models = {name: load(folder, auto)[0].eval() for name, folder in folders.items()}
    for model in models.values():
        to_device(model)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else counted(threads, "thread")
    targets = Targets.model_validate_json(TARGETS.read_text()).targets
    rows = modules_to_time(models[ORIGINAL], [layer.name for target in targets for layer in target.layers])
    watches = {name: Stopwatch(model, rows) for name, model in models.items()}
    forwards: dict[str, Callable[[Batch], None]] = {name: watch.forward for name, watch in watches.items()}
    in_rounds(forwards, random_inputs(models[ORIGINAL], *SHAPE), rounds)
    print("\n".join(table(watches, rows, rounds)))
    print(
        f"\n{SHAPE[0]} × {SHAPE[1]}, {where}, medians of {rounds} rounds, in torch. A row is the "
        "sum over all layers; in parentheses, how many times as fast it is as in the original."
    )


if __name__ == "__main__":
    main()
