"""Run an ONNX graph by onnxruntime on the CPU, alone or in place of a model's forward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import wraps
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import Batch

if TYPE_CHECKING:
    import onnx_ir as ir

KEPT = "num_logits_to_keep"
"""Optional input of a causal language model's graph: of how many last tokens to give logits (as transformers.js)."""

OUTPUTS = ("logits", "start_logits", "end_logits")
"""Outputs of a head."""

PAST, PRESENT = "past_key_values.", "present."
"""Prefixes of the names of a decoder's cache, before and after (as optimum)."""

SLOW_FUSIONS = ["SkipLayerNormFusion"]
"""Optimizations of onnxruntime that `runner` turns off: this kernel takes longer than the sum and the norm that it
replaces; without it MiniLM in int8 is 1.15 times as fast (docs/files-to-ship.md)."""


class ExportError(RuntimeError):
    """No ONNX file was written, and an older one stays; the message says why."""


def runner(file: Path, threads: int = 0) -> Callable[[Batch], dict[str, Tensor]]:
    """Return a function from inputs to outputs that runs `file` on the CPU; a cache that is not given is empty.

    Args:
        threads: threads of a matrix product; 0: as many as there are cores.

    Raises:
        ExportError: onnxruntime cannot run it.
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
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it would take time from what runs next
    with explained():
        return onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS
        )


def cache_of(outputs: Batch) -> dict[str, Tensor]:
    """Return the cache among the outputs of a causal language model, as inputs for the next tokens."""
    return {name.replace(PRESENT, PAST, 1): values for name, values in outputs.items() if name.startswith(PRESENT)}


def answer_by(model: PreTrainedModel, answer: Callable[[Batch], dict[str, Tensor]]) -> None:
    """Make `model` return the logits of a `runner`, so that it can be scored; it cannot be trained then."""

    @wraps(model.forward)
    def forward(**inputs: Any) -> ModelOutput:
        logits = {name: values.to(model.device) for name, values in answer(inputs).items() if name in OUTPUTS}
        return ModelOutput({"loss": torch.zeros(()), **logits})  # a loss, since the Trainer asks for one

    model.forward = forward


@contextmanager
def explained(what: str = "cannot run what torch exported") -> Iterator[None]:
    """Raise errors of onnxruntime as ExportError."""
    try:
        yield
    except Exception as error:  # they have no class in common
        raise ExportError(f"onnxruntime {what}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence exporter and quantizer, which warn of internals and print what could not be traced."""
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
    """Return the path of the weights of a file that is too large to hold them."""
    return file.with_name(f"{file.name}.data")


def save_graph(model: ir.Model, file: Path, like: Path) -> None:
    """Write a graph, with its weights in a file of their own if those of `like` are."""
    import onnx_ir as ir

    ir.save(model, file, external_data=weights_of(file).name if weights_of(like).exists() else None)
