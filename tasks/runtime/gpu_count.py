"""Print the number of GPUs that stages find; a process that does not import torch runs this in another."""

import torch

if __name__ == "__main__":
    print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
