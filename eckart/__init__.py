"""Low-rank compression of transformer language models.

Importing this package teaches transformers to load compressed models (eckart/hub.py) and LSTM language models
(eckart/lstm.py).
"""

from eckart import hub as hub
from eckart import lstm as lstm

__version__ = "0.1.0"
