"""Data sets that are part of a Python package. data.source may be one of the names in `PACKAGED`.

Sources: Hutto and Gilbert, ICWSM 2014, in vaderSentiment's source distribution (MIT); Lee, Pincombe and Welsh, CogSci
2005, in gensim's wheel (LGPL-2.1).
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd

from tasks.artifacts.errors import StageError
from tasks.data import pypi_archives


def _signed(name: str) -> pd.DataFrame:
    """Load texts labeled positive or negative. Texts whose mean human rating (-4 to 4) is within ±0.5 are left out."""
    frame = _rated(name)
    frame = frame[frame["rating"].abs() > 0.5].drop_duplicates("text")
    labels = (frame["rating"] > 0).map({True: "positive", False: "negative"})
    return pd.DataFrame({"text": frame["text"], "label": labels})


def editorials() -> pd.DataFrame:
    """Load 498 newspaper editorials, one per row, without labels."""
    frame = _rated("nytEditorialSnippets")
    number = frame["id"].str.partition("_")[0].astype(int)
    return pd.DataFrame({"text": frame.groupby(number)["text"].agg(" ".join)})


def news() -> pd.DataFrame:
    """Load 293 short news documents of the Australian Broadcasting Corporation, one per row, without labels.

    They are the background corpus of Lee, Pincombe and Welsh; of its 300 documents, 7 repeat another one.
    """
    address = "pypi://gensim==4.4.0/gensim/test/test_data/lee_background.cor"
    with pypi_archives.member(address, python="3.11") as file:
        documents = pd.Series(file.read_text().splitlines()).str.strip()
    return pd.DataFrame({"text": documents.drop_duplicates()})


def _rated(name: str) -> pd.DataFrame:
    """Load the columns id, rating and text of a file in vaderSentiment's source distribution."""
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
    "news": news,
}
