"""The studies of this repository: each validates, and those that need a hub start and say so where there is none."""

from pathlib import Path

import pytest

from flows.workspaces import load, prepare
from tasks.metrics import BY_KIND
from tests.flows.toy import ENVIRONMENT, call
from tests.workspace import REPOSITORY

STUDIES = sorted(REPOSITORY.glob("studies/*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_it_validates(file: Path) -> None:
    for study in load(REPOSITORY, file):
        assert study.metric in BY_KIND[study.params["data"]["task"]]
