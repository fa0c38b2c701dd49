"""Print the number of GPUs for stages. Programs that avoid the slow import of torch run this as a process."""

import torch

if __name__ == "__main__":
    print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
