"""resolved.yaml: the parameters as stages read them, and the code that they can run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tasks import resolve
from tasks.config.params_file import ParamsError, read, section
from tasks.config.resolved import resolve as with_defaults
from tasks.config.schema import Count
from tests.workspace import REPOSITORY, tiny_params, write_params

RESOLVED = Path("resolved.yaml")


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / "dvc.yaml", tmp_path)
    write_params(tmp_path, tiny_params(study={"recipes": ["svd"], "keeps": [1, 0.5], "control": "kfac"}))
    return tmp_path


def test_every_value_is_what_params_yaml_and_the_defaults_say() -> None:
    resolve.main()
    written, expected = read(RESOLVED), with_defaults(read())
    code, recovery = written.pop("code"), written.pop("control_recovery")
    assert written == {**expected, "recipes": {name: expected["recipes"][name] for name in ("svd", "kfac")}}
    assert list(map(str, written["study"]["keeps"])) == ["1", "0.5"]  # as files are named
    assert recovery == expected["recipes"]["kfac"]["recovery"]
    assert set(code["search"]) == {"svd"}


def test_a_stage_reads_what_was_resolved_and_not_what_was_edited_since() -> None:
    resolve.main()
    write_params(Path(), tiny_params(data={"max_length": 99}))
    assert section("data.max_length", Count) == 16


def test_a_pipeline_without_resolved_parameters_says_how_to_get_them() -> None:
    with pytest.raises(ParamsError, match=r"resolved\.yaml .*dvc repro resolve"):
        section("seed", int)


def test_mistakes_leave_the_old_file() -> None:
    resolve.main()
    before = RESOLVED.read_text()
    write_params(Path(), tiny_params(data={"max_length": 0}))
    with pytest.raises(ParamsError, match=r"data\.max_length"):
        resolve.main()
    assert RESOLVED.read_text() == before


def test_a_link_into_the_cache_is_replaced_and_the_cache_stays_as_it_is() -> None:
    Path("cached").write_text("cached")
    os.link("cached", RESOLVED)
    resolve.main()
    assert Path("cached").read_text() == "cached"
