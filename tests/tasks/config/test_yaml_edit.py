"""Edits of params.yaml: what is written is read again, by us and by DVC."""

from __future__ import annotations

from pathlib import Path

import pytest
from dvc.utils.serialize import parse_yaml

from tasks.config import yaml_edit

FILE = """\
# a comment
data:
  source: pypi://reviews     # stays as it is
  columns: {text: text, label: label}
"""


@pytest.mark.parametrize(
    "name", ["Sentiment?", "? a", "review:text", "a: b", ":a", "12:30", "yes", "1", "a, b", "x]", "#1", "it's", "\x85b"]
)
def test_any_name_of_a_column_is_read_again(name: str, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(FILE)
    for _ in range(2):
        yaml_edit.update({"data": {"columns": {"text": name}}}, file)
    text = file.read_text()
    expected = {"source": "pypi://reviews", "columns": {"text": name, "label": "label"}}
    assert yaml_edit.yaml().load(text)["data"] == expected
    assert parse_yaml(text, str(file))["data"] == expected
    assert text.splitlines()[:3] == FILE.splitlines()[:3]
