"""The version is the same wherever it stands."""

from __future__ import annotations

import re
import tomllib

import yaml

import eckart
from tests.workspace import REPOSITORY


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((\S+)\)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert {project, citation["version"], newest[1]} == {eckart.__version__}
    assert citation["date-released"] == newest[2]
