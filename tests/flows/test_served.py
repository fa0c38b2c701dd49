"""A version as it is used: by MLflow, by its server, and by transformers, in an environment without the pipeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pandas as pd
import pytest
import torch
from mlflow.pyfunc import PythonModelContext
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, PreTrainedModel

from eckart import hub
from eckart.layers import factorize
from eckart.svd import decompose
from eckart.targets import weight_of
from eckart.weighting import Metrics
from flows.gates import digest
from flows.registry import CHAMPION, connected, save
from flows.served import Served
from flows.settings import answers
from tests.flows.servers import free_port
from tests.workspace import a_task, bert, tiny_config, tiny_tokenizer

TASK = a_task("classification", ("bad", "good"), "accuracy", 6)
TEXTS = ["the plot is dull", "the cast is warm and clever and fresh and moving and brilliant", "the music"]
SETTINGS = {"max_length": TASK.max_length, "batch_size": 2}


def write(folder: Path, model: PreTrainedModel) -> Path:
    hub.save(model, folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def compressed() -> PreTrainedModel:
    model = bert()
    name = "bert.encoder.layer.0.intermediate.dense"
    factorize(model, name, *decompose(weight_of(model.get_submodule(name)), Metrics()).truncate(3))
    model.config.id2label = dict(enumerate(TASK.labels))
    return model


def probabilities(model: PreTrainedModel, *texts: list[str]) -> torch.Tensor:
    """`(rows, classes)`, computed one row at a time."""
    rows = [
        tiny_tokenizer()(*row, truncation=True, max_length=6, return_tensors="pt") for row in zip(*texts, strict=True)
    ]
    with torch.no_grad():
        return torch.cat([model(**row).logits for row in rows]).softmax(-1)


def loaded(folder: Path) -> Served:
    served = Served()
    served.load_context(PythonModelContext({"model": str(folder)}, SETTINGS))
    return served


def ask(served: Served, rows: pd.DataFrame) -> pd.DataFrame:
    return served.predict(PythonModelContext({}, SETTINGS), rows)


class TestAnswers:
    def test_each_row_gets_its_likeliest_label_and_the_probability_of_it(self, tmp_path: Path) -> None:
        model = compressed()
        found = ask(loaded(write(tmp_path, model)), pd.DataFrame({"text": TEXTS}))
        scores, labels = probabilities(model, TEXTS).max(-1)
        assert found["label"].tolist() == [TASK.labels[label] for label in labels]
        assert found["score"].tolist() == pytest.approx(scores.tolist(), abs=1e-6)

    def test_pairs_of_texts(self, tmp_path: Path) -> None:
        model, second = compressed(), TEXTS[::-1]
        found = ask(loaded(write(tmp_path, model)), pd.DataFrame({"text": TEXTS, "text_pair": second}))
        assert found["score"].tolist() == pytest.approx(
            probabilities(model, TEXTS, second).max(-1)[0].tolist(), abs=1e-6
        )

    def test_a_regression_gives_its_numbers(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = BertForSequenceClassification(tiny_config(num_labels=1, problem_type="regression")).eval()
        found = ask(loaded(write(tmp_path, model)), pd.DataFrame({"text": TEXTS[:1]}))
        with torch.no_grad():
            wanted = model(**tiny_tokenizer()(TEXTS[:1], return_tensors="pt")).logits
        assert found["value"].tolist() == pytest.approx([float(wanted)], abs=1e-6)

    def test_no_rows_get_no_found(self, tmp_path: Path) -> None:
        found = ask(loaded(write(tmp_path, compressed())), pd.DataFrame({"text": []}))
        assert list(found) == ["label", "score"]
        assert found.empty


class TestVersion:
    @pytest.fixture(scope="class")
    def root(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A workspace whose registry has a compressed model as the champion."""
        root = tmp_path_factory.mktemp("served")
        folder = write(root / "models/finetuned/svd-0.5", compressed())
        with pytest.MonkeyPatch.context() as patch:
            for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
                patch.delenv(name, raising=False)
            save(folder, root / "saved", TASK, pairs=False, batch_size=2)
            with connected(root, "tiny") as models:
                _, experiment = models.origin(root, "study", "no such key")
                version = models.add(root / "saved", "svd-0.5", digest(folder), experiment, None, {})
                models.client.set_registered_model_alias("tiny", CHAMPION, version.version)
        return root

    @pytest.fixture(scope="class")
    def environment(self, root: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PYTHONPATH"))}
        return {**kept, "MLFLOW_TRACKING_URI": f"sqlite:///{root / 'mlflow.db'}", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def test_what_is_stored(self, root: Path) -> None:
        (stored,) = (root / "mlruns").rglob("MLmodel")
        files = [path for path in stored.parent.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {"", ".py", ".json", ".txt", ".yaml", ".safetensors"}  # no pickle
        assert digest(stored.parent / "artifacts/model") == digest(root / "models/finetuned/svd-0.5")
        pinned = (stored.parent / "requirements.txt").read_text().split()
        assert {line.partition("==")[0] for line in pinned} >= {"torch", "transformers", "mlflow"}
        assert not any("+" in line or "eckart" in line for line in pinned)  # an index has neither

    def test_without_the_pipeline_mlflow_and_transformers_load_it(
        self, root: Path, environment: dict[str, str], tmp_path: Path
    ) -> None:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_PIPELINE, str(tmp_path), *TEXTS],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        model = AutoModelForSequenceClassification.from_pretrained(root / "models/finetuned/svd-0.5")
        inputs = tiny_tokenizer()(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            assert found["logits"] == model(**inputs).logits.tolist()  # bit for bit
        scores, labels = probabilities(model, TEXTS).max(-1)
        assert [row["label"] for row in found["answers"]] == [TASK.labels[label] for label in labels]
        assert [row["score"] for row in found["answers"]] == pytest.approx(scores.tolist(), abs=1e-6)
        assert "/code/eckart" in found["eckart"]  # the version brings its own

    def test_mlflow_s_server_answers_on_loopback(self, environment: dict[str, str], tmp_path: Path) -> None:
        with server(environment, tmp_path) as address:
            rows = {"dataframe_split": {"columns": ["text"], "data": [[text] for text in TEXTS]}}
            found = post(f"{address}/invocations", rows)["predictions"]
        scores, labels = probabilities(compressed(), TEXTS).max(-1)
        assert [row["label"] for row in found] == [TASK.labels[label] for label in labels]
        assert [row["score"] for row in found] == pytest.approx(scores.tolist(), abs=1e-6)


WITHOUT_PIPELINE = """
import json, sys

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("tasks", "flows", "prefect", "dvc"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import mlflow, pandas, torch
folder, *texts = sys.argv[1:]
model = mlflow.pyfunc.load_model("models:/tiny@champion")
answers = model.predict(pandas.DataFrame({"text": texts}))
import eckart
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder = mlflow.artifacts.download_artifacts("models:/tiny@champion", dst_path=folder) + "/artifacts/model"
inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = AutoModelForSequenceClassification.from_pretrained(folder)(**inputs).logits
print(json.dumps({"answers": answers.to_dict("records"), "logits": logits.tolist(), "eckart": eckart.__file__}))
"""


@contextmanager
def server(environment: dict[str, str], folder: Path) -> Iterator[str]:
    """The address of `mlflow models serve` of the champion, started in `folder`."""
    port = str(free_port())
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/tiny@champion"]
    process = subprocess.Popen(
        [*command, "--env-manager", "local", "--host", "127.0.0.1", "--port", port],
        cwd=folder,
        env={**environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"},
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        while not answers(f"{address}/ping"):
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(address: str, content: Any) -> Any:
    request = Request(address, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as response:
        return json.load(response)
