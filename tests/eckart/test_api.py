"""Compression in one call: what it promises of the model that it gives and of the one that it was given."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

import eckart
from eckart.calibration.losses import IGNORED, expected_losses
from eckart.model.layers import factorized, pivoted
from tests import tiny
from tests.architectures import FAMILIES, collate, samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BATCHES = tiny.batches(tiny.samples(12), 4)
INPUTS = {name: values for name, values in BATCHES[0].items() if name != "labels"}
CLOSED = ("svd", "fwsvd", "iwsvd", "drone", "kfac", "anchored")
PIPELINE = ("prefect", "dvc", "mlflow", "datasets", "pandas", "scipy", "sklearn", "pydantic_settings", "tasks", "flows")


def answers(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**INPUTS).logits


def test_all_that_a_person_uses_is_offered_and_is_there() -> None:
    assert set(eckart.__all__) <= set(dir(eckart))
    assert all(getattr(eckart, name) is not None for name in dir(eckart))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("recipe", CLOSED)
def test_no_more_is_kept_than_was_asked_and_the_report_counts_it(family: str, recipe: str) -> None:
    model = tiny.FAMILIES[family]()
    small, report = eckart.compress(model, BATCHES, 0.5, recipe)
    assert report.keep <= 0.5
    assert {name: one.rank for name, one in report.targets.items() if one.rank} == factorized(small)
    assert report.parameters == (model.num_parameters(), small.num_parameters())
    saved = sum(one.parameters[0] - one.parameters[1] for one in report.targets.values())
    assert saved == model.num_parameters() - small.num_parameters()
    assert report.macs[1] < report.macs[0]
    assert answers(small).isfinite().all()


@pytest.mark.parametrize("recipe", CLOSED)
def test_the_model_that_was_given_stays_as_it_is(recipe: str) -> None:
    model = tiny.bert()
    before = copy.deepcopy(model)
    eckart.compress(model.train(), BATCHES, 0.5, recipe)
    assert model.training
    assert not hasattr(model.config, "quantization_config")
    tiny.assert_same(before, model, INPUTS)


@pytest.mark.parametrize("recipe", CLOSED)
def test_a_model_that_keeps_all_is_the_dense_one(recipe: str) -> None:
    model = tiny.llama()
    small, report = eckart.compress(model, BATCHES, 1.0, recipe)
    assert report.predicted_loss == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(answers(small), answers(model))


def test_what_is_left_is_what_the_spectrum_says() -> None:
    """Without a weighting ½ ‖W − Ŵ‖², target by target."""
    model = tiny.bert()
    small, report = eckart.compress(model, BATCHES, 0.5, "svd")
    for name, one in report.targets.items():
        error = model.get_submodule(name).weight - small.get_submodule(name).dense()
        assert one.predicted_loss == pytest.approx(float(error.detach().square().sum() / 2), rel=1e-4)
    assert report.predicted_loss == pytest.approx(sum(one.predicted_loss or 0 for one in report.targets.values()))


@pytest.mark.parametrize("storage", ["factors", "pivoted"])
def test_what_is_saved_comes_back_by_its_own_class(storage: str, tmp_path: Path) -> None:
    recipe = eckart.recipes()["anchored"].model_copy(update={"storage": storage})
    small, _ = eckart.compress(tiny.bert(), BATCHES, 0.5, recipe)
    assert bool(pivoted(small)) == (storage == "pivoted")
    small.save_pretrained(tmp_path / "by itself")
    eckart.save(small, tmp_path / "by eckart", tiny.words())
    for folder in ("by itself", "by eckart"):
        tiny.assert_same(small, eckart.load(tmp_path / folder), INPUTS)
    assert (tmp_path / "by eckart/tokenizer.json").exists()


def test_a_causal_model_is_compressed_and_writes() -> None:
    model = tiny.causal_llama()
    texts = [{**batch, "labels": batch["input_ids"]} for batch in BATCHES]
    small, _ = eckart.compress(model, texts, 0.6, "kfac")
    written = small.generate(input_ids=INPUTS["input_ids"][:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert written.shape[1] == INPUTS["input_ids"].shape[1] + 3


def test_the_factors_train(tmp_path: Path) -> None:
    rows = [{name: values[0] for name, values in batch.items()} for batch in tiny.batches(tiny.samples(8), 1, 7)]
    small, _ = eckart.compress(tiny.bert(), BATCHES, 0.5)
    before = copy.deepcopy(small.state_dict())
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no")
    Trainer(small, arguments, train_dataset=rows).train()
    after = small.state_dict()
    assert all(not torch.equal(before[f"{name}.left"], after[f"{name}.left"]) for name in factorized(small))


def test_a_drop_in_place_of_a_keep_finds_the_smallest_that_is_good_enough() -> None:
    """A score that falls by what is cut: a drop of 0.3 is a keep of 0.7, to a hundredth."""
    model = tiny.bert()
    whole = model.num_parameters()
    maps = sum(one.parameters[0] for one in eckart.compress(model, BATCHES, 1.0, "svd").report.targets.values())
    small, report = eckart.compress(
        model, BATCHES, recipe="kfac", largest_drop=0.3, score=lambda one: one.num_parameters() / maps
    )
    assert report.keep == pytest.approx(0.7, abs=0.02)
    assert report.keep >= 0.7
    assert report.scores == pytest.approx((whole / maps, small.num_parameters() / maps))


def test_a_score_is_of_a_model_in_eval_mode() -> None:
    seen = []
    model = tiny.bert().train()
    eckart.compress(model, BATCHES, recipe="svd", largest_drop=0.0, score=lambda one: seen.append(one.training) or 1.0)
    assert not any(seen)
    assert model.training


def test_a_drop_that_nothing_exceeds_goes_down_to_what_leaves_ranks() -> None:
    _, report = eckart.compress(tiny.bert(), BATCHES, recipe="kfac", largest_drop=0.0, score=lambda _: 1.0)
    assert {one.rank for one in report.targets.values()} <= {1, 2}


def test_a_drop_that_is_out_of_reach_is_said() -> None:
    scores = iter([1.0, 0.9])
    with pytest.raises(ValueError, match=r"0\.1 .*more than 0\.05"):
        eckart.compress(tiny.bert(), BATCHES, largest_drop=0.05, score=lambda _: next(scores))


@pytest.mark.parametrize(
    "goal", [{"largest_drop": 0.1}, {"score": float}, {"keep": 0.5, "largest_drop": 0.1, "score": float}]
)
def test_a_goal_is_a_keep_or_a_drop_and_its_score(goal: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep.*largest_drop.*score"):
        eckart.compress(tiny.bert(), BATCHES, **goal)


def test_an_own_recipe_is_written_as_in_params_yaml() -> None:
    values = {"weighting": "kfac", "ranks": "waterfill"}
    own = {**values, "ranks": {"kind": "waterfill", "multiple": 4, "embedding_price": 1.0}}
    _, report = eckart.compress(tiny.bert(), BATCHES, 0.5, own)
    assert {one.rank % 4 for one in report.targets.values() if one.rank and one.rank > 1} == {0}


def test_batches_without_labels_do_where_no_gradients_are_read() -> None:
    unlabelled = [{name: values for name, values in batch.items() if name != "labels"} for batch in BATCHES]
    _, report = eckart.compress(tiny.bert(), iter(unlabelled), 0.5, "drone")
    assert report.keep <= 0.5
    with pytest.raises(ValueError, match=r"labels.*drone"):
        eckart.compress(tiny.bert(), unlabelled, 0.5, "kfac")


def test_a_loss_of_ones_own_may_need_no_labels() -> None:
    unlabelled = [{name: values for name, values in batch.items() if name != "labels"} for batch in BATCHES]
    _, report = eckart.compress(tiny.bert(), unlabelled, 0.5, "kfac", loss=expected_losses)
    assert report.keep <= 0.5


def test_a_search_that_asks_for_the_loss_needs_labels() -> None:
    unlabelled = [{name: values for name, values in batch.items() if name != "labels"} for batch in BATCHES]
    with pytest.raises(ValueError, match=r"tolerance.*labels"):
        eckart.compress(tiny.bert(), unlabelled, 0.5, "drone_tolerance")


@pytest.mark.parametrize("side", ["right", "left"])
def test_how_texts_are_batched_changes_nothing(side: str) -> None:
    """Samples count alike, however long they are and whatever stands beside them."""
    found = []
    for size in (1, 4):
        batches = tiny.batches(tiny.samples(8), size, side=side)
        texts = [
            {**one, "labels": one["input_ids"].masked_fill(one["attention_mask"] == 0, IGNORED)} for one in batches
        ]
        found.append(eckart.compress(tiny.causal_llama(), texts, 0.5, "kfac").report.predicted_loss)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("recipe", ["ars", "softlm", "lpaf", "losparse"])
def test_a_recipe_that_trains_first_is_for_the_pipeline(recipe: str) -> None:
    with pytest.raises(ValueError, match=r"eckart run.*svd, .*anchored"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, recipe)


def test_mistakes_are_said_before_anything_is_computed() -> None:
    with pytest.raises(ValueError, match=r"'kfca'.*kfac"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, "kfca")
    with pytest.raises(ValueError, match="list"):
        eckart.compress(tiny.bert(), BATCHES[0], 0.5)
    with pytest.raises(ValueError, match="no batch"):
        eckart.compress(tiny.bert(), [], 0.5)
    with pytest.raises(ValueError, match="matches"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, include=["nothing.*"])
    with pytest.raises(ValueError, match=r"keep=0\.01 "):
        eckart.compress(tiny.bert(), BATCHES, 0.01)
    with pytest.raises(ValueError, match="keep=2"):
        eckart.compress(tiny.bert(), BATCHES, 2.0)
    with pytest.raises(ValueError, match=r"keep='0\.3'"):
        eckart.compress(tiny.bert(), BATCHES, "0.3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear"):
        eckart.compress(torch.nn.Linear(2, 2), BATCHES, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"BertModel.*head"):
        eckart.compress(tiny.bert().base_model, BATCHES, 0.5, "kfac")
    with pytest.raises(ValueError, match="weighting"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, {"source": "finetuned"})
    for drop in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="largest_drop"):
            eckart.compress(tiny.bert(), BATCHES, largest_drop=drop, score=lambda _: 1.0)


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (INPUTS, "batch 1 .* labels"),
        ({name: values.tolist() for name, values in BATCHES[1].items()}, "list"),
        ({**BATCHES[1], "labels": BATCHES[1]["labels"][:2]}, r"labels \(2,\)"),
        (["some text"], "mapping"),
    ],
)
def test_every_batch_is_looked_at(second: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        eckart.compress(tiny.bert(), [BATCHES[0], second], 0.5, "kfac")


@pytest.mark.parametrize("given", [None, float("nan")])
def test_a_score_is_a_number(given: float | None) -> None:
    with pytest.raises(ValueError, match=str(given)):
        eckart.compress(tiny.bert(), BATCHES, recipe="svd", largest_drop=0.1, score=lambda _: given)  # type: ignore[arg-type,return-value]


def test_a_pattern_may_stand_alone() -> None:
    _, report = eckart.compress(tiny.bert(), BATCHES, 0.5, "svd", include="*.attention.*")
    assert report.targets
    assert all(".attention." in name for name in report.targets)


def test_what_a_decoder_reads_is_made_of_the_labels() -> None:
    """As a padded batch with the decoder's inputs given has it, bit for bit."""
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
    (small, _), (same, _) = (eckart.compress(model, [one], 0.5, "kfac") for one in (short, long))
    tiny.assert_same(small, same, long)


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf"])
def test_a_quantized_model_is_refused(method: str) -> None:
    """Its config says how it is stored, and there is one place for that."""
    model = tiny.bert()
    model.config.quantization_config = {"quant_method": method, "load_in_8bit": True}
    with pytest.raises(ValueError, match=method):
        eckart.compress(model, BATCHES, 0.5)


def test_a_model_with_adapters_is_refused() -> None:
    model = tiny.bert()
    model._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match="merge_and_unload"):
        eckart.compress(model, BATCHES, 0.5)


class Counting(type(tiny.bert())):  # type: ignore[misc]
    """It answers by what is in no state: how often it was called."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        self.calls += 1
        outputs.logits = outputs.logits * 2**self.calls
        return outputs


def test_what_does_not_come_back_from_a_folder_is_refused() -> None:
    model = Counting(tiny.bert().config)
    with pytest.raises(ValueError, match="saved and loaded"):
        eckart.compress(model, BATCHES, 0.5, "svd")
    small, _ = eckart.compress(model, BATCHES, 0.5, "svd", check=False)
    assert factorized(small)


def test_labels_that_all_are_left_out_are_an_error() -> None:
    labels = {"labels": torch.full_like(BATCHES[0]["input_ids"], IGNORED)}
    with pytest.raises(ValueError, match=str(IGNORED)):
        eckart.compress(tiny.causal_llama(), [BATCHES[0] | labels], 0.5, "kfac")


def test_a_loss_without_a_gradient_is_an_error() -> None:
    """It would leave all ranks to chance, and predict that nothing is lost."""

    def flat(model: Any, batch: Any) -> torch.Tensor:
        return 0 * model(**batch).logits.sum()

    def apart(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch).loss.detach()

    for loss in (flat, apart):
        with pytest.raises(ValueError, match="gradient of zero"):
            eckart.compress(tiny.bert(), BATCHES, 0.5, "kfac", loss=loss)


def test_a_model_that_widens_its_own_parameters_is_counted() -> None:
    """DeBERTa reads embeddings of positions, which have gradients and are no result of any."""
    family = FAMILIES["deberta-v3"]
    batch = collate(samples(family.kind))
    _, report = eckart.compress(family.build(), [batch], 0.5, "kfac")
    assert 0 < report.macs[1] < report.macs[0]


def test_outputs_without_names_are_refused() -> None:
    model = tiny.bert()
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict"):
        eckart.compress(model, BATCHES, 0.5)


def test_what_is_padding_alone_is_an_error() -> None:
    masks = {"attention_mask": torch.zeros_like(BATCHES[0]["attention_mask"])}
    with pytest.raises(ValueError, match="mask"):
        eckart.compress(tiny.bert(), [BATCHES[0] | masks], 0.5, "drone")


def warned(model: PreTrainedModel, batches: Any, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        eckart.compress(model, batches, 0.5, "kfac", check=False, **options)
    return " ".join(str(one.message) for one in found)


def test_fewer_tokens_than_inputs_are_warned_of() -> None:
    assert "fewer tokens" in warned(tiny.llama(), BATCHES[:1])
    assert "fewer tokens" not in warned(tiny.llama(), BATCHES)


def test_padding_that_changes_the_answers_is_warned_of() -> None:
    """GPT-2 counts positions from the first column, where it is not told them."""
    left = tiny.batches(tiny.samples(12), 4, side="left")
    untold = [{name: values for name, values in batch.items() if name != "position_ids"} for batch in left]
    assert "padding" in warned(tiny.gpt2(), untold)
    assert "padding" not in warned(tiny.gpt2(), left)
    assert "padding" not in warned(tiny.gpt2(), BATCHES)
    assert "padding" not in warned(tiny.llama(), untold)


def test_gradients_that_float16_cannot_hold_are_warned_of() -> None:
    def scaled(factor: float) -> Any:
        return lambda model, batch: factor * model(**batch).loss * len(batch["labels"])

    assert "float16" in warned(tiny.bert().half(), BATCHES, loss=scaled(1e-5))
    assert "float16" not in warned(tiny.bert().half(), BATCHES, loss=scaled(1.0))
    assert "float16" not in warned(tiny.bert(), BATCHES, loss=scaled(1e-5))


def test_targets_that_are_the_least_of_a_model_are_warned_of() -> None:
    assert "Targets are only" in warned(tiny.bert(), BATCHES, include="*.query")
    assert "Targets are only" not in warned(tiny.bert(), BATCHES)


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
