"""Stored blocks come back as they were, and never to another factorization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eckart.factorization.refinement import RefinedBlock
from tasks.training.refined_blocks import FOLDER, RefinedBlocks


def test_blocks_come_back_to_their_own_factorization_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/weights").write_text("one")
    blocks = [RefinedBlock(name=f"layers.{number}", before=0.5, after=0.4, passes=2) for number in range(11)]
    store = RefinedBlocks("svd-0.5", [Path("model")], {"seed": 0})
    shared = torch.arange(4.0)
    for block in blocks:
        store.save(block, {"a": shared, "b": shared.view(2, 2).T})
    Path(FOLDER, "svd-0.5", "00011.new").write_text("killed while it was written")
    found = RefinedBlocks("svd-0.5", [Path("model")], {"seed": 0}).load()
    assert [block for block, _ in found] == blocks
    assert torch.equal(found[0][1]["a"], shared)
    assert torch.equal(found[0][1]["b"], shared.view(2, 2).T)
    assert not RefinedBlocks("svd-0.33", [Path("model")], {"seed": 0}).load()
    assert not RefinedBlocks("svd-0.5", [Path("model")], {"seed": 1}).load()
    assert not RefinedBlocks("svd-0.5", [Path("model")], {"seed": 0}).load()
    store.save(blocks[0], {"a": shared})
    Path("model/weights").write_text("two")
    assert not RefinedBlocks("svd-0.5", [Path("model")], {"seed": 0}).load()
