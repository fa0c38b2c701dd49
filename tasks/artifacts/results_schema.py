"""What the stages write down of a model, and where: read by other stages without the code that measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

from tasks.artifacts.metrics import MetricName

TEACHER_CURVE = Path("reports/teacher.jsonl")
CONTROL_NAME = "dense + recovery"
"""What the control is called in tables, where it stands as a recipe that keeps all."""
TRIVIAL_NAME = "trivial baseline"
"""What stands in tables for an answer that reads no input."""
CONTROL_CURVE = Path("reports/control.jsonl")
DENSE_METRICS = Path("reports/dense.json")
BENCHMARKS = Path("reports/benchmark.json")
SECONDS = Path(".eckart/seconds.json")
"""Stage → seconds that it took when it was executed. No stage reads or writes it: two runs differ in it."""

Runtime = Literal["torch", "onnx", "int8"]
"""What runs a model: torch, or onnxruntime with weights in float32 or in int8."""
Which = Literal["dense", "candidate"]


def rows_file(name: str) -> Path:
    """Of what each row contributed to the scores of a candidate, or of `dense`, its control and the baseline."""
    return Path(f"reports/rows/{name}.parquet")


class Score(BaseModel):
    """The metric that params.yaml names, and the mean loss, on a split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: float
    loss: float
    rows: int
    metrics: dict[MetricName, float]
    """All metrics of the kind of task, `metric` among them."""


class Size(BaseModel):
    """What a model costs. Both denominators are always reported: this one, and the targets' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_parameters: int
    macs_per_token: int
    """Multiply-accumulates of a forward of one row of `max_length` tokens, attention included, ÷ its tokens.

    A decoder beside an encoder reads as many tokens, and is counted in full."""
    bytes: int


class Continuation(BaseModel):
    """What a language model writes, greedily, behind the beginning of a block of the test text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    beginning: str
    text: str


class Scores(BaseModel):
    """Of a model that could be shipped."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: Score
    """On the test split, which reports and gates read."""
    validation: Score
    """On the validation rows, by which candidates and trials are chosen."""
    zero_shot: dict[str, dict[str, float]]
    """Task of lm-eval → metric → value, for those that evaluate.zero_shot names."""
    continuations: tuple[Continuation, ...]
    """Of a language model, evaluate.continuation tokens each."""


class DenseReport(Scores):
    """Of the teacher: what every candidate is compared with."""

    size: Size
    control: Scores
    """Of the teacher with the recovery that candidates get."""
    trivial: float
    """The metric, on the test split, of an answer that reads no input."""
    licence: dict[str, str]
    """Of the base model (tasks/models/licence.py)."""
    head: str = ""
    """What became of the base model's head (tasks/models/task_head.py); empty if there is nothing to say."""


class TargetSize(BaseModel):
    """What is left of a target: `rank` is null where it is dense, `rows` are those of a residual beside the factors.

    parameters: as it is stored, without its bias and the indices of rows or pivots.
    loss_alone: what its factors do in the dense model (eckart/factorization/single_target_ablation.py), on
    evaluate.probes rows; null where it has
        none, or they are of other weights than the dense model's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int | None
    rows: int
    parameters: int
    loss_alone: float | None


class Evaluation(BaseModel):
    """Scores on the test split that the teacher was scored on, and the size of the recovered model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shaped: Score | None
    """Of the dense model that shaping left, where there was any: what is lost before anything is factorized."""
    factorized: Score | None
    """Null where a residual makes the factorized model as large as the dense one until recovery has pruned it."""
    recovered: Score
    validation: Score
    """Of the recovered model, on the validation rows, by which candidates and trials are chosen."""
    size: Size
    zero_shot: dict[str, dict[str, float]]
    """Of the recovered model, as of the teacher."""
    continuations: tuple[Continuation, ...]
    """Alike."""
    targets: dict[str, TargetSize]
    target_parameters: int
    """Of all targets of the recovered model."""


class ExportedFile(BaseModel):
    """An ONNX file, scored on the test split as onnxruntime runs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: Score
    bytes: int


class Exports(BaseModel):
    """What a model was exported as, with float32 weights and with int8 ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    onnx: ExportedFile
    int8: ExportedFile


class Times(BaseModel):
    """The median over rounds of the seconds of one model ÷ those of another, and its 95 % interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float
    low: float
    high: float


class Latency(BaseModel):
    """Of a forward, and how many times as fast it is as the dense model's in torch, and in the same runtime."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    of_torch: Times
    of_same: Times


Latencies = dict[Which, dict[Runtime, dict[str, Latency]]]
"""Model → what runs it → shape, as ROWSxTOKENS: of a candidate and the dense model, in turn in one process."""


class Benchmark(BaseModel):
    """How fast a candidate is; by onnxruntime, too, where it is exported."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timed: str
    """The candidate whose forwards were timed: this one, or one whose weights have the same shapes."""
    speedup: Times
    """Over the dense model in torch, at the first shape."""
    latency: Latencies


class Benchmarks(RootModel[dict[str, Benchmark]]):
    """Of every candidate, by name."""
