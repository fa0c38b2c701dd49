"""Stage importance_shard: gather the calibration statistics of a part of the examples → data/shards/SHARD."""

from __future__ import annotations

import torch

from tasks.artifacts.errors import StageError
from tasks.artifacts.names import SHARD_STAGE
from tasks.artifacts.paths import SHARDS
from tasks.config.params_file import section
from tasks.config.schema import Importance
from tasks.importance import EXAMPLES, gather
from tasks.runtime.stage_runner import explained, output, run_item, warn


def importance_shard(shard: str) -> None:
    """Gather the calibration statistics of one of `importance.shards`, and the number of its examples.

    The first shard prints the warnings, which all would print. On a machine with several GPUs, each shard takes
    another one.
    """
    shards = list(section("importance", Importance).shards)
    if shard not in shards:
        raise StageError(f"importance.shards has no {shard}")
    number, count = shards.index(shard), len(shards)
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())

    def part(examples: int) -> range:
        if examples < count:
            raise StageError(
                f"importance.shards has {count} names for {examples} calibration examples: remove some, or raise "
                "data.sizes.calibration"
            )
        return range(number * examples // count, (number + 1) * examples // count)

    with explained(), output(SHARDS / shard) as folder:
        found = gather(folder, part, (lambda message: None) if number else warn)
        (folder / EXAMPLES).write_text(f"{found}\n")


if __name__ == "__main__":
    run_item(SHARD_STAGE, "shard", "one of importance.shards", importance_shard)
