"""Whether texts have changed: a classifier two-sample test (Lopez-Paz and Oquab, ICLR 2017).

A classifier learns to tell new rows from old ones. Where it cannot, on rows that it has not seen, they are alike.
"""

from __future__ import annotations

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from tasks.data.hash_sampling import lots, lowest

_FEATURES = 2**16
_FOLDS = 5
FEWEST = 50
"""Rows of each side below which chance alone tells them apart (choice)."""


def drift(now: list[str], then: list[str], rows: int) -> tuple[float, float]:
    """The classifier's AUC on rows that it has not seen, and how far chance alone takes it from 0.5.

    Equal texts are in one fold, so that those on both sides cannot be told apart: the same rows give 0.5. Chance: three
    standard errors (choice) of an AUC of two samples of one distribution.

    Args:
        now, then: texts, at least `FEWEST` each.
        rows: that are read of each, at most: those of the lowest lots.
    """
    sides = [[some[index] for index in lowest(some, rows, 0, "drift")] for some in (now, then)]
    both = [*sides[0], *sides[1]]
    new = np.repeat([1, 0], list(map(len, sides)))
    features = HashingVectorizer(n_features=_FEATURES, lowercase=False, token_pattern=r"\w+").transform(both)
    features = features[:, np.unique(features.indices)]  # those that occur
    fold = (lots(both, 0, "folds") * _FOLDS).astype(int)
    found = []
    for number in range(_FOLDS):
        held = fold == number
        if len(set(new[held])) == len(set(new[~held])) == 2:
            model = LogisticRegression(class_weight="balanced", solver="liblinear")
            with threadpool_limits(1):  # whose number would decide the order of sums
                model.fit(features[~held], new[~held])
            found.append(roc_auc_score(new[held], model.decision_function(features[held])))
    some, others = map(len, sides)
    return float(np.mean(found or [0.5])), 3 * float(np.sqrt((some + others + 1) / (12 * some * others)))
