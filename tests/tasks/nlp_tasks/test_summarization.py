"""Summarization: rows, batches and ROUGE by hand and by their laws, and all stages with a tiny T5 and a tiny BART."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import eckart as eckart  # teaches transformers to load the candidates
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.batches import IGNORED
from eckart.model.layers import factorize_target
from eckart.model.targets import find_targets, weight_of
from tasks.artifacts.errors import StageError
from tasks.artifacts.generation import Generation
from tasks.artifacts.results_schema import Score
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Model
from tasks.models.base_model import load_base
from tasks.models.model_io import random_inputs, size
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.summarization import lead, rouge
from tests.workspace import BASE, REVIEWS, a_task, reviews, run_stage, tiny_params, write_params

PAD, END, UNKNOWN, BEGIN = range(4)
WORDS = sorted(set(itertools.chain(*reviews()["text"].str.split(), ["positive", "negative", "summarize", ":"])))
VOCABULARY = {word: position for position, word in enumerate(["<pad>", "</s>", "<unk>", "<s>", *WORDS])}


def tokenizer() -> PreTrainedTokenizerBase:
    """A token a word, and one at the end."""
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def t5(**changes: Any) -> PreTrainedModel:
    """Weights large enough for summaries that differ from text to text."""
    config = T5Config(
        vocab_size=len(VOCABULARY),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        initializer_factor=5.0,
        pad_token_id=PAD,
        eos_token_id=END,
        **{"decoder_start_token_id": PAD, **changes},
    )
    return drawn(T5ForConditionalGeneration, config)


_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "init_std": 1.0,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "decoder_start_token_id": BEGIN,
    "forced_eos_token_id": None,
}


def bart() -> PreTrainedModel:
    return drawn(BartForConditionalGeneration, BartConfig(**_SIZES))


def blenderbot() -> PreTrainedModel:
    """Which does not shift labels itself unless they come without decoder inputs."""
    return drawn(BlenderbotForConditionalGeneration, BlenderbotConfig(**_SIZES))


def drawn(family: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return family(config).eval()


def task(max_length: int = 16, **changes: Any) -> Task:
    """Summaries have at most 6 tokens, unless `changes` say otherwise."""
    return a_task("summarization", (), "rouge1", max_length).model_copy(update={"target_length": 6, **changes})


def rows(count: int = 60) -> pd.DataFrame:
    """Reviews of differing lengths, and summaries of two or three words."""
    frame = reviews().iloc[:: 60 // count]
    texts = [text + " and dull" * (position % 4) for position, text in enumerate(frame["text"])]
    pairs = zip(frame["text"], frame["label"], strict=True)
    wanted = [
        ("the " if position % 2 else "") + f"{text.split()[1]} {label}" for position, (text, label) in enumerate(pairs)
    ]
    return pd.DataFrame({"text": texts, "label": wanted})


def ids(text: str) -> list[int]:
    return [VOCABULARY[word] for word in text.split()]


# --- ROUGE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "summary", "expected"),
    [
        # words: 2 of 4 are right of 3; pairs: none of 3 is right of 2; in order: "the" and "dull"
        ("the dull plot", "the warm fresh dull", {"rouge1": 4 / 7, "rouge2": 0, "rougeL": 4 / 7}),
        # the longest common subsequence of "a b c" and "c a b" is "a b", and one of two pairs is common
        ("plot dull cast", "cast plot dull", {"rouge1": 1, "rouge2": 1 / 2, "rougeL": 2 / 3}),
        # ROUGE-L of the whole summary; sentence by sentence, as ROUGE-Lsum has it, it were 1
        ("plot\ncast", "cast\nplot", {"rouge1": 1, "rouge2": 0, "rougeL": 1 / 2}),
        ("The endings.", "the ending", {"rouge1": 1, "rouge2": 1, "rougeL": 1}),  # stems
        ("the plot", "", {"rouge1": 0, "rouge2": 0, "rougeL": 0}),
        # words of other scripts: 1 of 2 is right of 3; accents and vowel signs are part of a word
        ("Новый закон", "новый город, дождь", {"rouge1": 2 / 5, "rouge2": 0, "rougeL": 2 / 5}),
        ("le café", "le cafe\u0301", {"rouge1": 1, "rouge2": 1, "rougeL": 1}),  # an accent of its own
        ("le café", "le cafe", {"rouge1": 1 / 2, "rouge2": 0, "rougeL": 1 / 2}),
        ("में है", "म ह", {"rouge1": 0, "rouge2": 0, "rougeL": 0}),
        # without spaces, characters: 2 of 3 are right of 2, and their pair of 2 is right of 1
        ("新法案", "法案。", {"rouge1": 4 / 5, "rouge2": 2 / 3, "rougeL": 4 / 5}),
    ],
)
def test_rouge_by_hand(reference: str, summary: str, expected: dict[str, float]) -> None:
    assert rouge([reference], [summary]).iloc[0].to_dict() == pytest.approx(expected)


def test_english_has_the_scores_of_rouge_score() -> None:
    """Also where words touch signs, and where one has three letters, which is not stemmed."""
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    reference, summary = (
        "The U.S.A.'s 2nd-best co_op (5%) dies, was flying.",
        "the U.S. dying; 2nd best co-op flies at 5",
    )
    expected = {name: score.fmeasure for name, score in scorer.score(reference, summary).items()}
    assert 0 < expected["rouge2"] < expected["rouge1"] < 1
    assert rouge([reference], [summary]).iloc[0].to_dict() == expected


# --- rows and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "document", "summary"),
    [
        ({}, "the plot is dull and flat", "the dull plot"),
        ({"max_length": 4, "target_length": 3}, "the plot is", "the dull"),
        ({"max_length": 5, "prefix": "summarize: "}, "summarize : the plot", "the dull plot"),
    ],
)
def test_documents_and_summaries_are_cut_to_their_lengths_and_end_with_the_end(
    settings: dict[str, Any], document: str, summary: str
) -> None:
    frame = pd.DataFrame({"text": ["the plot is dull and flat"], "label": ["the dull plot"]})
    row = kind_of(task(**settings)).encode(frame, tokenizer(), "test")[0]
    assert row["input_ids"] == [*ids(document), END]
    assert row["attention_mask"] == [1] * len(row["input_ids"])
    assert row["labels"] == [*ids(summary), END]


@pytest.mark.parametrize("build", [t5, blenderbot])
def test_the_decoder_reads_the_labels_shifted_to_the_right(build: Callable[[], PreTrainedModel]) -> None:
    model, data = build(), kind_of(task()).encode(rows(), tokenizer(), "test")
    examples = [data[0], data[1]]
    batch = kind_of(task()).collate(tokenizer(), model)(examples)
    for name, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        assert batch[name].shape == batch[mask].shape
    assert batch["labels"].shape == batch["decoder_input_ids"].shape
    assert (batch["decoder_attention_mask"] == (batch["labels"] != IGNORED)).all()
    start = model.config.decoder_start_token_id
    for row, labels, read, mask in zip(
        examples, batch["labels"], batch["decoder_input_ids"], batch["decoder_attention_mask"], strict=True
    ):
        assert labels[mask == 1].tolist() == row["labels"]
        assert read[mask == 1].tolist() == [start, *row["labels"][:-1]]
    assert (batch["decoder_attention_mask"] == 0).any()
    assert (batch["decoder_input_ids"] >= 0).all()


def test_a_model_that_does_not_say_how_a_summary_begins_is_an_error() -> None:
    with pytest.raises(StageError, match="decoder_start_token_id"):
        kind_of(task()).collate(tokenizer(), t5(decoder_start_token_id=None))


def test_a_model_that_would_write_another_first_token_than_it_learned_is_an_error() -> None:
    """MBart learns to begin with the last token of a summary, its language, but begins with another one by default."""
    mbart = drawn(MBartForConditionalGeneration, MBartConfig(**{**_SIZES, "decoder_start_token_id": None}))
    with pytest.raises(StageError, match="decoder_start_token_id"):
        kind_of(task()).collate(tokenizer(), mbart)


@pytest.mark.parametrize(("forced", "first"), [(None, "cast"), ("plot", "plot")])
def test_a_summary_begins_with_the_language_of_the_labels(forced: str | None, first: str) -> None:
    """As for NLLB, whose tokenizer names a language and puts its token before labels."""
    language = tokenizer()
    language.backend_tokenizer.post_processor = TemplateProcessing(
        single="cast $A </s>", special_tokens=[("cast", VOCABULARY["cast"]), ("</s>", END)]
    )
    language.tgt_lang = "cast"
    model = constant("dull", 3.0)
    model.generation_config.forced_bos_token_id = None if forced is None else VOCABULARY[forced]
    (answer,) = kind_of(task(target_length=3)).answers(model, language, pd.DataFrame({"text": ["the plot"]}), 1)
    assert answer["summary"] == f"{first} dull dull"


# --- scores ----------------------------------------------------------------------------------------------------------


def scored(model: PreTrainedModel, frame: pd.DataFrame, batch_size: int = 8, **changes: Any) -> Score:
    return kind_of(task(**changes)).score(model, tokenizer(), frame, batch_size, "test").score


def constant(word: str, odds: float) -> PreTrainedModel:
    """A BART that gives `word` so many times the probability of each other token, whatever it reads."""
    model = bart()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.final_logits_bias[0, VOCABULARY[word]] = math.log(odds)
    return model


def test_a_model_that_writes_one_word_is_scored_by_hand() -> None:
    """It writes "dull dull dull dull". Against "the dull plot": 1 of 4 and 1 of 3; against "dull": 1 of 4 and 1 of 1.

    Of the six labels, ends of summaries included, two are "dull".
    """
    odds, others = 3.0, len(VOCABULARY) - 1
    frame = pd.DataFrame({"text": ["the plot is dull", "the cast"], "label": ["the dull plot", "dull"]})
    result = scored(constant("dull", odds), frame, target_length=4)
    assert result.examples == 2
    assert result.metric == result.metrics["rouge1"] == pytest.approx((2 / 7 + 2 / 5) / 2)
    assert result.metrics["rougeL"] == pytest.approx((2 / 7 + 2 / 5) / 2)
    assert result.metrics["rouge2"] == 0
    assert result.loss == pytest.approx(math.log(odds + others) - 2 / 6 * math.log(odds), rel=1e-5)


def factorized(model: PreTrainedModel) -> PreTrainedModel:
    batch = {**random_inputs(model, 1, 4)}
    batch["decoder_attention_mask"] = torch.ones_like(batch["attention_mask"])
    for target in find_targets(model, batch).targets:
        left, right = decompose(weight_of(model.get_submodule(target.name)), ErrorNorm()).truncate(6)
        factorize_target(model, target.name, left, right)
    return model.eval()


@torch.no_grad()
def written(model: PreTrainedModel, text: str, length: int) -> str:
    """The most likely token after all before it, one at a time, without a cache and without padding."""
    read = tokenizer()(text, return_tensors="pt")
    tokens = torch.tensor([[model.config.decoder_start_token_id]])
    for _ in range(length):
        logits: Tensor = model(**read, decoder_input_ids=tokens, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        if tokens[0, -1] == END:
            break
    return tokenizer().decode(tokens[0, 1:], skip_special_tokens=True)


@pytest.mark.parametrize("build", [t5, lambda: factorized(bart())], ids=["dense", "low rank"])
def test_a_score_is_that_of_what_the_model_writes_greedily_row_by_row(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    frame = rows(12)
    texts = [written(model, text, 6) for text in frame["text"]]
    assert len(set(texts)) > 1
    frame["label"] = [text or "plot" for text in texts[:6]] + frame["label"].tolist()[6:]  # some are as written
    result = scored(model, frame, batch_size=7)
    assert result.metrics == pytest.approx(rouge(frame["label"].tolist(), texts).mean().to_dict())
    assert result.metrics["rouge1"] > 0.3


def test_beams_and_chance_of_the_model_s_own_settings_do_not_count() -> None:
    model = t5()
    expected = scored(model, rows(10))
    model.generation_config.update(num_beams=4, do_sample=True, max_length=3)
    assert scored(model, rows(10)) == expected


def test_each_text_has_one_summary_whatever_the_model_s_settings_say() -> None:
    model, kind = t5(), kind_of(task(generation=Generation(beams=4)))
    expected = kind.answers(model, tokenizer(), rows(10), 4)
    model.generation_config.update(num_beams=4, num_return_sequences=2, return_dict_in_generate=True)
    assert kind.answers(model, tokenizer(), rows(10), 4) == expected


@pytest.mark.parametrize(
    ("own", "search", "expected"),
    [
        (0.0, None, "dull dull dull dull"),
        (4.0, {"length_penalty": 0.0}, ""),
        (0.0, {"length_penalty": 4.0}, "dull dull dull dull"),
        (0.0, {}, ""),  # the model's own penalty
    ],
)
def test_beams_find_the_likeliest_summary_by_hand(own: float, search: dict[str, float] | None, expected: str) -> None:
    """The end has half the probability of "dull": the empty summary is likelier than any of more words.

    Greedily the end never comes. Divided by the fourth power of their lengths, log-probabilities rise with each word.
    """
    model = constant("dull", 1000.0)
    with torch.no_grad():
        model.final_logits_bias[0, END] = math.log(500.0)
    model.generation_config.length_penalty = own
    generation = None if search is None else Generation(beams=3, **search)
    kind = kind_of(task(target_length=4, generation=generation))
    (answer, other) = kind.answers(model, tokenizer(), rows(2), 2)
    assert answer == other == {"summary": expected}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("One. Two! Three? Four.", "One. Two! Three?"),
        ("One.\n\nTwo at 3.5 m...  Three, he said. Four", "One.\n\nTwo at 3.5 m...  Three, he said."),
        ('"One." (Two.) \u201cThree!\u201d Four.', '"One." (Two.) \u201cThree!\u201d'),
        (
            "Mr. J. Smith of St. Ives e.g. is one. Two.  and two. Three. Four.",
            "Mr. J. Smith of St. Ives e.g. is one. Two.  and two. Three.",
        ),
        ("one. two. three. four.", "one. two. three. four."),
        ("No end", "No end"),
    ],
)
def test_the_lead_is_the_first_three_sentences(document: str, expected: str) -> None:
    assert lead(document) == expected


def test_macs_count_the_decoder_too(tmp_path: Path) -> None:
    """Every linear layer of both runs once for every token; attention adds to that, but not as much again."""
    model = t5()
    model.save_pretrained(tmp_path)
    linear = sum(weight_of(part).numel() for _, part in model.named_modules() if type(part) is torch.nn.Linear)
    assert linear < size(model, tmp_path, 8).macs_per_token < 2 * linear


# --- stages ----------------------------------------------------------------------------------------------------------


def workspace(root: Path, model: PreTrainedModel, frame: pd.DataFrame, **data: Any) -> None:
    data = {"task": "summarization", "metric": "rougeL", "target_length": 6, **data}
    write_params(root, tiny_params(study={"recipes": ["kfac"]}, data=data))
    (root / REVIEWS).parent.mkdir(parents=True)
    frame.to_csv(root / REVIEWS, index=False)
    model.save_pretrained(root / BASE)
    tokenizer().save_pretrained(root / BASE)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def test_a_candidate_goes_from_texts_to_scores() -> None:
    workspace(Path(), t5(), rows(), generation={"beams": 2})
    for stage in ("extract", "teacher", "control", "dense", "calibration", "importance"):
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, "kfac", "0.5")
    targets, before, after = (
        json.loads(Path(file).read_text())
        for file in ("data/importance/targets.json", "reports/dense.json", "reports/evaluate/kfac-0.5.json")
    )
    stacks = {part for target in targets["targets"] for part in target["name"].split(".")}
    assert {"encoder", "decoder"} <= stacks
    assert "lm_head" not in stacks
    assert after["size"]["macs_per_token"] < before["size"]["macs_per_token"]
    for scores in (before["score"], after["factorized"], after["recovered"]):
        assert scores["metric"] == scores["metrics"]["rougeL"]
    model = AutoModelForSeq2SeqLM.from_pretrained("models/finetuned/kfac-0.5")
    kind, test = kind_of(task(generation=Generation(beams=2))), pd.read_parquet("data/splits/test.parquet")
    again = kind.score(model, tokenizer(), test, 5, "test").score
    assert again.metrics == pytest.approx(after["recovered"]["metrics"])
    assert again.loss == pytest.approx(after["recovered"]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("label", "named"),
    [(" ", r"\btrain\b.*\d .*\blabel\b"), (1.5, r"\blabel\b.*data\.columns\b")],
)
def test_a_summary_is_text(label: Any, named: str) -> None:
    workspace(Path(), t5(), rows().assign(label=label))
    with pytest.raises(SystemExit, match=named):
        run_stage("extract")


def test_a_summary_longer_than_the_model_writes_is_a_mistake() -> None:
    """The tiny BART has 32 positions."""
    workspace(Path(), bart(), rows(), target_length=33)
    run_stage("extract")
    with pytest.raises(SystemExit, match=r"data\.target_length"):
        run_stage("teacher")


@pytest.mark.parametrize(("prefix", "fits"), [(None, False), ("", True), ("summarize: ", True)])
def test_whether_a_prefix_that_the_model_knows_is_to_be_used_must_be_said(prefix: str | None, fits: bool) -> None:
    t5(task_specific_params={"summarization": {"prefix": "summarize: "}}).save_pretrained(BASE)
    tokenizer().save_pretrained(BASE)
    with nullcontext() if fits else pytest.raises(StageError, match=r"'summarize: '.* data\.prefix"):
        load_base(Model(base=BASE, revision=None, dtype="float32", device_map=None), task(prefix=prefix))
