"""Language modeling: blocks and perplexity by hand and by their laws, GGUF files, and all stages with a tiny LLaMA."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import eckart as eckart  # teaches transformers to load the candidates
from eckart.model.targets import Targets, Tied
from tasks.artifacts.errors import StageError
from tasks.artifacts.paths import TARGETS
from tasks.artifacts.task_spec import Task, load_split, load_task, load_texts
from tasks.config.schema import Model
from tasks.data.loading import encoded
from tasks.extract import extract
from tasks.models.base_model import load_base
from tasks.models.causality import check_causal
from tasks.nlp_tasks import kind_of, language_modeling
from tasks.scoring.bootstrap import RESAMPLES, resampled
from tasks.scoring.splits import load_scorer
from tasks.teacher import teacher
from tests import tiny
from tests.workspace import a_task, reviews, run_stage, run_study, tiny_params, write_params

ALPHABET = sorted(ByteLevel.alphabet())
END = len(ALPHABET)
TEXT = " ".join(reviews()["text"])
BASE = "models/base/tiny"


def tokenizer() -> PreTrainedTokenizerBase:
    """A token a byte."""
    letters = Tokenizer(BPE({letter: position for position, letter in enumerate([*ALPHABET, "</s>"])}, []))
    letters.pre_tokenizer = ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", pad_token="</s>")


def model(seed: int = 0, layers: int = 2) -> PreTrainedModel:
    """Weights large enough for blocks to differ."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=END + 1, max_position_embeddings=64, initializer_range=0.5, **sizes)
    config.pad_token_id = config.eos_token_id = END
    config.num_key_value_heads, config.tie_word_embeddings = 1, True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def task(length: int = 8, sizes: dict[str, int] | None = None, **options: Any) -> Task:
    sizes = sizes or dict.fromkeys(("train", "validation", "test", "calibration"), 1000)
    return a_task("language_modeling", (), "perplexity", length).model_copy(update={"sizes": sizes, **options})


def rows(*texts: str) -> pd.DataFrame:
    return pd.DataFrame({"text": list(texts)})


class TestBlocks:
    def test_by_hand(self) -> None:
        """Two rows, an empty line between them, four tokens a block; the odd one at the end is dropped."""
        data = kind_of(task(4)).encode(rows("abc", "defgh"), tokenizer(), "test")
        ids = tokenizer()("abc\n\ndefgh")["input_ids"]
        assert data["input_ids"] == [ids[:4], ids[4:8]]
        assert data["labels"] == data["input_ids"]
        assert data["attention_mask"] == [[1] * 4] * 2

    def test_tokenized_in_pieces_it_is_the_same_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        frame = reviews()
        whole = kind_of(task()).encode(frame, tokenizer(), "test")
        monkeypatch.setattr(language_modeling, "_CHARACTERS", 300)
        assert kind_of(task()).encode(frame, tokenizer(), "test")["input_ids"] == whole["input_ids"]

    def test_calibration_sees_blocks_of_the_training(self) -> None:
        spec = task(8, {"train": 20, "test": 5, "calibration": 6})
        train, calibration, test, other = (
            [
                tuple(ids)
                for ids in kind_of(spec.model_copy(update={"seed": seed})).encode(rows(TEXT), tokenizer(), split)[
                    "input_ids"
                ]
            ]
            for split, seed in (("train", 0), ("calibration", 0), ("test", 0), ("train", 1))
        )
        assert (len(train), len(calibration), len(test)) == (20, 6, 5)
        assert set(calibration) <= set(train)
        assert train != other

    def test_random_calibration_blocks_are_windows_of_the_text_and_more_of_them_begin_with_the_same(self) -> None:
        """There may be more of them than fit into the text side by side."""
        text = tokenizer()("abc\n\ndefgh")["input_ids"]
        few, many, other = (
            kind_of(task(4, {"train": 1, "calibration": count}, calibration_blocks="random", seed=seed)).encode(
                rows("abc", "defgh"), tokenizer(), "calibration"
            )["input_ids"]
            for count, seed in ((5, 0), (90, 0), (90, 1))
        )
        assert many[:5] == few
        assert {tuple(block) for block in many} == {tuple(text[place : place + 4]) for place in range(7)}
        assert sorted(other) != sorted(many)

    @pytest.mark.parametrize(
        ("separator", "joined"), [("</s>", "abc</s>defgh</s>i"), ("", "abcdefghi"), ("\n", "abc\n\ndefgh\ni")]
    )
    def test_what_stands_between_rows(self, separator: str, joined: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """White space, also around an empty row, or a token, which ends a document: an empty row is none."""
        for at_a_time in (1, 10_000):
            monkeypatch.setattr(language_modeling, "_CHARACTERS", at_a_time)
            data = kind_of(task(3, separator=separator)).encode(rows("abc", "", "defgh", "i"), tokenizer(), "test")
            ids = tokenizer()(joined)["input_ids"]
            assert data["input_ids"] == [ids[place : place + 3] for place in range(0, len(ids) - 2, 3)]

    def test_long_rows_are_tokenized_by_themselves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokenizing takes 100 times the memory of the text."""
        monkeypatch.setattr(language_modeling, "_CHARACTERS", 20)
        portions = [*language_modeling._portions(["abc", "a" * 30, "b" * 20, "de", "f"])]
        assert portions == [["abc"], ["a" * 30], ["b" * 20], ["de", "f"]]

    def test_a_separator_that_is_no_token_is_an_error_that_names_those_that_are(self) -> None:
        with pytest.raises(StageError, match=r"<eos>.*</s>"):
            kind_of(task(separator="<eos>")).encode(rows("abc"), tokenizer(), "test")

    def test_a_text_shorter_than_a_block_is_an_error_that_says_so(self) -> None:
        with pytest.raises(StageError, match=r"\btest\b.*\b3\b.*data\.max_length=8"):
            kind_of(task(8)).encode(rows("abc"), tokenizer(), "test")


class TestFirstToken:
    """The beginning-of-text token, here number END."""

    @staticmethod
    def letters() -> PreTrainedTokenizerBase:
        beginning = tokenizer()
        beginning.bos_token = "</s>"
        return beginning

    @pytest.mark.parametrize("stride", [None, 2])
    def test_it_takes_the_place_of_the_first_of_each_block_and_of_each_scored_window(self, stride: int | None) -> None:
        llama, letters, spec = model(), self.letters(), task(8, first="bos", stride=stride)
        ids = torch.tensor(letters(TEXT[:30])["input_ids"])
        blocks = torch.cat([torch.full((3, 1), END), ids[:24].view(3, 8)[:, 1:]], 1)
        for split in ("train", "calibration", "test"):
            data = kind_of(spec).encode(rows(TEXT[:30]), letters, split)
            assert data["input_ids"] == data["labels"] == blocks.tolist()
        losses = []
        for end in range(8, 31, stride or 8):
            window = torch.cat([torch.tensor([END]), ids[end - 7 : end]])[None]
            with torch.no_grad():
                logits = llama(input_ids=window).logits[0, :-1]
            scored = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none")
            losses.append(scored if end == 8 or stride is None else scored[-stride:])
        score = kind_of(spec).score(llama, letters, rows(TEXT[:30]), 4, "test").score
        assert score.loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)

    def test_an_answer_is_about_all_tokens_of_a_text(self) -> None:
        llama, letters, spec = model(), self.letters(), task(8, first="bos")
        text = TEXT[:5]
        ids = torch.tensor([[END, *letters(text)["input_ids"]]])
        (answer,) = kind_of(spec).answers(llama, letters, rows(text), 4, continuation=3)
        with torch.no_grad():
            assert answer["loss"] == pytest.approx(float(llama(input_ids=ids, labels=ids).loss), rel=1e-5)
            written = llama.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        assert answer["continuation"] == letters.decode(written, skip_special_tokens=True)

    def test_a_continuation_depends_neither_on_the_batch_nor_on_penalties(self) -> None:
        """The model's own settings would count padding as text that was written before."""
        llama, letters, spec = model(), self.letters(), task(8, first="bos")
        texts = [TEXT[:length] for length in (1, 3, 6)]
        plain = [kind_of(spec).answers(llama, letters, rows(text), 1, continuation=6)[0] for text in texts]
        llama.generation_config.update(repetition_penalty=3.0, no_repeat_ngram_size=1, max_length=2)
        seen = set[float]()  # by other requests of a server in the meantime
        llama.model.register_forward_hook(lambda *_: seen.add(llama.generation_config.repetition_penalty))
        together = kind_of(spec).answers(llama, letters, rows(*texts), 3, continuation=6)
        assert [answer["continuation"] for answer in together] == [answer["continuation"] for answer in plain]
        assert seen == {3.0}

    def test_an_end_that_is_a_letter_is_written_once(self) -> None:
        """Texts of a batch that end early are filled up with what `decode` leaves out."""
        llama, letters, spec = model(), self.letters(), task(8, first="bos")
        texts = [TEXT[:length] for length in (1, 3, 6)]
        written = [kind_of(spec).answers(llama, letters, rows(text), 1, continuation=6)[0] for text in texts]
        end = next(letter for answer in written for letter in answer["continuation"][1:] if letter.isascii())
        llama.generation_config.eos_token_id = letters(end)["input_ids"]
        alone = [kind_of(spec).answers(llama, letters, rows(text), 1, continuation=6)[0] for text in texts]
        together = kind_of(spec).answers(llama, letters, rows(*texts), 3, continuation=6)
        assert [answer["continuation"] for answer in together] == [answer["continuation"] for answer in alone]
        assert any(answer["continuation"].endswith(end) for answer in alone)

    def test_a_tokenizer_without_it_is_an_error(self) -> None:
        with pytest.raises(StageError, match=r"data\.first"):
            kind_of(task(8, first="bos")).encode(rows(TEXT), tokenizer(), "test")


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_perplexity_is_e_to_the_mean_loss_and_finite(scale: float) -> None:
    """The size of the vocabulary for a model that knows nothing."""
    llama = model()
    with torch.no_grad():
        llama.lm_head.weight.mul_(scale)
    score = kind_of(task()).score(llama, tokenizer(), rows(TEXT), 4, "test").score
    assert score.metric == pytest.approx(math.exp(min(score.loss, 700)))
    if not scale:
        assert score.metric == pytest.approx(END + 1, rel=1e-5)


class TestStride:
    @pytest.mark.parametrize("stride", [1, 3, 7])
    def test_every_token_is_scored_once_after_all_that_its_window_holds(self, stride: int) -> None:
        """By a model for each token: the loss of a token after the tokens of its window. The rest is dropped."""
        llama, length = model(), 8
        ids = torch.tensor(tokenizer()(TEXT[:40])["input_ids"])
        ends = range(length, len(ids) + 1, stride)
        expected = []
        for end in ends:
            with torch.no_grad():
                logits = llama(input_ids=ids[None, end - length : end]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[end - length + 1 : end], reduction="none")
            expected.append(losses if end == length else losses[-stride:])
        assert sum(map(len, expected)) == ends[-1] - 1
        scored = kind_of(task(length, stride=stride)).score(llama, tokenizer(), rows(TEXT[:40]), 4, "test")
        assert scored.score.loss == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)
        assert scored.predictions["tokens"].tolist() == [len(losses) for losses in expected]

    def test_a_sample_of_windows_keeps_the_context_of_each(self) -> None:
        """And the intervals draw windows, each with the number of tokens that it scores."""
        scored, sizes = [], {"train": 1000, "test": 4}
        for spec in (task(8, stride=3), task(8, sizes, stride=3)):
            scored.append(kind_of(spec).score(model(), tokenizer(), rows(TEXT[:60]), 4, "test"))
        whole, sample = (each.predictions for each in scored)
        assert len(sample) == 4
        assert {tuple(row) for row in sample.round(4).to_numpy()} < {tuple(row) for row in whole.round(4).to_numpy()}
        draws = resampled(task(8, stride=3), {"whole": whole})["whole"]
        drawn = np.random.default_rng(0).integers(len(whole), size=(RESAMPLES, len(whole)))[0]
        chosen = whole.iloc[drawn]
        assert draws[0] == pytest.approx(math.exp((chosen.loss * chosen.tokens).sum() / chosen.tokens.sum()))

    def test_it_changes_what_is_scored_and_not_what_is_trained_or_calibrated(self) -> None:
        for split in ("train", "validation", "calibration"):
            blocks, other = (
                kind_of(spec).encode(rows(TEXT), tokenizer(), split)["labels"] for spec in (task(), task(stride=2))
            )
            assert blocks == other


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Running text and a tiny LLaMA of one layer, as the exporter takes seconds for each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    model(layers=1).save_pretrained(BASE)
    tokenizer().save_pretrained(BASE)
    Path("data/raw").mkdir(parents=True)
    Path("data/raw/text.txt").write_text("\n".join(lines(30)))
    write_params(tmp_path, params())
    return tmp_path


def lines(times: int) -> list[str]:
    """The reviews so many times, each row with the number of the time: 2,700 characters each time."""
    return [f"{number} {line}" for number in range(times) for line in reviews()["text"]]


def params(**data: Any) -> dict[str, Any]:
    read = {"source": "data/raw/text.txt", "columns": {"text": "text", "text_pair": None, "label": None}}
    sizes = {"train": 40, "validation": 5, "test": 6, "calibration": 8}
    learn = {"task": "language_modeling", "metric": "perplexity", "max_length": 12, "sizes": sizes}
    return tiny_params(data={**read, **learn, **data}, study={"recipes": ["svd", "kfac"]}, teacher={"epochs": 1})


def encoder(**options: Any) -> PreTrainedModel:
    ids = {"vocab_size": END + 1, "pad_token_id": END}
    return tiny.build("BertLMHeadModel", **ids, **tiny.LAYERS, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_read_what_they_are_to_predict_are_found(dtype: torch.dtype) -> None:
    bart = tiny.build("BartForCausalLM", vocab_size=END + 1, d_model=16, decoder_layers=1, decoder_attention_heads=2)
    for causal in (model(), encoder(is_decoder=True), bart):
        check_causal(causal.to(dtype))
    xlm = tiny.build("XLMWithLMHeadModel", vocab_size=END + 1, emb_dim=16, n_layers=2, n_heads=2)
    for reading in (encoder(), xlm):
        with pytest.raises(StageError, match="decoder"):
            check_causal(reading.to(dtype))


@pytest.mark.parametrize("name", ["BartForCausalLM", "LlamaForCausalLM"])
def test_the_loss_is_that_of_the_next_token_whatever_the_model_returns(name: str) -> None:
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    decoder = tiny.build(name, vocab_size=END + 1, **sizes).eval() if name.startswith("Bart") else model()
    ids = torch.arange(3 * 7).reshape(3, 7)
    expected = cross_entropy(decoder(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) * 3
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    torch.testing.assert_close(kind_of(task()).objective().training_loss(decoder, batch), expected)


class TestStages:
    def test_an_encoder_is_no_language_model(self, workspace: Path) -> None:
        encoder().save_pretrained(BASE)
        run_stage("extract")
        with pytest.raises(StageError, match=r"BertLMHeadModel.*is_decoder"):
            teacher()

    def test_passages_of_the_text_are_carved_and_stay_as_it_grows(self, workspace: Path) -> None:
        """But for the last one, which may go on in what is new."""
        sides = []
        for text in (lines(30), lines(60)):
            Path("data/raw/text.txt").write_text("\n".join(text) + "\n")
            run_stage("extract")
            sides.append({name: list(load_split(name)["text"]) for name in ("train", "validation", "test")})
            assert sorted(row.strip() for rows in sides[-1].values() for row in rows) == sorted(text)
            assert load_split("calibration").equals(load_split("train"))
        length = len("\n".join(lines(30)))
        early = set("\n".join(lines(30))[: length - 5000].splitlines(keepends=True))
        for name, rows in sides[0].items():
            assert [row for row in sides[1][name] if row in early] == [row for row in rows if row in early]

    def test_splits_of_files_stay_as_they_are(self, workspace: Path) -> None:
        Path("data/raw/wikitext").mkdir()
        names = ("train", "validation", "test")
        for name in names:
            Path(f"data/raw/wikitext/{name}.txt").write_text(f" = {name} = \n\n" + TEXT)
        source = {"source": "data/raw/wikitext", "splits": {name: name for name in names}}
        write_params(workspace, params(**source))
        run_stage("extract")
        assert [load_split(name)["text"][0] for name in names] == [f" = {name} = \n" for name in names]

    @pytest.mark.parametrize(
        ("text", "error"),
        [({"source": "data/raw/none.txt"}, "data/raw/none.txt"), ({"source": "data/raw/text.txt", "column": "c"}, "c")],
    )
    def test_a_text_that_cannot_be_read_is_named(self, workspace: Path, text: dict[str, str], error: str) -> None:
        settings = params()
        settings["evaluate"]["texts"] = {"other": text}
        write_params(workspace, settings)
        with pytest.raises(StageError, match=rf"evaluate\.texts\.other: .*{error}"):
            extract()

    def test_a_text_shorter_than_a_block_is_named(self, workspace: Path) -> None:
        settings = params()
        settings["evaluate"]["texts"] = {"other": {"source": "data/raw/other.txt"}}
        Path("data/raw/other.txt").write_text("abc")
        write_params(workspace, settings)
        extract()
        with pytest.raises(StageError, match=r"evaluate\.texts\.other: .*\b3\b"):
            load_scorer().on_texts(model(), tokenizer(), "dense")

    def test_from_text_to_a_comparison(self, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """With the weight that embedding and head share, by each kind of search that knows it.

        A recipe without steps of fine-tuning is scored once, and a control without them is exported once.
        """
        settings = params(sizes={"calibration": 1})
        settings["targets"]["tied"] = True
        tolerance = {"kind": "tolerance", "increase": None, "grid": 3, "examples": 4, "times": "macs"}
        svd = settings["recipes"]["svd"]
        settings["recipes"]["tolerance"] = svd | {"weighting": {"kind": "inputs"}, "ranks": tolerance}
        svd["recovery"] = {**svd["recovery"], "steps": 0}
        svd["storage"] = "pivoted"
        recipes = ("svd", "kfac", "tolerance")
        settings["study"] |= {"recipes": list(recipes), "control": "svd"}
        settings["evaluate"]["texts"] = {"other": {"source": "data/raw/other.txt", "separator": "</s>", "examples": 5}}
        Path("data/raw/other.txt").write_text("\n".join(lines(2)))
        settings["export"] = {"recipes": ["svd"]}
        write_params(workspace, settings)
        run_study(*recipes)
        said = capsys.readouterr().out
        for scored in ("test examples", "examples of other"):
            assert len(re.findall(f"recovered: .* {scored}", said)) == 3
            assert len(re.findall(f"factorized: .* {scored}", said)) == 2
        (tied,) = (
            target for target in Targets.model_validate_json(TARGETS.read_text()).targets if isinstance(target, Tied)
        )
        reports = {name: json.loads(Path(f"reports/evaluate/{name}-0.5.json").read_text()) for name in recipes}
        for report in reports.values():
            assert report["targets"][tied.name]["parameters"] <= tied.parameters
            assert report["target_parameters"] == sum(target["parameters"] for target in report["targets"].values())
        assert reports["svd"]["factorized"] == reports["svd"]["recovered"]
        recovered = reports["kfac"]["recovered"]
        loaded = AutoModelForCausalLM.from_pretrained("models/finetuned/kfac-0.5")
        again = kind_of(load_task()).score(loaded, tokenizer(), load_split("test"), 8, "test").score
        assert recovered["metric"] == pytest.approx(again.metric, rel=1e-5)
        assert recovered["metrics"] == {"perplexity": recovered["metric"]}
        spec = load_task().model_copy(update={"sizes": {**load_task().sizes, "test": 5}, "separator": "</s>"})
        other = kind_of(spec).score(loaded, tokenizer(), rows(*load_texts()["other"]["text"]), 8, "test").score
        assert reports["kfac"]["texts"]["other"]["metric"] == pytest.approx(other.metric, rel=1e-5)
        assert reports["kfac"]["texts"]["other"]["examples"] == other.examples == 5
        assert reports["svd"]["texts"] == reports["svd"]["factorized_texts"]
        files, original, control = (
            json.loads(Path(f"reports/onnx/{name}.json").read_text()) for name in ("svd-0.5", "dense", "control")
        )
        assert original == control
        both = [report["texts"]["other"]["metric"] for report in (reports["svd"], files["onnx"])]
        assert both[1] == pytest.approx(both[0], rel=1e-4)
        written = Path("reports/runtimes.csv").read_text().splitlines()
        table = {(row["model"], row["runtime"]): row for row in csv.DictReader(written)}
        assert [float(table["svd-0.5", runtime]["texts.other"]) for runtime in ("torch", "onnx")] == both
        assert files["int8"]["texts"]["other"]["metric"] == float(table["svd-0.5", "int8"]["texts.other"]) != both[1]
        assert (
            "linear layers read fewer tokens than they have input features"
            in Path("reports/comparison.html").read_text()
        )
        assert len(encoded("calibration", tokenizer())) == 1
        assert "lower is better" in Path("reports/comparison.html").read_text()
        assert "tokens: 1 of the training text." in Path("reports/comparison.html").read_text()
        dense = json.loads(Path("reports/dense.json").read_text())["continuations"]
        small = reports["kfac"]["continuations"]
        assert [sample["beginning"] for sample in dense] == [sample["beginning"] for sample in small]
        assert {len(sample["beginning"]) for sample in small} == {6}  # bytes, half a block
        assert "continues" in Path("reports/cards/kfac-0.5.md").read_text()


def write_gguf(file: Path, llama: PreTrainedModel) -> None:
    """Write a model as llama.cpp does: rotary halves of query and key interleaved, a byte-level vocabulary."""
    config, weights = llama.config, {name: value.numpy() for name, value in llama.state_dict().items()}
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*ALPHABET[:-1], "ab", "</s>"])  # llama.cpp asks for a merge
    writer.add_token_types([1] * len(ALPHABET) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(END)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        before, after = f"model.layers.{layer}", f"blk.{layer}"
        writer.add_tensor(f"{after}.attn_norm.weight", weights[f"{before}.input_layernorm.weight"])
        writer.add_tensor(f"{after}.ffn_norm.weight", weights[f"{before}.post_attention_layernorm.weight"])
        for part in "qkv":
            value = weights[f"{before}.self_attn.{part}_proj.weight"]
            if part in heads:
                value = value.reshape(heads[part], 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            writer.add_tensor(f"{after}.attn_{part}.weight", np.ascontiguousarray(value))
        writer.add_tensor(f"{after}.attn_output.weight", weights[f"{before}.self_attn.o_proj.weight"])
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"{after}.ffn_{part}.weight", weights[f"{before}.mlp.{part}_proj.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_base_model(workspace: Path) -> None:
    """Unpacked, trainable and without a trace of where it came from."""
    llama = model()
    write_gguf(Path("models/base/tiny.gguf"), llama)
    base = Model(base="models/base/tiny.gguf", revision=None, dtype="float32", device_map=None)
    loaded, words = load_base(base, task())[:2]
    ids = torch.tensor([words("the plot")["input_ids"]])
    assert words.decode(ids[0]) == "the plot"
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, llama(input_ids=ids).logits)
    loaded.save_pretrained("saved")
    assert "quantization_config" not in json.loads(Path("saved/config.json").read_text())


@pytest.mark.parametrize("options", [{}, {"quantization_config": GgufConfig(dequantize=True)}], ids=["", "dequantized"])
def test_a_model_that_transformers_read_from_gguf_is_compressed_and_saved(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """transformers leaves on it that it is quantized, though its weights are dense."""
    write_gguf(tmp_path / "tiny.gguf", model())
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", **options)
    ids = torch.randint(END, (8, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    small, report = eckart.compress(read, [batch], 0.5, "svd")
    assert report.ranks
    small.float().save_pretrained(tmp_path / "small")
    with torch.no_grad():
        expected, found = small(**batch).logits, eckart.load(tmp_path / "small")(**batch).logits
    torch.testing.assert_close(found, expected)
    eckart.save(read, tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
