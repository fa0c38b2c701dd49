"""The parameters of a study with every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.config.params_file import sections


def resolve(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of params.yaml. Parameters that are already resolved do not change.

    Args:
        content: params.yaml as plain data, without mistakes.

    Returns:
        All parameters as plain data, in the order of the fields in tasks/config/schema.py, with all built-in recipes.
    """
    from eckart.recipe import complete, recipes, trains_dense  # imports torch, which takes seconds

    tree = sections(content)
    study = tree["study"]
    tree["recovery"] = complete({"recovery": tree["recovery"]})["recovery"]
    tree["recipes"] = recipes(tree["recipes"], tree["recovery"])
    if study["control"] is None:
        study["control"] = next((name for name in study["recipes"] if trains_dense(tree["recipes"][name])), None)
    return tree
