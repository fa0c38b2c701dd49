"""What all tests share: the settings of a command, one thread, and linear algebra on the same examples in every run."""

import tasks as tasks  # before torch, whose threads are to wait without spinning

# isort: split
import torch
from hypothesis import HealthCheck, settings

import flows.settings

flows.settings.apply()  # before a test imports prefect, mlflow or dvc
torch.set_num_threads(1)
settings.register_profile(
    "laws", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("laws")
