"""Save calibration statistics to files, load them, and join those of several parts of the examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eckart.calibration.statistics import Statistics


def save_statistics(statistics: Statistics, folder: Path, part: int | None = None) -> None:
    """Write statistics to files `KIND.safetensors` in `folder`, or `KIND-00001.safetensors` for part 1 of several."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if part is None else f"-{part:05}"
    for kind, tensors in statistics.items():
        file = folder / f"{kind}{suffix}.safetensors"
        save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, file)


def join_statistics(shards: Mapping[Path, int], folder: Path) -> None:
    """Write to `folder` the statistics over all examples, from those that were saved for parts of the examples.

    Statistics are means over examples, so each part weighs as much as it has examples. Sums are in float64 and in the
    order of `shards`, so the bytes do not depend on when a part was computed. One file is in memory at a time. A tensor
    that a part lacks is zero there.

    Args:
        shards: folder of `save_statistics` → number of its examples.
    """
    total = sum(shards.values())
    for name in sorted({path.name for shard in shards for path in shard.glob("*.safetensors")}):
        parts = [(_StoredTensors([shard / name]), count) for shard, count in shards.items() if (shard / name).exists()]
        joined: dict[str, Tensor] = {}
        for key in sorted(set(chain.from_iterable(part for part, _ in parts))):
            values = [(part[key], count) for part, count in parts if key in part]
            mean = torch.zeros_like(values[0][0], dtype=torch.float64)
            for value, count in values:
                mean.add_(value, alpha=count / total)
            joined[key] = mean.to(values[0][0].dtype)
        save_file(joined, folder / name)


def load_statistics(folder: Path) -> Statistics:
    """Open all statistics that `save_statistics` wrote to `folder`; a tensor is only read when it is looked up."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        files.setdefault(path.stem.partition("-")[0], []).append(path)
    return {kind: _StoredTensors(paths) for kind, paths in files.items()}


class _StoredTensors(Mapping[str, Tensor]):
    """Mapping over several safetensors files that reads a tensor only when it is looked up."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self._path_of |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, key: str) -> Tensor:
        # The file is opened for each tensor: an open one stays mapped, and all read pages would count as our memory.
        with safe_open(self._path_of[key], framework="pt") as file:
            return file.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def __len__(self) -> int:
        return len(self._path_of)
