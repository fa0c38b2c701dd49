"""Stage write: let the original model write calibration text → data/written, blocks of token ids; by default none."""

from __future__ import annotations

import pyarrow
from pyarrow import parquet

from tasks.artifacts.paths import WRITTEN
from tasks.config.schema import Written, section
from tasks.runtime.stage_runner import output, run


def write() -> None:
    """Let the original model write `data.written.examples` blocks of text."""
    params = section("data.written", Written)
    blocks: list[list[int]] = []
    if params.examples:
        from tasks.data.writing import written_blocks  # imports torch, which takes seconds

        blocks = written_blocks(params)
    with output(WRITTEN.parent) as folder:
        table = pyarrow.table({"input_ids": pyarrow.array(blocks, pyarrow.list_(pyarrow.int64()))})
        parquet.write_table(table, folder / WRITTEN.name)


def _writes() -> bool:
    return section("data.written", Written).examples > 0


if __name__ == "__main__":
    run("write", write, needs_torch=_writes)
