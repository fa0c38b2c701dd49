"""Zero-shot evaluation of a language model with EleutherAI's lm-evaluation-harness (the extra `lm-eval`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from numbers import Real
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.artifacts.errors import StageError


def zero_shot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], batch_size: int
) -> dict[str, dict[str, float]]:
    """Evaluate a model on tasks of the harness, which downloads their data from the hub.

    Returns:
        Task → metric → value.

    Raises:
        StageError: the harness is not installed, knows no such task, or lacks its data or a package for it.
    """
    if not tasks:
        return {}
    if not find_spec("lm_eval"):
        raise StageError("evaluate.zero_shot needs lm-eval: pip install 'eckart[lm-eval]', or empty the list")
    from lm_eval import simple_evaluate  # slow to import, and an optional dependency
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _task_manager()
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise StageError(f"evaluate.zero_shot: lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists them")
    try:
        results = simple_evaluate(
            HFLM(pretrained=model.eval(), tokenizer=deepcopy(tokenizer), batch_size=batch_size),
            tasks=list(tasks),
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (ImportError, OSError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, RuntimeError) and "scripts" not in str(error):  # datasets refuses data that come with one
            raise
        raise StageError(f"evaluate.zero_shot: lm-eval cannot run {', '.join(tasks)}: {error}") from error
    return {name: _numbers(values) for name, values in sorted(results["results"].items())}


@cache
def _task_manager() -> Any:
    """Return the harness's index of tasks, for which it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task that are numbers, without standard errors; the name `acc,none` becomes `acc`."""
    return {
        name.removesuffix(",none").replace(",", "."): float(value)
        for name, value in sorted(values.items())
        if isinstance(value, Real) and "_stderr" not in name and name != "sample_len" and math.isfinite(value)
    }
