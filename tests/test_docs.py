"""`make docs` builds all pages. Links and names in them lead somewhere; the prose keeps the rules of docs/prose.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eckart
from docs import command_line, prose
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
    shown = re.compile(r"<(?:img|source|script)[^>]+(?:src|srcset)=\"([^\"?#:]+)")
    absent = [
        f"{page.relative_to(site)}: {name}"
        for page in site.rglob("*.html")
        for name in shown.findall(page.read_text())
        if not (page.parent / name).exists()
    ]
    assert absent == []


def test_the_page_of_the_command_line_is_that_of_the_commands() -> None:
    assert (REPOSITORY / "docs/reference/cli.md").read_text() == command_line.page(), "run `make docs`"


def test_prose_is_short_spelled_right_and_leads_somewhere() -> None:
    assert prose.findings() == []


LONG = "We " + "very very very very\n" * 10 + "much agree.\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "docs/how-to/a.md",
            LONG,
            "docs/how-to/a.md:1: a sentence of 43 words: We very very very very very very very …",
        ),
        ("docs/tutorials/a.md", f"# A\n\n- {'X' * 119}\n", "docs/tutorials/a.md:3: a line of 121 characters"),
        ("CHANGELOG.md", f"- {'X' * 119}\n", "CHANGELOG.md:1: a line of 121 characters"),
        ("docs/notes/a.md", "Wellknown words.\n", "docs/notes/a.md:1: unknown word: Wellknown"),
        ("docs/notes/a.md", "The colour.\n", "docs/notes/a.md:1: unknown word: colour"),
        ("docs/notes/a.md", "[here](https://nowhere)\n", "docs/notes/a.md:1: not an address: https://nowhere"),
        ("README.md", '<img src="no.svg">\n', "README.md:1: there is no file no.svg"),
    ],
)
def test_prose_that_breaks_a_rule_is_named_by_path_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert prose.findings(tmp_path) == [message]


@pytest.mark.parametrize(
    "text",
    [
        f"`{'a ' * 50}`\n",
        f"```\n{'qwertz ' * 60}\n```\n",
        f"| {'a word | ' * 40}\n|{'---|' * 40}\n",
        "See [the docs](https://example.org/colour), `colour` and SmolLM2's files/colour.txt, e.g. one\nand Qwertz.\n",
        "Low-rank models: they're re-trained, model's weights and models' sizes (that is all).\n",
    ],
)
def test_code_tables_names_and_addresses_break_no_rule(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert prose.findings(tmp_path) == []


def test_own_words_are_sorted_and_not_in_the_dictionary() -> None:
    words = (REPOSITORY / "docs/words.txt").read_text().split()
    assert words == sorted({*words}, key=lambda word: (word.lower(), word))
    assert [word for word in words if prose.in_dictionary(word)] == []


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
