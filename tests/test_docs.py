"""The pages of `make docs`: built as it builds them, so that a link or a name that leads nowhere fails here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import eckart
from tests.workspace import REPOSITORY

# An index that is out of reach: the pages are built, and read, without a network.
OFFLINE = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def build(folder: Path) -> Path:
    site = folder / "site"
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "-d", str(folder / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(site)]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **OFFLINE}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_every_page_is_there_with_all_that_it_leads_to_and_reads_from_disk(tmp_path: Path) -> None:
    site = build(tmp_path)
    texts = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    pages = [site / Path(name).with_suffix(".html") for name in texts.stdout.split()]
    assert [page for page in [site / "index.html", *pages] if not page.is_file()] == []
    reference = (site / "docs/api.html").read_text()
    assert [name for name in eckart.__all__ if f'id="eckart.{name}"' not in reference] == []
    fetched = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"(?:https?:)?//")
    assert [page for page in site.rglob("*.html") if fetched.search(page.read_text())] == []
