"""Stored states on the disk, the manifests that prove them, and the target as its draft sees it when they are read back.

shard.json      {"declaration", "hash", "shard", "num_shards", "first", "rows", "part_rows", "files": {part: {"bytes",
                "sha256"}}, "left_out": {}, "bytes", "command"}; written last
manifest.json   {"declaration", "hash", "files": {shard.json of each shard: {"bytes", "sha256"}}, "left_out", "bytes"}
contents.json   {"hash", "left_out"}: all of it that decides what is trained; built again by other machines it is the same

Shapes: B rows, S tokens.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import logging

from longspec.atomic_files import check_files, describe_files, read_json_object, write_json
from longspec.config import differences
from longspec.models.target import load_target, without_layers
from longspec.states.declaration import Declaration
from longspec.states.encoding import decode
from longspec.states.forward import FrozenTarget

SHARD, MANIFEST, CONTENTS = "shard.json", "manifest.json", "contents.json"
OPEN_PARTS = 64  # files that stay open


def rows_of_shard(num_rows: int, shard: int, num_shards: int) -> range:
    """Return the rows of a shard; none of some, where there are fewer rows. Raises ValueError for a shard that is none."""
    if not 0 <= shard < num_shards:
        raise ValueError(f"--shard {shard} --num-shards {num_shards}: there are shards 0 to {num_shards - 1}")
    return range(shard * num_rows // num_shards, (shard + 1) * num_rows // num_shards)


def parts_of(rows: range, size: int) -> list[range]:
    """Return the rows of each file of a shard."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def part_name(rows: range) -> str:
    """Return the name of the file that holds these rows."""
    return f"rows-{rows.start:06d}-{rows.stop - 1:06d}.safetensors"


@dataclass(frozen=True)
class Shard:
    """A finished shard."""

    path: Path  # of shard.json
    content: dict[str, Any]
    declaration: Declaration
    rows: range  # the numbers of its rows

    @classmethod
    def read(cls, path: Path) -> "Shard":
        """Read a shard's manifest. Raises ValueError for one that is missing, damaged, or of another version."""
        content = read_json_object(path)
        advice = f"build it again: {content.get('command', 'python -m longspec.states build')}"
        if {"declaration", "hash", "first", "rows", "part_rows", "files", "left_out", "command"} - content.keys():
            raise ValueError(f"{path}: holds no shard of this version's stored states; {advice}")
        if content["left_out"]:  # an earlier version has stored zeros for them
            raise ValueError(f"{path}: rows {', '.join(content['left_out'])} are not finite; {advice}")
        rows = range(content["first"], content["first"] + content["rows"])
        return cls(path, content, Declaration.of_plain(content["declaration"]), rows)


def merge(paths: list[Path], out: Path) -> dict[str, Any]:
    """Write manifest.json, and contents.json beside it; returns the first. Raises ValueError for shards that are no whole."""
    shards = sorted(map(Shard.read, paths), key=lambda shard: (shard.rows.start, shard.rows.stop))
    first = shards[0]
    for shard in shards:
        if shard.declaration != first.declaration:
            raise ValueError(f"{shard.path}: holds other states than {first.path}: of other rows, settings or target")
    if [row for shard in shards for row in shard.rows] != list(range(first.declaration.num_rows)):
        held = ", ".join(f"{shard.path} {shard.rows.start} to {shard.rows.stop - 1}" for shard in shards)
        raise ValueError(f"{out}: there are rows 0 to {first.declaration.num_rows - 1}; give each shard once: {held}")
    content = {
        "declaration": first.declaration.plain(),
        "hash": first.declaration.hash,
        "files": describe_files(out.parent, [os.path.relpath(shard.path, out.parent) for shard in shards]),
        "left_out": {},
        "bytes": sum(shard.content["bytes"] for shard in shards),
    }
    write_json(out, content)
    write_json(out.with_name(CONTENTS), {name: content[name] for name in ("hash", "left_out")})
    return content


class StoredRows:
    """The rows of some shards, numbered through: of one manifest.json or shard.json, or of several one after another.

    What is stored of a row is the same in all of them, as their declarations say: only the rows differ.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self.declaration = shards, shards[0].declaration
        assert all(shard.declaration.tensors == self.declaration.tensors for shard in shards)
        parts = {
            shard.path.with_name(part_name(rows)): len(rows)
            for shard in shards
            for rows in parts_of(shard.rows, shard.content["part_rows"])
        }
        self._paths, self._firsts = list(parts), list(accumulate(parts.values(), initial=0))
        self._opened = lru_cache(maxsize=OPEN_PARTS)(lambda path: safe_open(path, framework="pt"))

    @classmethod
    def open(cls, manifest: Path) -> "StoredRows":
        """Open the shards of a manifest.json, or the one of a shard.json, in the order of their rows, and check their files.

        Raises ValueError that names what is missing, damaged, of another version, or was made again since it was merged.
        """
        content, paths = read_json_object(manifest), [manifest]
        if "first" not in content:
            if not isinstance(content.get("files"), dict):
                raise ValueError(
                    f"{manifest}: holds no stored states of this version; remove {manifest.parent}, and build them: the same "
                    "snakemake command does, or python -m longspec.states build and merge"
                )
            check_files(manifest.parent, content["files"], advice="merge the shards again: python -m longspec.states merge")
            paths = [manifest.parent / name for name in content["files"]]
        shards = sorted(map(Shard.read, paths), key=lambda shard: (shard.rows.start, shard.rows.stop))
        for shard in shards:
            advice = f"build it again, which computes what is damaged: {shard.content['command']}"
            check_files(shard.path.parent, shard.content["files"], shard.path, advice=advice)
        return cls(shards)

    def check_same(self, wanted: Declaration) -> None:
        """Raise ValueError that names how these differ from the states that a training job wants."""
        changed = differences(wanted.plain(), self.declaration.plain())
        if changed:
            raise ValueError(
                f"{self.shards[0].path}: holds other states than this job reads: {'; '.join(changed)} (wanted -> stored); "
                "build them again, or give those of this recipe, target and data"
            )

    def read(self, rows: Sequence[int], *, pinned: bool) -> dict[str, Tensor]:
        """Read the stored tensors of some rows, [B, S, ...] on the host."""
        found = [self._row(row) for row in rows]
        joined = {tensor.name: torch.stack([each[tensor.name] for each in found]) for tensor in self.declaration.tensors}
        return {name: tensor.pin_memory() for name, tensor in joined.items()} if pinned else joined

    def _row(self, row: int) -> dict[str, Tensor]:
        number = bisect_right(self._firsts, row) - 1
        file = self._opened(self._paths[number])
        return {tensor.name: file.get_slice(tensor.name)[row - self._firsts[number]] for tensor in self.declaration.tensors}


def held_out_number(row: int) -> int:
    """By which the states of a held-out row are asked for, beside those of the rows that are trained."""
    return -1 - row


def load_without_layers(path: str, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model of a target's folder with embedding, rotations, final norm and head alone."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # else it reports all weights of all layers as not expected
    try:
        return load_target(path, without_layers(config), dtype)
    finally:
        logging.set_verbosity(level)


class StoredStates(FrozenTarget):
    """Stored states of training rows, and of held-out ones under their own numbers; a face like forward.TargetStates.

    config: of the whole target; attention: the draft's backend.
    """

    def __init__(
        self,
        path: str,
        config: Any,
        dtype: torch.dtype,
        attention: str,
        rows: StoredRows,
        held_out: StoredRows | None = None,
    ) -> None:
        super().__init__(load_without_layers(path, config, dtype))
        self.config, self.attention, self.rows, self.held_out = config, attention, rows, held_out
        self._ahead: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def gather(self, _: list[nn.Parameter]) -> AbstractContextManager[Any]:
        """Nothing is partitioned."""
        return nullcontext()

    def follow(self, device: torch.device) -> None:
        """Move what there is of the target to its draft's device."""
        self.target.to(device)

    def prefetch(self, row_numbers: Sequence[int]) -> None:
        """Read the rows of a forward to come; another thread may, while the forward before it runs."""
        numbers = tuple(int(number) for number in row_numbers)
        if numbers not in self._ahead:
            self._ahead[numbers] = self._read(numbers)

    def _read(self, numbers: tuple[int, ...]) -> dict[str, Tensor]:
        source, rows = self.rows, list(numbers)
        if numbers[0] < 0:
            assert self.held_out is not None, "setup asks for held-out rows only with their states"
            source, rows = self.held_out, [held_out_number(number) for number in numbers]
        return source.read(rows, pinned=self.head_weight.device.type == "cuda")

    @torch.no_grad()
    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor,
        document_ids_BS: Tensor | None,
        names: Sequence[str],
        row_numbers_B: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return embeddings and rotations of the tokens, and the stored tensors of the rows with these numbers."""
        assert row_numbers_B is not None, "row_numbers: by which stored states are found"
        numbers = tuple(row_numbers_B.tolist())
        encoded = self._ahead.pop(numbers, None) or self._read(numbers)
        device, dtype = self.head_weight.device, self.head_weight.dtype
        encoded = {name: tensor.to(device, non_blocking=True) for name, tensor in encoded.items()}
        held_out = self.held_out if numbers[0] < 0 else None
        tensors = (held_out or self.rows).declaration.tensors
        return self.inputs(input_ids_BS, position_ids_BS) | decode(encoded, tensors, dtype)
