"""Check the text of the pages: length of sentences and lines, spelling, and links that Sphinx does not look at.

`python -m docs.prose` prints what it finds, one line each, and exits with 1 if it finds something. `make docs` runs it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from spellchecker import SpellChecker

REPOSITORY = Path(__file__).parent.parent
MEASURED = ("README.md", "docs/tutorials", "docs/how-to", "docs/explanation")
"""Pages and folders in which sentences have a longest length."""
WRAPPED = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/index.md", "docs/tutorials", "docs/how-to", "docs/explanation", "docs/notes"),
    *(f"docs/reference/{name}.md" for name in ("failures", "files", "mlflow", "models", "report", "safety", "tasks")),
    *(f"docs/results/{name}.md" for name in ("index", "claims", "other-tools", "papers", "shipping")),
    *("examples", "data", "models", "studies"),
)
"""Pages and folders, written by hand, in which lines have a longest length. It does not hold in tables and in printed
output."""
SPELLED = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs", "examples", "data", "models", "studies"),
)
"""Pages and folders whose words are looked up in the dictionary of American English and in docs/words.txt."""
LONGEST_SENTENCE = 40  # words
LONGEST_LINE = 120  # characters

_BRITISH = ["analogue", "cancelled", "catalogue", "coloured", "grey", "labelled", "labelling", "licence", "licences"]
_BRITISH += ["fulfil", "fulfils", "judgement", "modelled", "modelling", "practise", "signalled", "signalling"]
"""Words that the dictionary has besides their American spelling."""

_MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_CODE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for a code span or a picture in the text of a sentence
_TEXT = {"softbreak": " ", "hardbreak": " ", "code_inline": _CODE, "image": _CODE, "html_inline": ""}
_END = re.compile(r"(?<=[.!?])(?<!\b[eE]\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<!\bal\.)[\"”')\]]*\s+")
_WORD = re.compile(r"(?<!\S)[(\[\"“‘'–—-]*([^\W\d_]+(?:['’-][^\W\d_]+)*)[.,;:!?)\]\"”’'–—…]*(?!\S)")
_TRAILING = re.compile(r"['’]s$|['’]$")


def findings(root: Path = REPOSITORY) -> list[str]:
    """Return a line `path:line: what is wrong` for each mistake in the Markdown files that git knows."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    return [
        f"{name}:{line}: {message}"
        for name in sorted(names)
        if (root / name).is_file()
        for line, message in sorted(_page(root / name, name))
    ]


def _page(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Yield line number and message for each mistake of a page."""
    text = path.read_text()
    tokens = _MARKDOWN.parse(text)
    if _among(name, WRAPPED):
        yield from _long_lines(text, tokens)
    for token in tokens:
        line = token.map[0] + 1 if token.map else 1
        yield from ((line, message) for message in _wrong_links(token, path.parent))
        for sentence in sentences(token):
            words = [word for word in sentence.split() if any(char.isalnum() or char == _CODE for char in word)]
            if len(words) > LONGEST_SENTENCE and _among(name, MEASURED):
                yield line, f"a sentence of {len(words)} words: {' '.join(words[:8])} …".replace(_CODE, "`…`")
            if _among(name, SPELLED):
                yield from ((line, f"unknown word: {word}") for word in unknown_words(sentence))


def _among(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


def _long_lines(text: str, tokens: list[Token]) -> Iterator[tuple[int, str]]:
    exempt: set[int] = set()
    for token in tokens:
        if token.map and (token.type == "table_open" or (token.type == "fence" and token.info in ("", "text"))):
            exempt.update(range(*token.map))
    for number, line in enumerate(text.splitlines()):
        if len(line) > LONGEST_LINE and number not in exempt:
            yield number + 1, f"a line of {len(line)} characters"


def sentences(token: Token) -> list[str]:
    """Return the sentences of a paragraph, a heading, a table's cell or a piece of HTML, without code and addresses."""
    if token.type == "html_block":
        text = re.sub(r"<!--.*?-->|<[^>]*>", " ", token.content, flags=re.S)
    elif token.type == "inline":
        text = "".join(_TEXT.get(child.type, child.content) for child in token.children or ())
    else:
        return []
    return [sentence for sentence in _END.split(re.sub(r"\S*://\S*", _CODE, text)) if sentence.strip()]


def unknown_words(sentence: str) -> list[str]:
    """Return the words of a sentence that neither dictionary has. Names, paths and words with digits are left out."""
    found = []
    for position, match in enumerate(_WORD.finditer(sentence.replace("/", " / "))):
        for part in _TRAILING.sub("", match[1]).replace("’", "'").split("-"):
            first = position == 0 and not sentence[: match.start()].strip()
            if not part or not part.isascii() or (part != part.lower() and not (first and part.istitle())):
                continue
            if len(part) > 1 and not _known(part) and not _known(part.lower()):
                found.append(part)
    return found


def _known(word: str) -> bool:
    return word in _own_words() or in_dictionary(word)


def in_dictionary(word: str) -> bool:
    """Return whether a word is in the dictionary, and is not spelled as in Britain."""
    return word in _dictionary() and word.lower() not in _BRITISH


@cache
def _dictionary() -> SpellChecker:
    return SpellChecker(language="en")


@cache
def _own_words() -> frozenset[str]:
    return frozenset((REPOSITORY / "docs/words.txt").read_text().split())


class _Attributes(HTMLParser):
    """The addresses in a piece of HTML, in which Sphinx looks for no dead links."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "srcset")]


def _wrong_links(token: Token, folder: Path) -> Iterator[str]:
    """Yield a message for each address that cannot be one, and each absent file that a piece of HTML names."""
    html = _Attributes()
    for part in [token, *(token.children or ())]:
        if part.type in ("html_block", "html_inline"):
            html.feed(part.content)
        elif part.type == "link_open" and ":" in (address := str(part.attrs["href"])):
            yield from _wrong_address(address)
    for address in html.addresses:
        if ":" in address:
            yield from _wrong_address(address)
        elif not (folder / address.partition("#")[0]).exists():
            yield f"there is no file {address}"


def _wrong_address(address: str) -> Iterator[str]:
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:  # brackets that are no IPv6 address
        parts, host = urlsplit(""), ""
    if parts.scheme != "mailto" and not (parts.scheme in ("http", "https") and (host == "localhost" or "." in host)):
        yield f"not an address: {address}"


if __name__ == "__main__":
    lines = findings()
    print("\n".join(lines) or "README and the pages: nothing to correct.")
    sys.exit(bool(lines))
