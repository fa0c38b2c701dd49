"""Compress a classifier with texts from a CSV file, fine-tune it, and save it to a folder.

    pip install . datasets pandas
    python examples/classifier.py MODEL texts.csv small --text text --label label --keep 0.33

MODEL is a fine-tuned classifier: a folder, or an id on the hub. Labels are the names in the model's config, or their
numbers.
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
parser.add_argument("folder", help="where to save the small model")
parser.add_argument("--text", default="text", help="its column of texts")
parser.add_argument("--label", default="label", help="its column of labels")
parser.add_argument("--keep", type=float, default=0.33, help="share of the linear layers' parameters that is kept")
parser.add_argument("--recipe", default="anchored", help="a name of eckart.recipes()")
parser.add_argument("--steps", type=int, default=100, help="of recovery fine-tuning; 0: none")
args = parser.parse_args()

model = AutoModelForSequenceClassification.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)

table = pd.read_csv(args.texts).sample(frac=1, random_state=0)
labels = [model.config.label2id.get(label, label) for label in table[args.label]]
texts = tokenizer(table[args.text].tolist(), truncation=True, max_length=128)
examples = Dataset.from_dict({**texts, "labels": [int(label) for label in labels]})
collate = DataCollatorWithPadding(tokenizer)

# Calibration statistics of 256 examples say which errors matter in every linear layer.
calibration = DataLoader(examples.select(range(min(256, len(examples)))), batch_size=32, collate_fn=collate)
small, report = eckart.compress(model, calibration, args.keep, args.recipe)
print(report)

# The factors are ordinary parameters: any training recovers accuracy.
if args.steps:
    arguments = TrainingArguments("recovery", max_steps=args.steps, learning_rate=1e-4, report_to="none")
    Trainer(small, arguments, train_dataset=examples, data_collator=collate).train()

eckart.save(small, args.folder, tokenizer)
print(f"saved to {args.folder}: after `import eckart`, from_pretrained loads it")
