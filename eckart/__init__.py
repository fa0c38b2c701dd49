"""Low-rank compression of transformer language models.

Importing this package teaches transformers to load compressed models (eckart/hub.py).
"""

from eckart import hub as hub

__version__ = "0.1.0"
