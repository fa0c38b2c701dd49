"""The documents name files that exist, and `make docs` builds all pages without a link or a name that leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import eckart
from tests.workspace import REPOSITORY

CODE_PATH = re.compile(r"(?<![\w/.-])(?:eckart|tasks|flows|tests|studies|benchmarks|deploy|examples)/[\w./-]*\w")
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
    texts = subprocess.run(
        ["git", "ls-files", "*.md", ":!.github"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    pages = [site / Path(name).with_suffix(".html") for name in texts.stdout.split()]
    assert [page for page in [site / "index.html", *pages] if not page.is_file()] == []
    reference = (site / "docs/reference/api/index.html").read_text()
    assert [name for name in eckart.__all__ if f'id="eckart.{name}"' not in reference] == []
    fetched = re.compile(r"<(?:script|img|link)[^>]+(?:src|href)=\"(?:https?:)?//")
    assert [page for page in site.rglob("*.html") if fetched.search(page.read_text())] == []


def documents() -> dict[str, str]:
    """Return the text of all documents but the changelog, which names what was there once, by their paths."""
    done = subprocess.run(
        ["git", "ls-files", "*.md", "*.rst"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    names = [name for name in done.stdout.split() if name != "CHANGELOG.md"]
    return {name: (REPOSITORY / name).read_text() for name in names}


def test_paths_that_documents_name_exist() -> None:
    missing = []
    for name, text in documents().items():
        written_there = re.findall(r"`([\w/]+\.py)`:\n", text)  # files that docs/how-to/extend.md adds
        for code in re.findall(r"`([^`\n]+)`", text):
            paths = set(CODE_PATH.findall(code)) - {*written_there}
            missing += [f"{name}: {path}" for path in paths if not (REPOSITORY / path).exists()]
    assert missing == []


def test_tests_that_documents_name_exist() -> None:
    files = [*(REPOSITORY / "tests").rglob("test_*.py")]
    defined = "\n".join([path.name for path in files] + [path.read_text() for path in files])
    missing = []
    for name, text in documents().items():
        named = set(re.findall(r"`[^`\n]*?\b(test_\w+(?:\.py)?)", text))
        missing += [
            f"{name}: {test}" for test in named if not re.search(rf"^(?: *def )?{re.escape(test)}", defined, re.M)
        ]
    assert missing == []
