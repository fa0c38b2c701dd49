"""The stages of two candidates in a tiny workspace, and the laws that hold between their files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from sklearn.metrics import accuracy_score
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import eckart
from flows.engine import cached_objects
from tasks import benchmark
from tasks.artifacts.task_spec import load_task
from tasks.data.loading import batches, encoded
from tasks.nlp_tasks import kind_of
from tests.flows.toy import Study
from tests.workspace import TO_IMPORTANCE, digests, inside, run_stage, tiny_params, write_params

CANDIDATES = ("svd-0.5", "kfac-0.5")


@pytest.fixture(scope="module")
def chain(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The workspace of a finished study, as the working directory; kfac is exported."""
    root = tmp_path_factory.mktemp("chain") / "workspace"
    for name in ("data", "models", "reports"):
        shutil.copytree(study.root / name, root / name)
    shutil.copy(study.root / "params.yaml", root)
    with inside(root):
        yield root


@pytest.fixture(autouse=True)
def _ran(chain: Path) -> None:
    """Every test here stands in that workspace."""


@pytest.fixture
def own_workspace(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to break."""
    shutil.copytree(chain, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def model(folder: str) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder)


def matrix(module: nn.Module, width: int) -> Tensor:
    """The weight `(out, in)` of a linear map, factorized or not, seen from outside."""
    with torch.no_grad():
        return (module(torch.eye(width)) - module(torch.zeros(1, width))).T


def fail(stage: str, *candidate: str) -> str:
    with pytest.raises(SystemExit) as caught:
        run_stage(stage, *candidate)
    return str(caught.value.code)


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_keep_no_more_than_asked_and_have_the_ranks_that_were_decided(name: str) -> None:
    decision = read(f"models/ranks/{name}/ranks.json")
    assert decision["parameters_after"] <= 0.5 * decision["parameters_before"]
    assert decision["parameters_after"] > 0.4 * decision["parameters_before"]  # and the budget is used
    ranks = decision["ranks"]
    assert set(ranks) == {target["name"] for target in read("data/importance/targets.json")["targets"]}
    factorized = {target: rank for target, rank in ranks.items() if rank is not None}
    for stage in ("factorized", "finetuned"):
        assert read(f"models/{stage}/{name}/config.json")["quantization_config"]["ranks"] == factorized


@pytest.mark.parametrize("name", CANDIDATES)
def test_both_denominators_agree(name: str) -> None:
    """The targets lose as many parameters as the model."""
    decision, evaluation = read(f"models/ranks/{name}/ranks.json"), read(f"reports/evaluate/{name}.json")
    lost = decision["parameters_before"] - decision["parameters_after"]
    assert read("reports/dense.json")["size"]["model_parameters"] - lost == evaluation["size"]["model_parameters"]
    weights = load_file(f"models/finetuned/{name}/model.safetensors")
    assert evaluation["size"]["model_parameters"] == sum(value.numel() for value in weights.values())
    assert evaluation["size"]["bytes"] == Path(f"models/finetuned/{name}/model.safetensors").stat().st_size
    assert evaluation["size"]["macs_per_token"] < read("reports/dense.json")["size"]["macs_per_token"]


@pytest.mark.parametrize(("name", "report"), [("dense", "dense"), ("kfac-0.5", "evaluate/kfac-0.5")])
def test_an_exported_file_scores_as_its_model_does(name: str, report: str) -> None:
    exported, model = read(f"reports/onnx/{name}.json"), read(f"reports/{report}.json")
    wanted = model["score"] if name == "dense" else model["recovered"]
    assert exported["onnx"]["score"]["metrics"] == wanted["metrics"]
    assert exported["onnx"]["score"]["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert exported["int8"]["score"]["loss"] == pytest.approx(wanted["loss"], rel=0.1)
    rows = pd.read_parquet(f"reports/predictions/{name}.onnx.parquet")
    for runtime, file in (("onnx", "model.onnx"), ("int8", "int8.onnx")):
        assert exported[runtime]["bytes"] == Path(f"models/onnx/{name}/{file}").stat().st_size
        chosen = rows[rows["model"] == runtime]
        assert accuracy_score(chosen["label"], chosen["guess"]) == exported[runtime]["score"]["metric"]
    assert exported["int8"]["bytes"] < exported["onnx"]["bytes"]


def test_plain_svd_is_the_best_approximation_of_its_rank() -> None:
    """Eckart and Young: ‖W − Ŵ‖² = Σ_{k>r} s_k²; half of it the search foresaw."""
    decision = read("models/ranks/svd-0.5/ranks.json")
    teacher, small = model("models/teacher"), model("models/factorized/svd-0.5")
    for name, rank in decision["ranks"].items():
        weight = teacher.get_submodule(name).weight.detach().double()
        approximation = matrix(small.get_submodule(name), weight.shape[1]).double()
        energies = torch.linalg.svdvals(weight).square()
        assert torch.linalg.matrix_rank(approximation, rtol=1e-4) == rank
        error = (weight - approximation).square().sum()
        torch.testing.assert_close(error, energies[rank:].sum(), rtol=1e-4, atol=0)
        assert decision["predicted_loss"][name] == pytest.approx(error.item() / 2, rel=1e-4)


@pytest.mark.parametrize("name", CANDIDATES)
def test_factorizing_leaves_everything_else(name: str) -> None:
    """Biases, embeddings, norms and the head are bitwise the teacher's."""
    teacher = load_file("models/teacher/model.safetensors")
    small = load_file(f"models/factorized/{name}/model.safetensors")
    targets = read(f"models/ranks/{name}/ranks.json")["ranks"]
    replaced, biases = {f"{target}.weight" for target in targets}, {f"{target}.bias" for target in targets}
    kept = {key: key.replace(".bias", ".left.bias") if key in biases else key for key in set(teacher) - replaced}
    assert all(torch.equal(teacher[key], small[place]) for key, place in kept.items())


@pytest.mark.parametrize(
    ("start", "end", "curve"),
    [(f"factorized/{name}", f"finetuned/{name}", f"finetune/{name}") for name in CANDIDATES]
    + [("teacher", "control", "control")],
)
def test_recovery_trains_the_candidates_and_the_control(start: str, end: str, curve: str) -> None:
    before, after = (load_file(f"models/{folder}/model.safetensors") for folder in (start, end))
    assert {key: value.shape for key, value in before.items()} == {key: value.shape for key, value in after.items()}
    assert any(not torch.equal(value, after[key]) for key, value in before.items())
    points = [json.loads(line) for line in Path(f"reports/{curve}.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [1, 2]


def test_zero_steps_of_recovery_leave_a_model_as_it_is(own_workspace: Path) -> None:
    """A candidate, and the original model as its control."""
    none = {"recovery": {"steps": 0}}
    write_params(Path(), tiny_params(recipes={"svd": none, "kfac": none}))
    run_stage("finetune", "svd", "0.5")
    before, after = (digests(Path(f"models/{step}/svd-0.5")) for step in ("factorized", "finetuned"))
    assert before["model.safetensors"] == after["model.safetensors"]
    run_stage("control")
    run_stage("dense")
    dense = read("reports/dense.json")
    assert dense["control"] == {
        name: dense[name] for name in ("score", "validation", "zero_shot", "texts", "continuations")
    }
    assert digests(Path("models/control"))["model.safetensors"] == digests(Path("models/teacher"))["model.safetensors"]


def test_the_teacher_is_not_touched_by_later_stages(study: Study) -> None:
    """The teacher has the digest that dvc.lock records."""
    lock = YAML(typ="safe").load((study.root / "dvc.lock").read_text())["stages"]["teacher"]
    (written,) = (out["md5"] for out in lock["outs"] if out["path"] == "models/teacher")
    assert cached_objects.digest_of(cached_objects.measured(Path("models/teacher"))) == written


def test_no_weights_are_pickled() -> None:
    """Loading a pickle runs code."""
    suffixes = {file.suffix for folder in ("models", "data/importance") for file in Path(folder).rglob("*.*")}
    assert {".safetensors", ".json"} <= suffixes
    assert not suffixes & {".bin", ".pt", ".pth", ".pkl", ".pickle", ".npy", ".npz", ".ckpt"}


@pytest.mark.parametrize("name", CANDIDATES)
@pytest.mark.parametrize("step", ["factorized", "recovered", "validation"])
def test_scores_are_those_of_the_loaded_model_on_the_split(name: str, step: str) -> None:
    folder = f"models/{'factorized' if step == 'factorized' else 'finetuned'}/{name}"
    split = "validation" if step == "validation" else "test"
    small, tokenizer = model(folder), AutoTokenizer.from_pretrained(folder)
    test = pd.read_parquet(f"data/splits/{split}.parquet")
    with torch.no_grad():
        outputs = torch.cat([small(**tokenizer(text, return_tensors="pt")).logits for text in test["text"]])
    labels = torch.tensor(test["label"].tolist())
    assert small.config.id2label == {0: "negative", 1: "positive"}
    result = read(f"reports/evaluate/{name}.json")[step]
    dense = read("reports/dense.json")["validation" if step == "validation" else "score"]
    assert result["examples"] == len(test) == dense["examples"]
    assert result["metric"] == accuracy_score(labels, outputs.argmax(-1))
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)


def test_candidates_too_big_for_memory_together_are_timed_one_after_the_other(
    own_workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_ROOM", 0)
    groups: list[Sequence[str]] = []
    latencies = benchmark._latencies
    monkeypatch.setattr(
        benchmark,
        "_latencies",
        lambda dense, names, *rest: groups.append(names) or latencies(dense, names, *rest),
    )
    benchmark.benchmark()
    assert groups == [[name] for name in CANDIDATES]
    assert set(read("reports/benchmark.json")) == set(CANDIDATES)


def test_candidates_of_equal_shapes_are_timed_as_one(own_workspace: Path) -> None:
    timed = {name: times["timed"] for name, times in read("reports/benchmark.json").items()}
    assert timed == {name: name for name in CANDIDATES}
    shutil.rmtree("models/finetuned/svd-0.5")
    shutil.copytree("models/finetuned/kfac-0.5", "models/finetuned/svd-0.5")
    run_stage("benchmark")
    benchmarks = read("reports/benchmark.json")
    assert {times["timed"] for times in benchmarks.values()} == {"kfac-0.5"}  # the one that is exported
    assert set(benchmarks["kfac-0.5"]["latency"]["candidate"]) == {"torch", "onnx", "int8"}
    assert benchmarks["svd-0.5"]["latency"]["candidate"] == {
        "torch": benchmarks["kfac-0.5"]["latency"]["candidate"]["torch"]
    }


@pytest.mark.parametrize("name", CANDIDATES)
def test_one_call_gives_what_the_stages_give(name: str) -> None:
    recipe, keep = name.split("-")
    teacher, tokenizer = model("models/teacher"), AutoTokenizer.from_pretrained("models/teacher")
    collate = kind_of(load_task()).collate(tokenizer, teacher)
    data = list(batches(encoded("calibration", tokenizer), collate, 8, "cpu"))
    own = YAML(typ="safe").load(Path("params.yaml").read_text())["recipes"][recipe]
    small, report = eckart.compress(teacher, data, float(keep), own)
    for key, values in model(f"models/factorized/{name}").state_dict().items():
        torch.testing.assert_close(small.state_dict()[key], values)
    decided = read(f"models/ranks/{name}/ranks.json")
    assert {name: target.rank for name, target in report.targets.items()} == decided["ranks"]
    predicted = {name: target.predicted_loss for name, target in report.targets.items()}
    assert predicted == pytest.approx(decided["predicted_loss"])


def test_only_the_requested_statistics_are_computed(own_workspace: Path) -> None:
    statistics = {file.stem for file in Path("data/importance").glob("*.safetensors")}
    assert {"inputs", "output_gradients", "fisher", "taylor"} <= statistics
    write_params(Path(), tiny_params(importance={"statistics": ["fisher"]}))
    run_stage("importance")
    assert "importance.statistics" in fail("search", "kfac", "0.5")
    assert not {"inputs", "taylor"} & {file.stem for file in Path("data/importance").glob("*.safetensors")}


def test_the_same_inputs_give_the_same_bytes(own_workspace: Path) -> None:
    candidate = [f"models/{stage}/kfac-0.5" for stage in ("ranks", "factorized", "finetuned")]
    folders = [Path(folder) for folder in ("data/splits", "models/teacher", "data/importance", *candidate)]
    before = [digests(folder) for folder in folders]
    for folder in folders:
        shutil.rmtree(folder)
    torch.manual_seed(99)  # what was drawn before must not matter
    for stage in TO_IMPORTANCE:
        run_stage(stage)
    for stage in ("search", "factorize", "finetune"):
        run_stage(stage, "kfac", "0.5")
    assert [digests(folder) for folder in folders] == before


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [(0, 0), (1.6, 7)],  # 32 examples by 8 are 4 steps; 1.6 epochs are 6.4, and the part is taken whole
)
def test_epochs_are_steps_of_the_teacher(epochs: float, steps: int, own_workspace: Path) -> None:
    write_params(Path(), tiny_params(seed=1, teacher={"epochs": epochs}))
    before = digests(Path("models/teacher"))["model.safetensors"]
    run_stage("teacher")
    assert len(Path("reports/teacher.jsonl").read_text().splitlines()) == steps
    assert digests(Path("models/teacher"))["model.safetensors"] != before
    if not steps:
        base, teacher = (load_file(f"models/{name}/model.safetensors") for name in ("base/tiny", "teacher"))
        assert all(torch.equal(value, teacher[f"bert.{key}"]) for key, value in base.items())


@pytest.mark.parametrize(
    ("changes", "words", "named"),
    [
        ({}, ("search", "svd", "0.001"), "keep"),
        ({"targets": {"include": ["nothing*"]}}, ("importance",), "targets"),
        ({"benchmark": {"shapes": [[1, 65]]}}, ("benchmark",), "benchmark.shapes"),  # the tiny model has 64 positions
    ],
)
def test_a_mistake_that_only_a_stage_can_find_names_the_parameter(
    changes: dict[str, Any], words: tuple[str, ...], named: str, own_workspace: Path
) -> None:
    write_params(Path(), tiny_params(**changes))
    message = fail(*words)
    assert message.startswith(words[0])
    assert named in message


def test_a_teacher_that_breaks_leaves_no_folder(own_workspace: Path) -> None:
    shutil.rmtree("models/teacher")
    write_params(Path(), tiny_params(teacher={"learning_rate": 1e30, "warmup": 0.0}))
    assert re.match(r"teacher: .*\bstep \d", fail("teacher"))
    assert not Path("models/teacher").exists()


def test_a_regression_goes_the_same_way(own_workspace: Path) -> None:
    frame = pd.read_csv("data/raw/reviews.csv")
    frame.assign(label=[position / 10 for position in range(len(frame))]).to_csv("data/raw/reviews.csv", index=False)
    write_params(Path(), tiny_params(data={"task": "regression", "metric": "spearman"}))
    for stage in ("extract", "check", "teacher", "calibration", "importance"):
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, "kfac", "0.5")
    assert -1 <= read("reports/evaluate/kfac-0.5.json")["recovered"]["metric"] <= 1
    assert model("models/finetuned/kfac-0.5").config.num_labels == 1


def test_a_weight_that_is_not_finite_is_named(own_workspace: Path) -> None:
    name = read("data/importance/targets.json")["targets"][1]["name"]
    weights = load_file("models/teacher/model.safetensors")
    weights[f"{name}.weight"][0, 0] = torch.nan
    save_file(weights, "models/teacher/model.safetensors", {"format": "pt"})
    for stage in ("search", "factorize"):
        assert fail(stage, "svd", "0.5") == f"{stage}@svd-0.5: {name}: the weight is not finite"
