"""Checkpoints of a factorization with refinement: one file for each refined block, from which a killed stage goes on.

As checkpoints of trainings (tasks/training/checkpoints.py), they are stored outside the outputs of stages, belong to
one combination of inputs, settings and code, and can safely be deleted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eckart.factorization.refinement import BlockStore, RefinedBlock
from tasks.runtime.stage_runner import say
from tasks.training.checkpoints import environment

FOLDER = Path(".eckart/checkpoints/factorize")


class RefinedBlocks(BlockStore):
    """The refined blocks of one candidate, each in a file with its result and the digest of what decides it."""

    def __init__(self, name: str, inputs: Iterable[Path], settings: Mapping[str, Any]) -> None:
        """Prepare the folder of the candidate `name`.

        Args:
            inputs: files, and folders with files, that the factorization reads.
            settings: everything else that decides the result.
        """
        self.folder = FOLDER / name
        self.digest = _digest(inputs, settings)

    def load(self) -> Sequence[tuple[RefinedBlock, Mapping[str, Tensor]]]:
        """Return the blocks that this factorization has refined; remove those of another one from the folder."""
        found = [_read(file) for file in sorted(self.folder.glob("*.safetensors"))]
        if any(digest != self.digest for digest, _, _ in found):
            self.remove()
            return []
        if found:
            say(f"goes on after {found[-1][1].name}")
        return [(block, tensors) for _, block, tensors in found]

    def save(self, block: RefinedBlock, tensors: Mapping[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{len([*self.folder.glob('*.safetensors')]):05}.safetensors"
        new, metadata = file.with_suffix(".new"), {"digest": self.digest, "block": block.model_dump_json()}
        save_file({name: value.cpu().clone().contiguous() for name, value in tensors.items()}, new, metadata)
        new.replace(file)
        say(f"{block.name} refined: error {block.before:.3g} → {block.after:.3g} on held-out examples")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(file: Path) -> tuple[str, RefinedBlock, dict[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is not a mapping)
    return metadata["digest"], RefinedBlock.model_validate_json(metadata["block"]), tensors


def _digest(inputs: Iterable[Path], settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(environment().encode())
    for path in inputs:
        for file in [path] if path.is_file() else sorted(part for part in path.rglob("*") if part.is_file()):
            with file.open("rb") as content:
                digest.update(f"{file} ".encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
