"""Say how many GPUs stages would find: asked of a process that has torch, by one that does not need it."""

import torch

if __name__ == "__main__":
    print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
