"""Results of the stages as they stand in files, and the paths of these; read without the code that measured them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

from tasks.artifacts.metrics import MetricName

TEACHER_CURVE = Path("reports/teacher.jsonl")
CONTROL_NAME = "dense + recovery"
"""Name of the control in tables, where it stands as a recipe that keeps everything."""
TRIVIAL_NAME = "trivial baseline"
"""Name in tables of a prediction that reads no input."""
CONTROL_CURVE = Path("reports/control.jsonl")
DENSE_METRICS = Path("reports/dense.json")
BENCHMARKS = Path("reports/benchmark.json")
SECONDS = Path(".eckart/seconds.json")
"""Stage → seconds of its last execution. No stage reads or writes it: two runs differ in it."""

Runtime = Literal["torch", "onnx", "int8"]
"""Software that runs a model: torch, or onnxruntime with weights in float32 or in int8."""
Which = Literal["dense", "candidate"]


def rows_file(name: str) -> Path:
    """Return the path of what each example contributed to the scores of a candidate, or of `dense` and its controls."""
    return Path(f"reports/rows/{name}.parquet")


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Score(Result):
    """The metric of the study, and the mean loss, on a split."""

    metric: float
    loss: float
    rows: int
    metrics: dict[MetricName, float]
    """All metrics of this kind of task, including `metric`."""


class Size(Result):
    """The size of a whole model; that of its target layers is always reported beside it."""

    model_parameters: int
    macs_per_token: int
    """Multiply-accumulates of a forward of one example of `max_length` tokens, attention included, ÷ its tokens.

    A decoder beside an encoder reads as many tokens, and is counted in full."""
    bytes: int


class Continuation(Result):
    """A language model's greedy continuation of the beginning of a test block."""

    beginning: str
    text: str


class Scores(Result):
    """The scores of a model that could be shipped."""

    score: Score
    """On the test split; reports and gates read it."""
    validation: Score
    """On the validation split; candidates and trials are chosen by it."""
    zero_shot: dict[str, dict[str, float]]
    """Task of lm-eval → metric → value, for the tasks in evaluate.zero_shot."""
    continuations: tuple[Continuation, ...]
    """For language models, evaluate.continuation tokens each."""


class DenseReport(Scores):
    """The scores of the original model, with which every candidate is compared."""

    size: Size
    control: Scores
    """The original model with the candidates' recovery fine-tuning."""
    trivial: float
    """The metric, on the test split, of predictions that read no input."""
    licence: dict[str, str]
    """The base model's (tasks/models/licence.py)."""
    head: str = ""
    """A sentence on what was done with the base model's head (tasks/models/task_head.py); may be empty."""


class TargetSize(Result):
    """A target layer after compression.

    Attributes:
        rank: null where it is dense.
        rows: of a residual beside the factors.
        parameters: as stored, without its bias and the indices of rows or pivots.
        loss_alone: increase of the loss when its factors alone are put into the original model, on evaluate.probes
            examples (eckart/factorization/single_target_ablation.py); null where it is dense, or where other weights
            than the original model's were factorized.
    """

    rank: int | None
    rows: int
    parameters: int
    loss_alone: float | None


class Evaluation(Result):
    """A candidate's scores, and the size of the recovered model."""

    shaped: Score | None
    """The dense model after shaping, if there was any: what is lost before anything is factorized."""
    factorized: Score | None
    """Null where a residual makes the factorized model as large as the dense one until recovery has pruned it."""
    recovered: Score
    validation: Score
    """The recovered model on the validation split; candidates and trials are chosen by it."""
    size: Size
    zero_shot: dict[str, dict[str, float]]
    """As in Scores, of the recovered model."""
    continuations: tuple[Continuation, ...]
    targets: dict[str, TargetSize]
    target_parameters: int
    """Parameters of all target layers of the recovered model."""


class ExportedFile(Result):
    """An ONNX file, scored on the test split by onnxruntime."""

    score: Score
    bytes: int


class Exports(Result):
    """The two ONNX files of a model, with float32 and with int8 weights."""

    onnx: ExportedFile
    int8: ExportedFile


class Times(Result):
    """A speedup: the median over rounds of another model's seconds ÷ this model's, with its 95 % interval."""

    median: float
    low: float
    high: float


class Latency(Result):
    """The seconds of a forward, and its speedup over the original model in torch and in the same runtime."""

    seconds: float
    of_torch: Times
    of_same: Times


Latencies = dict[Which, dict[Runtime, dict[str, Latency]]]
"""Candidate or original model → runtime → shape, as ROWSxTOKENS; both were timed in turn in one process."""


class Benchmark(Result):
    """The latencies of a candidate, by onnxruntime, too, where it is exported."""

    timed: str
    """The candidate whose forwards were timed: this one, or one whose weights have the same shapes."""
    speedup: Times
    """Over the original model in torch, at the first shape."""
    latency: Latencies


class Benchmarks(RootModel[dict[str, Benchmark]]):
    """Candidate → its benchmark."""
