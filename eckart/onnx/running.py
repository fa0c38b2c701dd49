"""Inference of an ONNX graph with onnxruntime on the CPU, by itself or in place of a model's `forward`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.model.batches import Batch

KEPT = "num_logits_to_keep"
"""Optional input of a causal language model's graph, as in transformers.js: how many last tokens get logits."""

OUTPUTS = ("logits", "start_logits", "end_logits", "text_embeds", "last_hidden_state", "sentence_embedding")
"""Names of the outputs that a model's head may have, or a model without a head."""

PAST, PRESENT = "past_key_values.", "present."
"""Prefixes of the names of a decoder's cache, as input and as output (as in optimum)."""

SLOW_FUSIONS = ["SkipLayerNormFusion"]
"""Optimizations of onnxruntime that `runner` turns off.

The kernel of this fusion is slower than the sum and the norm that it replaces. Without it, MiniLM in int8 is 1.15 times
as fast (docs/how-to/export.md).
"""


class ExportError(RuntimeError):
    """Failure of an export or of onnxruntime, explained in the message. No file was written, and an older one stays."""


def runner(file: Path, threads: int = 0) -> Callable[[Batch], dict[str, Tensor]]:
    """Return a function that runs `file` on the CPU: inputs → outputs. Inputs without a cache get an empty one.

    Args:
        threads: number of threads of a matrix product; 0: one for each core.

    Raises:
        ExportError: onnxruntime cannot run the file.
    """
    session = _session(file, threads)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    options = [value.name for value in session.get_overridable_initializers()]
    outputs = [value.name for value in session.get_outputs()]

    def answer(inputs: Batch) -> dict[str, Tensor]:
        rows = len(inputs["input_ids"])
        given = {
            name: torch.zeros(rows, shape[1], 0, shape[3])  # an empty cache `(batch, heads, past, size)`
            if name.startswith(PAST) and name not in inputs
            else inputs[name]
            for name, shape in shapes.items()
        }
        given |= {name: inputs[name] for name in options if name in inputs}
        results = session.run(outputs, {name: values.cpu().numpy() for name, values in given.items()})
        return {name: torch.from_numpy(values) for name, values in zip(outputs, results, strict=True)}

    return answer


def _session(file: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = threads
    # spinning threads would take time from the code that runs next
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with explained():
        return onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS
        )


def cache_of(outputs: Batch) -> dict[str, Tensor]:
    """Return the cache in the outputs of a causal language model, renamed to inputs for the next tokens."""
    return {name.replace(PRESENT, PAST, 1): values for name, values in outputs.items() if name.startswith(PRESENT)}


def answer_by(model: PreTrainedModel, answer: Callable[[Batch], dict[str, Tensor]]) -> None:
    """Replace `model.forward` with a function from `runner`, so that an ONNX graph can be scored like a model.

    The model cannot be trained afterwards.
    """

    @wraps(model.forward)
    def forward(**inputs: Any) -> ModelOutput:
        logits = {name: values.to(model.device) for name, values in answer(inputs).items() if name in OUTPUTS}
        return ModelOutput({"loss": torch.zeros(()), **logits})  # the Trainer needs some loss

    model.forward = forward


@contextmanager
def explained(what: str = "cannot run the file that torch exported") -> Iterator[None]:
    """Raise every error in this context as an ExportError with the message "onnxruntime `what`: `error`"."""
    try:
        yield
    except Exception as error:  # errors of onnxruntime have no common class
        raise ExportError(f"onnxruntime {what}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter and the quantizer, which warn about internals and print what could not be traced."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("", "torch.onnx", "torch.fx"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def weights_of(file: Path) -> Path:
    """Return the path of the separate file that holds the weights of the graph `file` if these are too large for it."""
    return file.with_name(f"{file.name}.data")
