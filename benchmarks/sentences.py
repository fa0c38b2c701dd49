"""Time how many sentences a second SentenceTransformers embed; print a Markdown table, with the bytes of each folder.

    pip install sentence-transformers
    python -m benchmarks.sentences TEXTS FOLDER…    # TEXTS: a text file, a sentence a line; speeds ÷ the first folder's

The models take turns, in as many threads as torch chooses.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import eckart as eckart  # registers the format of compressed models with transformers
from benchmarks.cells import megabytes, times_cell
from tasks.report.rounding import rounded
from tasks.scoring.timing import in_rounds, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that SentenceTransformer reads")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    texts = asked.texts.read_text().splitlines()
    models = {folder: SentenceTransformer(str(folder)) for folder in asked.folders}
    runs = {folder: partial(_embed, model, texts, asked.batch_size) for folder, model in models.items()}
    seconds = in_rounds(runs, {}, asked.rounds)
    print("| folder | MB | sentences a second | times the first |\n|---|--:|--:|--:|")
    for folder, own in seconds.items():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        speed = rounded(len(texts) / median(own), 0)
        times = times_cell(ratio(seconds[asked.folders[0]], own))
        print(f"| {folder.name} | {megabytes(size)} | {speed} | {times} |")


def _embed(model: object, texts: list[str], batch_size: int, _: object) -> None:
    model.encode(texts, batch_size=batch_size)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
