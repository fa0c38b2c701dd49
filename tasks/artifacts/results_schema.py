"""Types and paths of the result files of stages. To read results, import only this module, not the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

from tasks.artifacts.metrics import MetricName

TEACHER_CURVE = Path("reports/teacher.jsonl")
CONTROL_NAME = "dense + recovery"
"""Name of the control in tables, which list it like a recipe that keeps all parameters."""
NEXT = "Next: "
"""Beginning of the sentence on what to do next, in reports/comparison.txt."""
TRIVIAL_NAME = "trivial baseline"
"""Name of the trivial baseline in tables: predictions that need no model."""
CONTROL_CURVE = Path("reports/control.jsonl")
DENSE_METRICS = Path("reports/dense.json")
BENCHMARKS = Path("reports/benchmark.json")
SECONDS = Path(".eckart/seconds.json")
"""File with the seconds that each stage last took. These differ between runs, so no stage reads or writes this file."""

Runtime = Literal["torch", "onnx", "int8"]
"""Software that runs a model: torch, or onnxruntime with weights in float32 or in int8."""
Which = Literal["dense", "candidate"]


def predictions_file(name: str) -> Path:
    """Return the path of the table with the results of a model on each example, from which metrics can be computed.

    `name` is a candidate, an exported model, or `dense` for the original model, the control and the trivial baseline.
    """
    return Path(f"reports/predictions/{name}.parquet")


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Score(Result):
    """Score of a model on a split: the metric of the study and the mean loss."""

    metric: float
    loss: float
    examples: int
    metrics: dict[MetricName, float]
    """All metrics of this kind of task, including `metric`."""


class Size(Result):
    """Size of a whole model. Reports always show the size of its target layers, too."""

    model_parameters: int
    macs_per_token: int
    """Multiply-accumulate operations of a forward pass of one example, attention included, ÷ its `max_length` tokens.

    The decoder of an encoder-decoder also reads `max_length` tokens, and its operations count in full."""
    bytes: int


class Continuation(Result):
    """Beginning of a test block, and the text with which a language model continues it by greedy decoding."""

    beginning: str
    text: str


class Scores(Result):
    """Scores of the original model, the control or a recovered candidate."""

    score: Score
    """Score on the test split, for reports and for the gates of a promotion."""
    validation: Score
    """Score on the validation split, for the choice of candidates and trials."""
    zero_shot: dict[str, dict[str, float]]
    """Task of lm-eval → metric → value, for the tasks in evaluate.zero_shot."""
    texts: dict[str, Score] = {}
    """Name of a text in evaluate.texts → score on it."""
    continuations: tuple[Continuation, ...]
    """Texts that a language model wrote, of at most evaluate.continuation tokens each; empty for other tasks."""


class DenseReport(Scores):
    """Scores and size of the original model, for comparison with every candidate."""

    size: Size
    control: Scores
    """Scores of the control: the original model after recovery fine-tuning."""
    trivial: float
    """Metric of the trivial baseline on the test split."""
    license: dict[str, str]
    """License and origin of the base model (tasks/models/model_license.py)."""
    head: str = ""
    """Sentence on what was done with the base model's head (tasks/models/task_head.py); may be empty."""


class TargetSize(Result):
    """Size of a target layer after compression.

    Attributes:
        rank: null if the target is dense.
        rows: number of rows of the residual that are stored beside the factors.
        parameters: number of stored parameters, without the bias and without the indices of rows or pivots.
        loss_alone: how far the original model's predictions move if only this target is replaced with its factors
            (eckart/factorization/single_target_ablation.py): the KL divergence or the squared error on evaluate.probes
            examples. It estimates the increase of the loss. Null if it was not measured: for example if the target is
            dense, or if weights other than the original model's were factorized.
    """

    rank: int | None
    rows: int
    parameters: int
    loss_alone: float | None


class Evaluation(Result):
    """Scores of a candidate after each step, and the size of the recovered model."""

    shaped: Score | None
    """Score of the dense model after shaping. Null without shaping, or if the search changed the model afterwards."""
    factorized: Score | None
    """Score before recovery. Null if there is a residual: before recovery prunes it, the model is not smaller."""
    recovered: Score
    validation: Score
    """Score of the recovered model on the validation split, for the choice of candidates and trials."""
    size: Size
    zero_shot: dict[str, dict[str, float]]
    """Zero-shot results of the recovered model, as in `Scores`."""
    texts: dict[str, Score] = {}
    """Scores of the recovered model on the texts in evaluate.texts."""
    factorized_texts: dict[str, Score] = {}
    """The same before recovery; empty if `factorized` is null."""
    continuations: tuple[Continuation, ...]
    targets: dict[str, TargetSize]
    target_parameters: int
    """Parameters of all target layers of the recovered model."""


class ExportedFile(Result):
    """Size of an ONNX file, and its scores in onnxruntime."""

    score: Score
    """Score on the test split."""
    bytes: int
    texts: dict[str, Score] = {}
    """Scores on the texts in evaluate.texts."""


class Exports(Result):
    """Results for the two ONNX files of a model, with float32 and with int8 weights."""

    onnx: ExportedFile
    int8: ExportedFile


class Times(Result):
    """Median speedup of a model over another one, with its 95 % confidence interval from `low` to `high`.

    The speedup in a round is the other model's seconds ÷ this model's seconds. The median is taken over the rounds.
    """

    median: float
    low: float
    high: float


class Latency(Result):
    """Median seconds of a forward pass, and the speedups over the original model in torch and in the same runtime."""

    seconds: float
    of_torch: Times
    of_same: Times


Latencies = dict[Which, dict[Runtime, dict[str, Latency]]]
"""`dense` or `candidate` → runtime → input shape, as ROWSxTOKENS → latency. One process times both models in turn."""


class Benchmark(Result):
    """Latencies of a candidate in torch and, if it is exported, in onnxruntime."""

    timed: str
    """The candidate that was timed: this one, or another one with weights of the same shapes."""
    speedup: Times
    """Speedup in torch over the original model in torch, at the first shape."""
    latency: Latencies
    machine: str = ""
    """Names of the processor and, if it has one, the GPU of the machine that timed it."""


class Benchmarks(RootModel[dict[str, Benchmark]]):
    """Candidate → its benchmark."""
