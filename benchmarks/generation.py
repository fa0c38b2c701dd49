"""Time how fast candidates of a language model generate text with cached keys and values, against the original model.

    make run && python -m benchmarks.generation anchored-0.6    # Markdown tables for the study in this folder

The models run in torch. Candidates that the study exports (`export.recipes`) also run in onnxruntime and in int8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import eckart as eckart  # registers the format of candidates with transformers
from benchmarks.cells import ORIGINAL, megabytes, parser_of_candidates, times_cell
from eckart.model.batches import Batch
from eckart.onnx import KEPT, cache_of, runner
from tasks.artifacts.paths import EXPORTS, FINETUNED, ONNX, ONNX_FILES
from tasks.artifacts.results_schema import Exports, Runtime
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Threads
from tasks.models.model_io import TEACHER, check_length, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted
from tasks.report.rounding import rounded
from tasks.report.runtimes import TITLES
from tasks.scoring.timing import ratio

Step = Callable[[Batch], tuple[Tensor, Mapping[str, Any]]]
"""A function: inputs → logits of the last token `(batch, 1, vocabulary)`, and the cache as inputs of the next step."""

BATCHES = (1, 8)
PROMPT = 128
"""Number of tokens of the prompt."""


def in_torch(model: PreTrainedModel, inputs: Batch) -> tuple[Tensor, Mapping[str, Any]]:
    outputs = model(**inputs, use_cache=True, logits_to_keep=1)
    return outputs.logits, {"past_key_values": outputs.past_key_values}


def in_onnxruntime(answer: Callable[[Batch], dict[str, Tensor]], inputs: Batch) -> tuple[Tensor, Mapping[str, Any]]:
    outputs = answer({**inputs, KEPT: torch.tensor(1)})
    return outputs["logits"], cache_of(outputs)


def steps(name: str, model: PreTrainedModel, runtimes: Sequence[Runtime], threads: int) -> dict[Runtime, Step]:
    """Return runtime → function that runs the model `name` in this runtime. Torch is always one of the runtimes."""
    files = {runtime: ONNX / name / file for runtime, file in ONNX_FILES.items() if runtime in runtimes}
    exported = {runtime: partial(in_onnxruntime, runner(file, threads)) for runtime, file in files.items()}
    return {"torch": partial(in_torch, model), **exported}


def write(step: Step, prompt: Batch, tokens: int) -> tuple[float, float]:
    """Generate tokens; return the seconds until the first token, and the mean seconds of each later token."""
    mask = prompt["attention_mask"]
    start = time.perf_counter()
    logits, cache = step(prompt)
    first = time.perf_counter()
    for _ in range(tokens):
        mask = torch.cat([mask, mask[:, :1]], 1)
        logits, cache = step({"input_ids": logits[:, -1:].argmax(-1), "attention_mask": mask, **cache})
    return first - start, (time.perf_counter() - first) / tokens


def rows_of(
    name: str, dense: dict[Runtime, Step], small: dict[Runtime, Step], prompt: Batch, tokens: int, rounds: int
) -> Iterator[str]:
    examples = len(prompt["input_ids"])
    pairs: dict[Runtime, list[tuple[tuple[float, float], tuple[float, float]]]] = {runtime: [] for runtime in small}
    for _ in range(1 + rounds):  # the first round is a warm-up
        for runtime, own in pairs.items():
            own.append((write(dense[runtime], prompt, tokens), write(small[runtime], prompt, tokens)))
    for runtime, (_, *timed) in pairs.items():
        cells = [name, TITLES[runtime], str(examples)]
        for place, unit in enumerate(("{:.0f} ms", "{:.1f}")):
            others, own_seconds = ([pair[model][place] for pair in timed] for model in (0, 1))
            times = ratio(others, own_seconds)
            shown = [1e3 * median(each) if place == 0 else examples / median(each) for each in (others, own_seconds)]
            cells += [*map(unit.format, shown), times_cell(times)]
        yield f"| {' | '.join(cells)} |"


def files_of(names: Sequence[str]) -> Iterator[str]:
    """Yield a row of a table for each exported file, with its size and its score on the test examples."""
    for name in names:
        exports = Exports.model_validate_json((EXPORTS / f"{name}.json").read_text())
        for title, file in ((TITLES["onnx"], exports.onnx), (TITLES["int8"], exports.int8)):
            model = ORIGINAL if name == "dense" else name
            yield f"| {model} | {title} | {megabytes(file.bytes)} | {rounded(file.score.metric)} |"


def bytes_of_cache(model: PreTrainedModel) -> int:
    """Return the bytes of the cached keys and values for one token of one text."""
    cache = model(**random_inputs(model, 1, 1), use_cache=True).past_key_values
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


@torch.inference_mode()
def main() -> None:
    parser = parser_of_candidates(__doc__)
    parser.add_argument("--written", type=int, default=32, help="tokens that each model writes")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in which each model writes once; at least 6")
    asked = parser.parse_args()
    task, threads = load_task(), section("threads", Threads).candidate
    if not kind_of(task).running_text:
        parser.error(f"the study in this folder is {task.kind}: its models write nothing")
    torch.set_num_threads(threads)
    auto = kind_of(task).auto
    dense = load(TEACHER, auto)[0].eval()
    check_length(dense, PROMPT + asked.written, "what is read and written")
    exported = [name for name in asked.candidates if (ONNX / name).exists()]
    own = steps("dense", dense, list(ONNX_FILES) if exported else [], threads)
    print(
        "| candidate | runtime | examples | first token: original | candidate | ÷ original "
        "| tokens per second: original | candidate | ÷ original |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in asked.candidates:
        small = load(FINETUNED / name, auto)[0].eval()
        ways = steps(name, small, list(ONNX_FILES) if name in exported else [], threads)
        for examples in BATCHES:
            prompt = random_inputs(dense, examples, PROMPT)
            for line in rows_of(name, own, ways, prompt, asked.written, asked.rounds):
                print(line, flush=True)
    if exported:
        print("\n| model | runtime | MB | perplexity |\n|---|---|---|---|")
        print(*files_of(["dense", *exported]), sep="\n")
    print(f"\n{PROMPT} tokens read, {asked.written} written, {asked.rounds} rounds; {counted(threads, 'thread')}.")
    print(f"The original model's cache has {bytes_of_cache(dense):,} bytes for each token of each example.")


if __name__ == "__main__":
    main()
