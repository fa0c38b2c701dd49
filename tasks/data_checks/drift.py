"""Measure whether texts have changed, with a classifier two-sample test (Lopez-Paz and Oquab, ICLR 2017).

A classifier is trained to distinguish new texts from old ones. If it fails on held-out texts, the texts are alike.
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
"""Smallest number of texts on each side (choice). With fewer, the result would be mostly chance."""


def drift(now: list[str], then: list[str], rows: int) -> tuple[float, float]:
    """Return the classifier's cross-validated AUC, and how far the AUC may be from 0.5 by chance.

    The second number is three standard errors (choice) of the AUC of two samples from the same distribution. Equal
    texts are always in the same fold, so that the classifier is never tested on a text that it has learned.

    Args:
        now, then: at least `FEWEST` texts each.
        rows: maximum number of texts that are used on each side, a random sample.
    """
    new, old = ([texts[place] for place in lowest(texts, rows, 0, "drift")] for texts in (now, then))
    texts, is_new = [*new, *old], np.repeat([1, 0], [len(new), len(old)])
    features = HashingVectorizer(n_features=_FEATURES, lowercase=False, token_pattern=r"\w+").transform(texts)
    features = features[:, np.unique(features.indices)]  # drop features that no text has
    fold = (uniform_hashes(texts, 0, "folds") * _FOLDS).astype(int)
    areas = []
    for number in range(_FOLDS):
        held_out = fold == number
        if len(set(is_new[held_out])) == len(set(is_new[~held_out])) == 2:
            model = LogisticRegression(class_weight="balanced", solver="liblinear")
            with threadpool_limits(1):  # the order of floating-point sums depends on the number of threads
                model.fit(features[~held_out], is_new[~held_out])
            areas.append(roc_auc_score(is_new[held_out], model.decision_function(features[held_out])))
    chance = 3 * float(np.sqrt((len(new) + len(old) + 1) / (12 * len(new) * len(old))))
    return float(np.mean(areas or [0.5])), chance
