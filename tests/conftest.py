"""What all tests share: one thread, and linear algebra on the same examples in every run."""

import tasks as tasks  # before torch, whose threads are to wait without spinning

# isort: split
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "laws", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("laws")
