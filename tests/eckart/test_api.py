"""`eckart.compress`: the compressed model, the report, the given model, errors and warnings."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune
from transformers import (
    AutoConfig,
    FSMTConfig,
    FSMTForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

import eckart
from eckart import arguments
from eckart.calibration.batch_preparation import decoder_inputs
from eckart.calibration.losses import mean_loss_times_batch
from eckart.calibration.statistics import collect
from eckart.factorization.factorize import InOrder, factorize_model
from eckart.model.batches import IGNORED, without_labels
from eckart.model.layers import factorized
from eckart.model.targets import find_targets
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.ranks.tolerance import Tolerance
from eckart.ranks.uniform import Uniform
from eckart.recipe import Recipe
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BATCHES = tiny.batches(tiny.samples(12), 4)
INPUTS = without_labels(BATCHES[0])
UNLABELED = [without_labels(batch) for batch in BATCHES]
PIPELINE = ("prefect", "dvc", "mlflow", "datasets", "pandas", "scipy", "sklearn", "pydantic_settings", "tasks", "flows")


@pytest.mark.parametrize("recipe", ["drone", "iwsvd", "anchored"])
def test_keep_is_met_the_report_counts_parameters_and_the_given_model_is_not_changed(recipe: str) -> None:
    model = tiny.bert().train()
    before = copy.deepcopy(model)
    small, report = eckart.compress(model, BATCHES, 0.5, recipe)
    assert report.keep <= 0.5
    assert {name: target.rank for name, target in report.targets.items() if target.rank} == factorized(small)
    assert report.parameters == (model.num_parameters(), small.num_parameters())
    saved = sum(target.parameters[0] - target.parameters[1] for target in report.targets.values())
    assert saved == model.num_parameters() - small.num_parameters()
    assert report.macs[1] < report.macs[0]
    assert tiny.logits(small, INPUTS).isfinite().all()
    assert model.training
    assert not hasattr(model.config, "quantization_config")
    tiny.assert_same(before, model, INPUTS)


@pytest.mark.parametrize("recipe", ["fwsvd", "anchored"])
def test_keep_1_gives_the_original_model(recipe: str) -> None:
    model = tiny.llama()
    small, report = eckart.compress(model, BATCHES, 1.0, recipe)
    assert report.predicted_loss == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(tiny.logits(small, INPUTS), tiny.logits(model, INPUTS))


def test_a_compressed_causal_model_generates() -> None:
    """It has fewer neurons in some MLPs: that is the default for language models, and for subclasses of them."""
    model = tiny.causal_llama()
    model.__class__ = type("Own", (type(model),), {})
    texts = [{**batch, "labels": batch["input_ids"]} for batch in BATCHES]
    small, report = eckart.compress(model, texts, 0.6)
    assert any(target.narrowed for target in report.targets.values())
    written = small.generate(input_ids=INPUTS["input_ids"][:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert written.shape[1] == INPUTS["input_ids"].shape[1] + 3


def test_the_config_of_the_model_stays() -> None:
    """A classifier that computes a loss writes its kind of problem there."""
    model = tiny.bert()
    before = model.config.to_json_string()
    small, _ = eckart.compress(model, BATCHES, 0.5, "anchored")
    assert model.config.to_json_string() == before
    assert small.config.problem_type is None


def test_a_language_model_keeps_more_by_default() -> None:
    texts = [{**batch, "labels": batch["input_ids"]} for batch in BATCHES]
    of_images, image = tiny.llava()
    _, of_words = eckart.compress(tiny.causal_llama(), texts, recipe="svd", check=False)
    _, of_words_and_images = eckart.compress(of_images, [image], recipe="svd", check=False)
    _, of_texts = eckart.compress(tiny.bert(), BATCHES, recipe="svd", check=False)
    of_sounds, sound = tiny.whisper()  # an encoder and a decoder
    _, of_words_and_sounds = eckart.compress(of_sounds, [sound], recipe="svd", check=False)
    assert max(of_texts.keep, of_words_and_sounds.keep) < 0.34
    assert 0.7 < min(of_words.keep, of_words_and_images.keep) < 0.81


def test_not_every_model_that_can_generate_is_a_causal_language_model() -> None:
    """Flaubert is a masked one, and InstructBLIP with T5 has a decoder beside its encoders."""
    parts = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    masked = tiny.build("FlaubertWithLMHeadModel", n_words=64, emb_dim=16, n_layers=1, n_heads=2)
    decoder = tiny.build(
        "InstructBlipForConditionalGeneration",
        vision_config={**parts, "image_size": 8, "patch_size": 4},
        qformer_config={**parts, "vocab_size": 64, "encoder_hidden_size": 16},
        text_config={"model_type": "t5", **text},
    )
    assert masked.can_generate()
    assert decoder.can_generate()
    assert not arguments.continues_text(masked)
    assert not arguments.continues_text(decoder)


def test_largest_drop_finds_the_smallest_keep_that_is_good_enough() -> None:
    """A score that falls by what is cut: a drop of 0.3 is a keep of 0.7, to a hundredth."""
    model = tiny.bert().train()
    whole = model.num_parameters()
    dense = sum(target.parameters for target in find_targets(model, BATCHES[0]).targets)

    def score(scored: PreTrainedModel) -> float:
        assert not scored.training
        return scored.num_parameters() / dense

    small, report = eckart.compress(model, BATCHES, recipe="kfac", largest_drop=0.3, score=score)
    assert model.training
    assert report.keep == pytest.approx(0.7, abs=0.02)
    assert report.keep >= 0.7
    assert report.scores == pytest.approx((whole / dense, small.num_parameters() / dense))
    assert list(report.seconds) == ["statistics", "search", "factorization", "scoring"]


def test_a_drop_of_exactly_the_limit_is_allowed_in_float32() -> None:
    """84 of 100 right instead of 85: as a mean in float32, 0.85 − 0.84 is a little over 0.01."""
    model = tiny.bert()
    dense = model.num_parameters()
    right = [torch.arange(100) < count for count in (84, 85)]
    assert float(right[1].float().mean()) - float(right[0].float().mean()) > 0.01
    *_, report = eckart.compress(
        model,
        BATCHES,
        recipe="svd",
        largest_drop=0.01,
        score=lambda scored: float(right[scored.num_parameters() == dense].float().mean()),
    )
    assert report.keep < 0.5


def test_a_largest_drop_that_every_keep_meets_gives_the_smallest_that_has_ranks() -> None:
    """Also of a recipe with a grid of ranks, whose smallest is above rank 1."""
    few: dict[str, Any] = {"include": ["*.query"], "recipe": "drone_tolerance", "check": False}
    *_, report = eckart.compress(tiny.bert(), BATCHES, largest_drop=0.01, score=lambda _: 1.0, **few)
    assert report.keep < 0.5


def test_a_largest_drop_stays_above_what_a_fixed_increase_of_the_loss_keeps() -> None:
    recipe = {"weighting": "inputs", "ranks": {"kind": "tolerance", "increase": 1e-6}}
    *_, report = eckart.compress(tiny.bert(), BATCHES, largest_drop=0.5, score=lambda _: 1.0, recipe=recipe)
    assert report.ranks == eckart.compress(tiny.bert(), BATCHES, 1.0, recipe).report.ranks


def test_load_takes_what_from_pretrained_takes(tmp_path: Path) -> None:
    small, _ = eckart.compress(tiny.bert(), BATCHES, 0.5, "svd")
    eckart.save(small, tmp_path)
    assert eckart.load(tmp_path, output_hidden_states=True)(**INPUTS).hidden_states
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    loaded = eckart.load(tmp_path, config=config)
    assert loaded.config._attn_implementation == "eager"
    torch.testing.assert_close(tiny.logits(loaded, INPUTS), tiny.logits(small, INPUTS))


@pytest.mark.parametrize("recipe", ["svd", "drone_tolerance", "anchored"])
def test_several_keeps_give_what_single_calls_give(recipe: str) -> None:
    """Bit for bit, in the given order, from one set of calibration statistics."""
    model, keeps, targets = tiny.bert(), torch.tensor([0.5, 0.8], dtype=torch.float64), "*.layer.0.attention.*"
    together = eckart.compress(model, BATCHES, keeps, recipe, include=targets)
    assert isinstance(together, list)
    for keep, (small, report) in zip(keeps.tolist(), together, strict=True):
        alone, expected = eckart.compress(model, BATCHES, keep, recipe, include=targets)
        tiny.assert_same(alone, small, INPUTS)
        assert {**vars(report), "seconds": None} == {**vars(expected), "seconds": None}
        assert report.seconds["statistics"] == together[0].report.seconds["statistics"]


def test_the_report_fits_a_screen_and_says_what_comes_next() -> None:
    _, report = eckart.compress(tiny.bert(), BATCHES, 0.5, "anchored")
    lines = str(report).splitlines()
    assert len(lines) < 12
    assert {line.partition("  ")[0] for line in lines} >= {"parameters", "targets", "ranks", "predicted loss", "next"}
    assert f"{report.parameters[0]:,} → {report.parameters[1]:,}" in lines[0]
    assert "increase of the loss" in str(report)
    assert str(min(report.ranks.values())) in str(report)
    assert list(report.seconds) == ["statistics", "search", "factorization"]
    assert all(part in str(report) for part in report.seconds)
    assert "left dense" in str(eckart.compress(tiny.bert(), BATCHES, 1.0, "svd").report)


def test_the_report_tells_layers_that_lose_neurons_from_dense_ones() -> None:
    ranks = {"kind": "waterfill", "narrow": True, "multiple": 1}
    small, report = eckart.compress(tiny.bert(), BATCHES, 0.9, {"weighting": "kfac", "ranks": ranks})
    names = [name for name, target in report.targets.items() if target.narrowed]
    assert names
    for name in names:
        weight = small.get_submodule(name).get_parameter("weight")
        assert weight.shape != report.targets[name].shape
        assert weight.numel() == report.targets[name].parameters[1]
    dense = sum(target.parameters[0] == target.parameters[1] for target in report.targets.values())
    assert f"{dense} left dense; {len(names)} have fewer neurons" in str(report)


def test_progress_bars_are_those_of_transformers(capfd: pytest.CaptureFixture[str]) -> None:
    enable_progress_bar()  # stages that ran in this process have disabled them
    eckart.compress(tiny.bert(), BATCHES, 0.5, "anchored")
    out, err = capfd.readouterr()
    assert not out
    for part in ("Calibration statistics", "Singular values (keep 0.5)", "Factorization in order (keep 0.5)"):
        assert f"{part}: 100%" in err
    eckart.compress(tiny.bert(), BATCHES, 0.5, "drone_tolerance", include="*.query")
    assert "Ranks, pass 1 (keep 0.5): 100%" in capfd.readouterr().err
    disable_progress_bar()
    try:
        eckart.compress(tiny.bert(), BATCHES, 0.5, "anchored")
    finally:
        enable_progress_bar()
    assert capfd.readouterr() == ("", "")


def test_a_stage_has_no_second_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    """Stages call the same functions, and print progress of their own."""
    model, weighting = tiny.bert(), eckart.recipes()["drone"].weighting
    targets = find_targets(model, BATCHES[0]).targets
    ranks = dict.fromkeys([target.name for target in targets], 1)
    statistics = collect(model, BATCHES, targets, ["inputs"])
    for order in (None, InOrder()):
        factorize_model(copy.deepcopy(model), targets, ranks, weighting, statistics, in_order=order, batches=BATCHES)
    Tolerance().search(tiny.search_problem(copy.deepcopy(model), targets, weighting, BATCHES, 0.5))
    assert capfd.readouterr() == ("", "")


def test_a_drop_that_cannot_be_met_is_an_error() -> None:
    scores = iter([1.0, 0.9])
    with pytest.raises(ValueError, match=r"0\.1, more than 0\.05"):
        eckart.compress(tiny.bert(), BATCHES, largest_drop=0.05, score=lambda _: next(scores))


@pytest.mark.parametrize(
    "goal", [{"largest_drop": 0.1}, {"score": float}, {"keep": 0.5, "largest_drop": 0.1, "score": float}]
)
def test_keep_and_largest_drop_exclude_each_other(goal: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep.*largest_drop.*score"):
        eckart.compress(tiny.bert(), BATCHES, **goal)


def test_a_recipe_may_be_a_mapping_as_in_params_yaml() -> None:
    values = {"weighting": "kfac", "ranks": "waterfill"}
    own = {**values, "ranks": {"kind": "waterfill", "multiple": 4, "embedding_price": 1.0}}
    _, report = eckart.compress(tiny.bert(), BATCHES, 0.5, own)
    assert {target.rank % 4 for target in report.targets.values() if target.rank and target.rank > 1} == {0}


def test_labels_are_needed_only_for_gradients() -> None:
    _, report = eckart.compress(tiny.bert(), iter(UNLABELED), 0.5, "drone")
    assert report.keep <= 0.5
    with pytest.raises(ValueError, match=r"labels.*drone"):
        eckart.compress(tiny.bert(), UNLABELED, 0.5, "kfac")
    with pytest.raises(ValueError, match=r"tolerance.*labels"):
        eckart.compress(tiny.bert(), UNLABELED, 0.5, "drone_tolerance")


def test_batching_and_padding_do_not_change_the_result() -> None:
    """Examples count alike, however long they are and whatever stands beside them."""
    losses = []
    for size, side in ((1, "right"), (4, "right"), (4, "left")):
        batches = tiny.batches(tiny.samples(8), size, side=side)
        texts = [
            {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}
            for batch in batches
        ]
        losses.append(eckart.compress(tiny.causal_llama(), texts, 0.5, "kfac").report.predicted_loss)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-3)


def test_wrong_keeps_are_errors() -> None:
    with pytest.raises(ValueError, match=r"keep=0\.01 "):
        eckart.compress(tiny.bert(), BATCHES, 0.01)
    with pytest.raises(ValueError, match="keep=2"):
        eckart.compress(tiny.bert(), BATCHES, 2.0)
    with pytest.raises(ValueError, match=r"keep='0\.3'"):
        eckart.compress(tiny.bert(), BATCHES, "0.3")  # type: ignore[arg-type]
    assert eckart.compress(tiny.bert(), BATCHES, np.float32(0.5), "svd").report.keep <= 0.5  # type: ignore[call-overload]
    assert eckart.compress(tiny.bert(), BATCHES, np.float16(0.5), "svd").report.keep <= 0.5  # type: ignore[call-overload]
    assert eckart.compress(tiny.bert(), BATCHES, np.array(0.5), "svd").report.keep <= 0.5  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="keep is empty"):
        eckart.compress(tiny.bert(), BATCHES, [])
    with pytest.raises(ValueError, match="keep=None"):
        eckart.compress(tiny.bert(), BATCHES, [0.3, None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"keep='0\.5'"):
        eckart.compress(tiny.bert(), BATCHES, [0.3, "0.5"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"keep.*largest_drop.*score"):
        eckart.compress(tiny.bert(), BATCHES, [0.5], largest_drop=0.1, score=float)  # type: ignore[call-overload]


def test_wrong_arguments_are_errors() -> None:
    for trains_first in ("ars", "losparse"):
        with pytest.raises(ValueError, match=r"eckart run.*svd, .*anchored"):
            eckart.compress(tiny.bert(), BATCHES, 0.5, trains_first)
    with pytest.raises(ValueError, match=r"'kfca'.*kfac"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, "kfca")
    with pytest.raises(ValueError, match=r"ranks\.tolerance\.rows: was renamed; write examples"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, {"ranks": {"kind": "tolerance", "rows": 8}})
    with pytest.raises(ValueError, match="list"):
        eckart.compress(tiny.bert(), BATCHES[0], 0.5)
    with pytest.raises(ValueError, match="no batch"):
        eckart.compress(tiny.bert(), [], 0.5)
    with pytest.raises(ValueError, match="NoneType"):
        eckart.compress(tiny.bert(), None, 0.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="matches"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, include=["nothing.*"])
    with pytest.raises(ValueError, match="edges='x'"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, edges="x")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="exclude=None"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, exclude=None)  # type: ignore[call-overload]
    given = eckart.compress(tiny.bert(), BATCHES, 0.5, "svd", exclude=(name for name in ("*.query",)))  # type: ignore[call-overload]
    assert not [name for name in given.report.targets if name.endswith("query")]
    with pytest.raises(ValueError, match="Linear"):
        eckart.compress(torch.nn.Linear(2, 2), BATCHES, 0.5)  # type: ignore[arg-type]
    for place in ("", "bert.encoder.layer.0"):
        wrapped = tiny.bert()
        part = wrapped.get_submodule(place)
        part.forward = torch.compile(part.forward, backend="eager")  # a copy would run the original
        with pytest.raises(ValueError, match=rf"forward of {place or 'the model'} was replaced"):
            eckart.compress(wrapped, BATCHES, keep=0.5, recipe="svd", check=False)
    part.forward = MethodType(type(part).forward, part)  # as accelerate leaves it if asked to unwrap
    eckart.compress(wrapped, BATCHES, keep=0.5, recipe="svd")
    with pytest.raises(ValueError, match=r"model = torch\.compile\(small\)"):
        eckart.compress(torch.compile(tiny.bert(), backend="eager"), BATCHES, keep=0.5)  # type: ignore[call-overload]
    with torch.inference_mode():
        made = tiny.bert()
        with pytest.raises(ValueError, match="inference_mode"):
            eckart.compress(tiny.bert(), BATCHES, keep=0.5)
    with pytest.raises(ValueError, match="inference_mode"):
        eckart.compress(made, BATCHES, keep=0.5)
    with pytest.raises(ValueError, match=r"BertModel.*head"):
        eckart.compress(tiny.bert().base_model, BATCHES, 0.5, "kfac")
    with pytest.raises(ValueError, match="source"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, {"source": "finetuned"})
    for drop in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="largest_drop"):
            eckart.compress(tiny.bert(), BATCHES, largest_drop=drop, score=lambda _: 1.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"storge": "pivoted"}, "storge"),
        ({"storage": "bogus"}, "storage"),
        ({"ranks": {"kind": "waterfill", "multiple": -8}}, "multiple"),
    ],
)
def test_a_changed_copy_of_a_recipe_is_checked_as_settings_are(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        eckart.compress(tiny.bert(), BATCHES, 0.5, eckart.recipes()["kfac"].model_copy(update=changes))


def test_one_word_is_enough_for_a_part_of_a_copy() -> None:
    changed = eckart.recipes()["drone"].model_copy(update={"ranks": "waterfill"})
    assert arguments.recipe_of(changed) == arguments.recipe_of({"weighting": "inputs", "ranks": "waterfill"})
    for recipe in eckart.recipes().values():
        assert Recipe.model_validate(arguments._plain(recipe)) == recipe


def test_a_part_of_a_class_of_ones_own_is_used() -> None:
    class Mine(Uniform):
        def search(self, problem: SearchProblem) -> SearchResult:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, Recipe(ranks=Mine()))


@pytest.mark.parametrize(("loss", "named"), [("mean", "not a function"), (lambda *_: None, "None")])
def test_what_is_no_loss_is_refused(loss: Any, named: str) -> None:
    for recipe in ("kfac", "drone", "drone_tolerance", "svd"):
        with pytest.raises(ValueError, match=named):
            eckart.compress(tiny.bert(), BATCHES, 0.5, recipe, loss=loss)


def test_a_loss_that_is_a_mean_is_warned_of() -> None:
    texts = [{**batch, "labels": batch["input_ids"]} for batch in tiny.batches(tiny.samples(4), 2)]
    own: Any = lambda model, batch: model(**batch).loss  # noqa: E731
    for model, batches in ((tiny.bert(), BATCHES), (tiny.causal_llama(), texts)):
        with pytest.warns(UserWarning, match="as a mean does"):
            eckart.compress(model, batches, 0.5, "kfac", loss=own, check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*fewer tokens")
        eckart.compress(tiny.bert(), BATCHES, 0.5, "kfac", loss=mean_loss_times_batch, check=False)
        eckart.compress(tiny.bert(), BATCHES, 0.5, "svd", loss=own, check=False)
        eckart.compress(tiny.bert(), BATCHES, 0.5, "kfac", loss=of_whole_batches, check=False)


def test_a_loss_of_whole_batches_that_ignores_layers_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"no gradient in them.*pooler"):  # the classifier reads it, this loss does not
        eckart.compress(tiny.bert(), BATCHES, 0.5, "kfac", loss=of_hidden_states, check=False)


def of_hidden_states(model: Any, batch: Any) -> torch.Tensor:
    first, second = model(**batch, output_hidden_states=True).hidden_states[-1].split(2)
    return (first - second).square().sum()


def of_whole_batches(model: Any, batch: Any) -> torch.Tensor:
    first, second = model(**batch).logits.split(2)
    return (first - second).square().sum()


def test_autocast_which_would_round_everything_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, "svd")


def test_what_is_no_model_is_not_saved(tmp_path: Path) -> None:
    for model, named in ((torch.nn.DataParallel(tiny.bert()), "DataParallel"), (None, "NoneType")):
        with pytest.raises(ValueError, match=named):
            eckart.save(model, tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no name"):
        eckart.save(tiny.bert(), "")
    assert not list(tmp_path.iterdir())


def test_the_model_that_torch_compiles_is_saved(tmp_path: Path) -> None:
    small, _ = eckart.compress(tiny.bert(), BATCHES, 0.5, "svd")
    before = small.config.to_dict()
    eckart.save(torch.compile(small, backend="eager"), tmp_path)
    assert small.config.to_dict() == before
    torch.testing.assert_close(tiny.logits(eckart.load(tmp_path), INPUTS), tiny.logits(small, INPUTS))


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (INPUTS, "batch 1 .* labels"),
        ({name: values.tolist() for name, values in BATCHES[1].items()}, "list"),
        ({**BATCHES[1], "labels": BATCHES[1]["labels"][:2]}, r"labels \(2,\)"),
        (["some text"], "mapping"),
        ({name: values[:0] for name, values in BATCHES[1].items()}, "batch 1 has no example"),
        ({**BATCHES[1], **{name: BATCHES[1][name][:, :0] for name in INPUTS}}, "batch 1 .* without a token"),
    ],
)
def test_every_batch_is_checked(second: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        eckart.compress(tiny.bert(), [BATCHES[0], second], 0.5, "kfac")


def test_a_batch_without_a_mask_has_no_padding() -> None:
    """As blocks of the user's text beside those of `write_text`."""
    model = tiny.causal_llama()
    blocks = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, tiny.VOCABULARY, (4, 2, 6))]
    masked = [block | {"attention_mask": torch.ones_like(block["input_ids"])} for block in blocks]
    few, all_of_them = (eckart.compress(model, given, 0.5).model for given in ([*blocks[:2], *masked[2:]], masked))
    tiny.assert_same(few, all_of_them, masked[0])


@pytest.mark.parametrize("recipe", ["svd", "anchored", "drone"])
def test_frozen_parameters_stay_frozen(recipe: str) -> None:
    model = tiny.bert()
    model.bert.requires_grad_(False)
    small = eckart.compress(model, BATCHES, 0.5, recipe).model
    assert {name.split(".")[0] for name, values in small.named_parameters() if values.requires_grad} == {"classifier"}


@pytest.mark.parametrize("recipe", ["svd", "anchored"])
def test_biases_stay_trainable_beside_frozen_weights(recipe: str) -> None:
    """As BitFit trains a model."""
    model = tiny.bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    small = eckart.compress(model, BATCHES, 0.5, recipe).model
    assert all(values.requires_grad == name.endswith("bias") for name, values in small.named_parameters())


def test_batches_may_be_a_dataset_without_an_iterator() -> None:
    class Batches:
        def __getitem__(self, number: int) -> Any:
            return BATCHES[number]

    given: Any = Batches()
    assert eckart.compress(tiny.bert(), given, 0.5, "svd").report.keep <= 0.5


def test_weights_that_are_not_finite_are_named() -> None:
    model = tiny.bert()
    with torch.no_grad():
        model.bert.pooler.dense.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"pooler\.dense\.weight"):
        eckart.compress(model, BATCHES, 0.5, "kfac")


def test_a_weight_that_is_computed_is_named() -> None:
    """A folder would have its parts, and no weight."""
    model = tiny.bert()
    prune.random_unstructured(model.bert.pooler.dense, "weight", 0.5)
    with pytest.raises(ValueError, match=r"pooler\.dense .*prune\.remove"):
        eckart.compress(model, BATCHES, 0.5, "svd", include=["*.intermediate.*"])


@pytest.mark.parametrize("given", [None, float("nan")])
def test_a_score_that_is_no_number_is_an_error(given: float | None) -> None:
    with pytest.raises(ValueError, match=str(given)):
        eckart.compress(tiny.bert(), BATCHES, recipe="svd", largest_drop=0.1, score=lambda _: given)  # type: ignore[arg-type,return-value]


def test_decoder_inputs_are_made_from_the_labels() -> None:
    """They are those of a padded batch with the decoder's inputs, bit for bit."""
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    labels = torch.tensor([[5, 6, 1], [7, 1, IGNORED]])
    ids = torch.randint(2, 50, (2, 4))
    short = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    long = {
        **short,
        "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 1]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    (small, _), (same, _) = (eckart.compress(model, [batch], 0.5, "kfac") for batch in (short, long))
    tiny.assert_same(small, same, long)
    # Tokens of a prompt have no labels, but later tokens read them.
    prompted = {name: values for name, values in long.items() if name != "decoder_attention_mask"}
    prompted["labels"] = torch.tensor([[IGNORED, 6, 1], [IGNORED, 1, IGNORED]])
    masked = {**prompted, "decoder_attention_mask": long["decoder_attention_mask"]}
    (small, _), (same, _) = (eckart.compress(model, [batch], 0.5, "kfac") for batch in (prompted, masked))
    tiny.assert_same(small, same, masked)


def test_labels_stay_when_decoder_inputs_are_made_from_them() -> None:
    """FSMT puts padding where labels are ignored, in the tensor that it gets."""
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = FSMTForConditionalGeneration(
        FSMTConfig(langs=["en", "de"], src_vocab_size=20, tgt_vocab_size=20, **sizes, **heads)
    )
    labels = torch.tensor([[5, 6, 2], [7, 2, IGNORED]])
    inputs = decoder_inputs(model, labels)
    assert labels.tolist() == [[5, 6, 2], [7, 2, IGNORED]]
    assert inputs["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


class Nameless(type(tiny.bert())):  # type: ignore[misc]
    """A model that returns its logits alone."""

    def forward(self, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).logits


def test_outputs_without_names_are_refused_where_the_loss_is_needed() -> None:
    model = tiny.bert()
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict"):
        eckart.compress(model, BATCHES, 0.5)
    model = Nameless(tiny.bert().config)
    with pytest.raises(ValueError, match="returns a Tensor"):
        eckart.compress(model, BATCHES, 0.5)
    small, _ = eckart.compress(model, BATCHES, 0.5, "drone")
    assert factorized(small)


class Counting(type(tiny.bert())):  # type: ignore[misc]
    """A model whose outputs depend on something that is not saved: how often it was called."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        self.calls += 1
        outputs.logits = outputs.logits * 2**self.calls
        return outputs


def test_a_model_that_changes_when_saved_is_refused() -> None:
    model = Counting(tiny.bert().config)
    with pytest.raises(ValueError, match="saved and loaded"):
        eckart.compress(model, BATCHES, 0.5, "svd")
    small, _ = eckart.compress(model, BATCHES, 0.5, "svd", check=False)
    assert factorized(small)


class Broken(type(tiny.bert())):  # type: ignore[misc]
    """A model that does not run after it was loaded, as DeBERTa in bfloat16: some of its weights load in float32."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config._name_or_path:
            raise RuntimeError("other dtypes")
        return super().forward(*args, **kwargs)


def test_a_model_that_does_not_run_when_loaded_is_refused() -> None:
    model = Broken(tiny.bert().config)
    with pytest.raises(ValueError, match=r"other dtypes.*check=False"):
        eckart.compress(model, BATCHES, 0.5, "svd")
    small, _ = eckart.compress(model, BATCHES, 0.5, "svd", check=False)
    assert factorized(small)


class Rough(type(tiny.bert())):  # type: ignore[misc]
    """A model whose outputs in bfloat16 differ from call to call, as those of experts do after rounding."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        self.calls += 1
        if self.dtype == torch.bfloat16:
            outputs.logits = outputs.logits * 2**self.calls
        return outputs


def test_a_model_in_bfloat16_may_change_by_its_rounding_when_saved() -> None:
    small, _ = eckart.compress(Rough(tiny.bert().config).bfloat16(), BATCHES, 0.5, "svd")
    assert factorized(small)


class Buffered(type(tiny.bert())):  # type: ignore[misc]
    """A model with a buffer that is not saved, and that a cast to bfloat16 changes by much, and one that is saved."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("phase", torch.tensor(1001.0, dtype=torch.float32), persistent=False)

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if module is self:  # as rotary embeddings do: a model that is loaded has empty memory there until now
            self.phase.fill_(1001.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.phase.float().sin()
        return outputs


def test_a_buffer_that_was_cast_is_named() -> None:
    with pytest.raises(ValueError, match=r": phase.*dtype=torch\.bfloat16"):
        eckart.compress(Buffered(tiny.bert().config).bfloat16(), BATCHES, 0.5, "svd")


def test_attention_may_be_another_than_models_are_loaded_with() -> None:
    """Attentions differ in the outputs at padding, which reads nothing."""
    model = tiny.causal_llama()
    model.set_attn_implementation("eager")
    batch = tiny.collate(sorted(tiny.samples(4), key=lambda sample: len(sample[0])), side="left")
    del batch["labels"]
    eckart.compress(model, [batch], 0.5, "svd")


def test_parts_of_a_model_may_have_other_attentions() -> None:
    """TrOCR's decoder has no SDPA, its encoder has."""
    sizes = {"decoder_attention_heads": 2, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
    decoder = TrOCRConfig(vocab_size=64, d_model=16, decoder_layers=1, pad_token_id=1, **sizes)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    encoder = ViTConfig(image_size=8, patch_size=4, **vision)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=2, pad_token_id=1
    )
    model = VisionEncoderDecoderModel(config).eval()
    batch = {"pixel_values": tiny.noise(4, 3, 8, 8), "labels": tiny.following(tiny.text(4))["labels"]}
    small, _ = eckart.compress(model, [batch], 0.5, "svd")
    assert factorized(small)


def test_batches_in_which_nothing_counts_are_an_error() -> None:
    labels = {"labels": torch.full_like(BATCHES[0]["input_ids"], IGNORED)}
    with pytest.raises(ValueError, match=str(IGNORED)):
        eckart.compress(tiny.causal_llama(), [BATCHES[0] | labels], 0.5, "kfac")
    masks = {"attention_mask": torch.zeros_like(BATCHES[0]["attention_mask"])}
    with pytest.raises(ValueError, match="mask"):
        eckart.compress(tiny.bert(), [BATCHES[0] | masks], 0.5, "drone")


def test_a_loss_without_a_gradient_is_an_error() -> None:
    """Ranks would be left to chance, and the predicted loss would be 0."""

    def flat(model: Any, batch: Any) -> torch.Tensor:
        return 0 * model(**batch).logits.sum()

    def apart(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch).loss.detach()

    for loss in (flat, apart):
        with pytest.raises(ValueError, match="gradient of zero"):
            eckart.compress(tiny.bert(), BATCHES, 0.5, "kfac", loss=loss)


def test_a_model_that_widens_its_own_parameters_is_counted() -> None:
    """DeBERTa reads embeddings of positions, which have gradients and are no result of any."""
    family = tiny.ARCHITECTURES["deberta-v3"]
    batch = tiny.padded(tiny.unpadded(family.kind))
    _, report = eckart.compress(family.build(), [batch], 0.5, "kfac")
    assert 0 < report.macs[1] < report.macs[0]


def warned(model: PreTrainedModel, batches: Any, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eckart.compress(model, batches, 0.5, "kfac", check=False, **options)
    return " ".join(str(warning.message) for warning in caught)


def test_fewer_tokens_than_inputs_give_a_warning() -> None:
    assert "fewer tokens" in warned(tiny.llama(), BATCHES[:1])
    assert "fewer tokens" not in warned(tiny.llama(), BATCHES)


def test_padding_that_changes_outputs_gives_a_warning() -> None:
    """GPT-2 counts positions from the first column, where it is not told them."""
    left = tiny.batches(tiny.samples(12), 4, side="left")
    untold = [{name: values for name, values in batch.items() if name != "position_ids"} for batch in left]
    assert "padding" in warned(tiny.gpt2(), untold)
    right, other = (tiny.collate(tiny.samples(1, 3, 5), length=9, side=side) for side in ("right", "left"))
    mixed = {name: torch.cat([right[name], other[name]]) for name in untold[0]}
    assert "padding" in warned(tiny.gpt2(), [mixed])  # also if the first padded example does not show it
    assert "padding" not in warned(tiny.gpt2(), left)
    assert "padding" not in warned(tiny.gpt2(), BATCHES)
    assert "padding" not in warned(tiny.llama(), untold)


def test_gradients_that_underflow_in_float16_give_a_warning() -> None:
    def scaled(factor: float) -> Any:
        return lambda model, batch: factor * model(**batch).loss * len(batch["labels"])

    assert "float16" in warned(tiny.bert().half(), BATCHES, loss=scaled(1e-5))
    assert "float16" not in warned(tiny.bert().half(), BATCHES, loss=scaled(1.0))
    assert "float16" not in warned(tiny.bert(), BATCHES, loss=scaled(1e-5))


def test_targets_with_few_of_the_parameters_give_a_warning() -> None:
    assert "Targets are only" in warned(tiny.bert(), BATCHES, include="*.query")
    assert "Targets are only" not in warned(tiny.bert(), BATCHES)


def test_a_pattern_that_matches_nothing_gives_a_warning() -> None:
    """It may have a typo: what should stay dense is compressed."""
    typos = warned(tiny.bert(), BATCHES, include=["*.layer.*", "*.layr.*"], exclude=["*.qeury", "*.attention"])
    assert all(pattern in typos for pattern in ("*.layr.*", "*.qeury", "*.attention "))
    assert "*.layer.*" not in typos
    right = {"include": "*.layer.*", "exclude": ["*.query", "*embeddings*"]}
    assert "match no layer" not in warned(tiny.bert(), BATCHES, **right)


@pytest.mark.parametrize("recipe", ["anchored", "narrowed"])
def test_transformers_draws_no_weights_of_a_compressed_model(recipe: str) -> None:
    """It initializes what becomes part of another model, such as an EncoderDecoderModel."""
    small, _ = eckart.compress(tiny.bert(), BATCHES, 0.5, recipe)
    before = {name: value.clone() for name, value in small.state_dict().items()}
    small.init_weights()
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_the_pipelines_packages_are_not_needed() -> None:
    """And a model is loaded without the methods."""
    code = f"""
import sys
for name in {PIPELINE}:
    sys.modules[name] = None
import eckart
assert "eckart.ranks" not in sys.modules
from tests import tiny
small, report = eckart.compress(tiny.bert(), [tiny.collate(tiny.samples(4))], 0.5)
assert small.num_parameters() == report.parameters[1]
assert eckart.recipes() and eckart.load and eckart.save
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
