"""Data sets that a package carries, by the names that data.source gives them.

Source: Hutto and Gilbert, ICWSM 2014; carried by vaderSentiment's source distribution (MIT).
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd

from tasks.data import pypi_archives
from tasks.runtime.stage_runner import StageError


def _signed(name: str) -> pd.DataFrame:
    """Texts of a file with the sign of their mean human rating (-4 to 4) where it passes ±0.5."""
    frame = _rated(name)
    frame = frame[frame["rating"].abs() > 0.5].drop_duplicates("text")
    return pd.DataFrame(
        {"text": frame["text"], "label": (frame["rating"] > 0).map({True: "positive", False: "negative"})}
    )


def editorials() -> pd.DataFrame:
    """500 newspaper editorials, a row each, without labels; of the same source."""
    frame = _rated("nytEditorialSnippets")
    number = frame["id"].str.partition("_")[0].astype(int)
    return pd.DataFrame({"text": frame.groupby(number)["text"].agg(" ".join)})


def _rated(name: str) -> pd.DataFrame:
    """Columns id, rating and text of a file that vaderSentiment's source distribution carries."""
    address = "pypi://vaderSentiment==3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
    with pypi_archives.member(address, sdist=True) as archive, tarfile.open(archive) as tar:
        file = tar.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
        if file is None:
            raise StageError(f"{name} is not in vaderSentiment's source distribution")
        lines = [line.split("\t", 2) for line in file.read().decode("latin-1").splitlines()]
    frame = pd.DataFrame(lines, columns=["id", "rating", "text"])
    return frame.assign(rating=frame["rating"].astype(float), text=frame["text"].str.strip())


PACKAGED: Mapping[str, Callable[[], pd.DataFrame]] = {
    "movie-reviews": partial(_signed, "movieReviewSnippets"),
    "product-reviews": partial(_signed, "amazonReviewSnippets"),
    "tweets": partial(_signed, "tweets"),
    "editorials": editorials,
}
