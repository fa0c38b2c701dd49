"""Low-rank compression of transformer language models.

Importing this package teaches transformers to load compressed models (eckart/model/hf_format.py) and LSTM language
models (eckart/model/lstm.py). `compress` makes one, of a model in memory (eckart/api.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eckart.model import hf_format as hf_format
from eckart.model import lstm as lstm

if TYPE_CHECKING:
    from eckart.api import Compressed, CompressedTarget, Report, compress, load, recipes, save
    from eckart.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["Compressed", "CompressedTarget", "Recipe", "Report", "compress", "load", "recipes", "save"]


def __getattr__(name: str) -> Any:
    """What a person uses, once it is asked for: a stage that only loads a model does not depend on all methods."""
    if name in __all__:
        return getattr(import_module("eckart.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion, which asks for nothing before it offers it."""
    return [*__all__, "lstm", "__version__"]
