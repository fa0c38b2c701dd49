"""A classifier and a table of texts → the same classifier in factors, recovered, in a folder.

    pip install . datasets pandas
    python examples/classifier.py MODEL texts.csv small --text text --label label --keep 0.33

MODEL is a fine-tuned classifier: a folder, or an id on the hub. A label is what the model's config calls it, or its
number.
"""

from __future__ import annotations

import argparse

import pandas as pd
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import eckart

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("texts", help="a CSV file")
parser.add_argument("folder", help="where the small model goes")
parser.add_argument("--text", default="text", help="column")
parser.add_argument("--label", default="label", help="column")
parser.add_argument("--keep", type=float, default=0.33, help="parameters of the linear maps after ÷ before")
parser.add_argument("--recipe", default="anchored", help="a name of eckart.recipes()")
parser.add_argument("--steps", type=int, default=100, help="of recovery; 0: none")
asked = parser.parse_args()

model = AutoModelForSequenceClassification.from_pretrained(asked.model)
tokenizer = AutoTokenizer.from_pretrained(asked.model)

table = pd.read_csv(asked.texts).sample(frac=1, random_state=0)
labels = [model.config.label2id.get(label, label) for label in table[asked.label]]
texts = tokenizer(table[asked.text].tolist(), truncation=True, max_length=128)
rows = Dataset.from_dict({**texts, "labels": [int(label) for label in labels]})
collate = DataCollatorWithPadding(tokenizer)

# 256 rows say what matters in every linear map.
calibration = DataLoader(rows.select(range(min(256, len(rows)))), batch_size=32, collate_fn=collate)
small, report = eckart.compress(model, calibration, asked.keep, asked.recipe)
print(report)

# Recovery is any training: the factors are ordinary parameters.
if asked.steps:
    arguments = TrainingArguments("recovery", max_steps=asked.steps, learning_rate=1e-4, report_to="none")
    Trainer(small, arguments, train_dataset=rows, data_collator=collate).train()

eckart.save(small, asked.folder, tokenizer)
print(f"{asked.folder}: after `import eckart`, from_pretrained reads it")
