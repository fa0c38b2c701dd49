"""Low-rank compression of transformer language models.

`compress` compresses a model in memory (eckart/api.py), `write_text` (eckart/text/self_written.py) gives it text to
calibrate a language model with, and `embedding_loss` (eckart/calibration/embeddings.py) calibrates an embedding model.
Importing this package also teaches transformers to load compressed models (eckart/model/hf_format.py), LSTM language
models (eckart/model/lstm.py) and Mamba classifiers (eckart/model/mamba.py), and peft to adapt factorized layers by
their names (eckart/model/adapter_targets.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eckart.model import adapter_targets as _adapter_targets  # noqa: F401
from eckart.model import hf_format as _hf_format  # noqa: F401
from eckart.model import lstm as _lstm  # noqa: F401
from eckart.model import mamba as _mamba  # noqa: F401

if TYPE_CHECKING:
    from eckart.api import Compressed, CompressedTarget, Report, compress, load, recipes, save, write_text
    from eckart.calibration.embeddings import embedding_loss
    from eckart.recipe import Recipe

__version__ = "0.2.0"
__all__ = [
    "Compressed",
    "CompressedTarget",
    "Recipe",
    "Report",
    "compress",
    "embedding_loss",
    "load",
    "recipes",
    "save",
    "write_text",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that a stage that only loads a model does not load all methods."""
    if name in __all__:
        return getattr(import_module("eckart.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names for tab completion, without importing them."""
    return [*__all__, "__version__"]
