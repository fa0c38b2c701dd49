"""Measure whether texts have changed: a classifier two-sample test (Lopez-Paz and Oquab, ICLR 2017).

A classifier learns to tell new texts from old ones. If it cannot, on texts that it has not seen, they are alike.
"""

from __future__ import annotations

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from tasks.data.hash_sampling import lowest, uniform_hashes

_FEATURES = 2**16
_FOLDS = 5
FEWEST = 50
"""Texts of each side below which chance alone tells them apart (choice)."""


def drift(now: list[str], then: list[str], rows: int) -> tuple[float, float]:
    """Return the classifier's AUC on texts that it has not seen, and how far chance alone takes it from 0.5.

    Equal texts are in one fold, so texts on both sides cannot be told apart: the same texts give 0.5. Chance: three
    standard errors (choice) of an AUC of two samples of one distribution.

    Args:
        now, then: at least `FEWEST` texts each.
        rows: texts that are read of each, at most: those of the lowest hashes.
    """
    new, old = ([texts[place] for place in lowest(texts, rows, 0, "drift")] for texts in (now, then))
    texts, is_new = [*new, *old], np.repeat([1, 0], [len(new), len(old)])
    features = HashingVectorizer(n_features=_FEATURES, lowercase=False, token_pattern=r"\w+").transform(texts)
    features = features[:, np.unique(features.indices)]  # those that occur
    fold = (uniform_hashes(texts, 0, "folds") * _FOLDS).astype(int)
    areas = []
    for number in range(_FOLDS):
        held_out = fold == number
        if len(set(is_new[held_out])) == len(set(is_new[~held_out])) == 2:
            model = LogisticRegression(class_weight="balanced", solver="liblinear")
            with threadpool_limits(1):  # whose number would decide the order of sums
                model.fit(features[~held_out], is_new[~held_out])
            areas.append(roc_auc_score(is_new[held_out], model.decision_function(features[held_out])))
    chance = 3 * float(np.sqrt((len(new) + len(old) + 1) / (12 * len(new) * len(old))))
    return float(np.mean(areas or [0.5])), chance
