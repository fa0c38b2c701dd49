"""The promises of docs/reference/safety.md: no pickle, no code from models or data, no secret in anything written."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import pickle
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, load_model, save_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from eckart.training.rules import Rule
from flows.cli import app
from flows.environment import redaction
from flows.tracking.mirror import Mirror
from tasks.artifacts.errors import StageError
from tasks.config import validation
from tasks.config.params_file import ParamsError
from tasks.config.schema import Data, Model
from tasks.data.reading import load_source
from tasks.models.base_model import load_base
from tasks.models.model_io import load
from tasks.training.checkpoints import CHECKPOINTS, SECONDS
from tests.training import train
from tests.workspace import BASE, REPOSITORY, a_task, bert, collate, rows, tiny_params, tiny_workspace, write_params

MARKER = Path("marker")
TASK = a_task("classification", ("negative", "positive"), "accuracy")
SECRET = "topsecret"
URL = f"http://user:{SECRET}@127.0.0.1:9"  # nobody listens there


class Evil:
    """An object that leaves a marker when unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(MARKER.absolute()),)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workspace in which no code of a model or of data may run."""
    root = tiny_workspace(tmp_path / "workspace")
    monkeypatch.chdir(root)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield root
    assert not (root / MARKER).exists()


def refusal(base: str = BASE) -> str:
    with pytest.raises(StageError) as caught:
        load_base(Model(base=base, revision=None, dtype="float32", device_map=None), TASK)
    return str(caught.value)


def configure(**changes: Any) -> None:
    file = Path(BASE, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def pickle_weights(name: str, **more: Any) -> dict[str, torch.Tensor]:
    """Put the weights of the base model into a pickle; what they were."""
    safe = Path(BASE, "model.safetensors")
    weights = load_file(safe)
    torch.save({**weights, **more}, Path(BASE, name))
    safe.unlink()
    return weights


def run_advice() -> None:
    """Run the command that the refusal advises, in the folder of the base model, but in this process."""
    python, option, code = shlex.split("python" + refusal().partition("python")[2])
    assert (python, option) == ("python", "-c")
    with contextlib.chdir(BASE):
        exec(code, {})


def index_of_a_pickle(name: str = "model.safetensors.index.json") -> None:
    weights = pickle_weights("shard.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "shard.bin")}
    Path(BASE, name).write_text(json.dumps(index))


def config_of_an_index() -> None:
    index_of_a_pickle("other.safetensors.index.json")
    configure(transformers_weights="other.safetensors.index.json")


def config_of_a_pickle() -> None:
    pickle_weights("adapter_model.bin")
    configure(transformers_weights="adapter_model.bin")


@pytest.mark.usefixtures("workspace")
class TestModels:
    @pytest.mark.parametrize(
        "arrange",
        [
            lambda: pickle_weights("pytorch_model.bin", evil=Evil()),
            index_of_a_pickle,
            config_of_a_pickle,
            config_of_an_index,
        ],
    )
    def test_a_pickle_is_refused_unread_wherever_it_is_named(
        self, arrange: Callable[[], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arrange()
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("read"))
        said = refusal()
        assert BASE in said
        assert "model.safetensors" in said
        with pytest.raises(OSError, match=r"model\.safetensors"):
            load(Path(BASE), AutoModelForSequenceClassification)

    def test_an_adapter_is_refused_which_would_bring_files_of_its_own(self) -> None:
        Path(BASE, "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": BASE}))
        assert "adapter" in refusal()

    def test_the_advice_makes_the_same_model_of_it(self) -> None:
        weights = pickle_weights("pytorch_model.bin")
        run_advice()
        model = load_base(Model(base=BASE, revision=None, dtype="float32", device_map=None), TASK).model
        state = model.bert.state_dict()
        assert all(torch.equal(state[name], value) for name, value in weights.items())

    def test_the_advice_runs_nothing_that_the_pickle_brings(self) -> None:
        pickle_weights("pytorch_model.bin", evil=Evil())
        with pytest.raises(pickle.UnpicklingError):
            run_advice()

    @pytest.mark.parametrize("part", ["AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer"])
    def test_a_model_that_brings_code_is_refused_and_asks_nobody(
        self, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
        Path(BASE, "evil.py").write_text(f"import os\nos.mkdir({str(MARKER.absolute())!r})\n")
        configure(model_type="evil", auto_map={part: "evil.Evil"})
        if part == "AutoTokenizer":
            file = Path(BASE, "tokenizer_config.json")
            tokenizer = {"tokenizer_class": "Evil", "auto_map": {part: ["evil.Evil", "evil.Evil"]}}
            file.write_text(json.dumps({**json.loads(file.read_text()), **tokenizer}))
        said = refusal()
        assert said.startswith(f"model.base {BASE} ")
        assert "trust_remote_code" not in said

    @pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
    def test_a_kernel_of_the_hub_is_code_too(self, key: str) -> None:
        configure(**{key: "somebody/kernel"})
        assert "somebody/kernel" in refusal()


@pytest.mark.parametrize("source", ["data/raw/rows.pkl", "data/raw/rows.py", "data/raw/folder", "somebody/loader"])
@pytest.mark.usefixtures("workspace")
def test_data_files_that_run_code_are_refused(source: str) -> None:
    code = f"import os\nos.mkdir({str(MARKER.absolute())!r})\n"
    for name in ("data/raw/rows.py", "data/raw/folder/folder.py", "somebody/loader/loader.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(code)
    for name in ("data/raw/rows.pkl", "data/raw/folder/train.pkl"):
        torch.save(Evil(), name)
    with pytest.raises(StageError, match=source):
        load_source(Data(**{**tiny_params()["data"], "source": source}))


class Killed(Exception):
    pass


class Kill(Rule):
    def __init__(self, step: int | None = None) -> None:
        self.step = step

    def after_update(self, step: int) -> None:
        if step == self.step:
            raise Killed


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
@pytest.mark.usefixtures("workspace")
def test_a_checkpoint_that_was_tampered_with_runs_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer reads tensors alone of what it pickled, and its own arguments not at all."""
    monkeypatch.setenv(SECONDS, "0")
    options = {"steps": 10, "batch_size": 8, "learning_rate": 1e-3, "warmup": 0.0, "weight_decay": 0.0, "seed": 0}
    with pytest.raises(Killed):
        train(bert(), collate(), rows(), Path("curve.jsonl"), rules=[Kill(4)], **options)
    damaged = list(CHECKPOINTS.rglob(file))
    assert damaged
    for checkpoint in damaged:
        torch.save({"state": Evil()}, checkpoint)
    expected = contextlib.nullcontext() if file == "training_args.bin" else pytest.raises(pickle.UnpicklingError)
    with expected:
        train(bert(), collate(), rows(), Path("curve.jsonl"), rules=[Kill()], **options)


class EvilModel(Evil, PythonModel):
    def predict(self, context: object, model_input: list[str], params: object = None) -> list[str]:
        return model_input


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("workspace")
def test_a_version_that_was_pickled_is_not_loaded() -> None:
    """settings.apply forbids MLflow to unpickle in any process of ours."""
    save_model(Path("version"), python_model=EvilModel(), pip_requirements=[])
    with pytest.raises(MlflowException, match="pickle"):
        load_model("version")


def test_the_code_has_no_way_to_read_a_pickle() -> None:
    """But for the one that the Trainer has, and the command that is advised to a user."""
    readers = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for file in [path for folder in ("eckart", "tasks", "flows") for path in (REPOSITORY / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not readers & {name.partition(".")[0] for name in names}, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec"), file
                assert not {"allow_pickle", "weights_only"} & {keyword.arg for keyword in node.keywords}, file
                options_given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if called.endswith(".from_pretrained") and None not in options_given:  # else its options are a mapping
                    assert options_given.get("trust_remote_code") == "False", f"{file}: {ast.unparse(node)}"


class TestSecrets:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (URL, "http://127.0.0.1:9"),
            ("postgresql+psycopg://u:p@ss@db:5432/x", "postgresql+psycopg://db:5432/x"),
            ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
            (f"API request to {URL}/api/2.0 failed; mail me@example.org", "API request to http://127.0.0.1:9/api/2.0"),
            ('{"a": "http://a.b", "c": "x@y"}', '{"a": "http://a.b", "c": "x@y"}'),
            ("token=hf_0123456789", "token=***"),
        ],
    )
    def test_text_is_shown_without_secrets(self, text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
        monkeypatch.setenv("SHORT_KEY", "a")  # would hide every a
        assert redaction.redact(text).startswith(expected)
        assert redaction.redact(redaction.redact(text)) == redaction.redact(text)

    def test_no_message_of_a_command_holds_a_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", SECRET)
        done = CliRunner().invoke(app, ["study", "some.yaml", "--table", f"{SECRET}.txt"])
        assert done.exit_code == 1
        assert re.search(r"\*\*\*\.txt.*\.md", done.output)

    def test_no_log_record_holds_a_secret(self, caplog: pytest.LogCaptureFixture) -> None:
        """Neither in the arguments nor in the exception of a record of any library."""
        log = logging.getLogger("somebody.else")
        log.warning("%s of %s", {"address": URL}, 3)
        try:
            raise ConnectionError(f"no route to {URL}")
        except ConnectionError as error:
            log.exception("failed: %s", error)
        log.error("plain %s", "words")
        assert SECRET not in caplog.text
        assert "http://127.0.0.1:9" in caplog.text
        assert "ConnectionError: no route to http://127.0.0.1:9" in caplog.text
        assert caplog.records[-1].args == ("words",)  # untouched where there is nothing to hide

    def test_a_link_to_mlflow_holds_no_secret(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", URL)
        mirror = Mirror("s", [], {})
        mirror.experiment, mirror.parent = "1", "run"
        assert mirror.page() == "http://127.0.0.1:9/#/experiments/1/runs/run"

    @pytest.mark.parametrize(("section", "key"), [("data", "source"), ("model", "base")])
    def test_an_address_with_a_password_is_a_mistake_that_is_not_quoted(
        self, section: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_params(tmp_path, tiny_params(**{section: {key: f"https://user:{SECRET}@example.org/rows.csv"}}))
        with pytest.raises(ParamsError) as caught:
            validation.check()
        (line,) = str(caught.value).splitlines()[1:]
        assert line.strip().startswith(f"{section}.{key}: ")
        assert SECRET not in line
