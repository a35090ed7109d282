"""A checkpoint's tensors on the disk: one safetensors file a rank, and a reader that does not care how many ranks wrote it.

Keys are `kind|parameter|start`: `kind` of zero_state.KINDS, `start` the first element of the flattened parameter. Each
tensor is flat float32. A file's metadata holds its rank's random states.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.models.weight_files import open_safetensors, telling_damage

SEPARATOR = "|"
RANDOM = "random"
ALIGNMENT = 8


def shard_name(rank: int) -> str:
    """The file of one rank."""
    return f"rank_{rank:05d}.safetensors"


def shard_key(kind: str, name: str, start: int) -> str:
    """The key of one tensor in a file."""
    return SEPARATOR.join((kind, name, str(start)))


def header(sizes: dict[str, int], metadata: dict[str, str]) -> bytes:
    """The beginning of a safetensors file of flat float32 tensors with so many elements each."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, numel in sizes.items():
        entries[key] = {"dtype": "F32", "shape": [numel], "data_offsets": [end, end := end + 4 * numel]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_shard(path: Path, begin: bytes, tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Write a file of a header and its tensors, flushed to the disk; its size and hash, taken on the way."""
    digest = hashlib.sha256()
    with path.open("wb") as handle:

        def write(part: bytes | memoryview) -> None:
            digest.update(part)
            handle.write(part)

        write(begin)
        for tensor in tensors:
            write(tensor.cpu().contiguous().numpy().data.cast("B"))
        handle.flush()
        os.fsync(handle.fileno())
        return {"bytes": handle.tell(), "sha256": digest.hexdigest()}


class Shards:
    """Reads tensors, or parts of them, from the files of any number of ranks."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        # (kind, parameter) -> its pieces: first element, elements, a slice of the file
        self.pieces: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
        self.files = [self._indexed(folder / name) for name in sorted(names)]
        for pieces in self.pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def _indexed(self, path: Path) -> Any:
        """An open file whose pieces are noted. Raises ValueError for a damaged one."""
        file = open_safetensors(path)
        with telling_damage(path):
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                kind, name, start = key.split(SEPARATOR)
                piece = file.get_slice(key)
                self.pieces.setdefault((kind, name), []).append((int(start), piece.get_shape()[0], piece))
        return file

    def fill(self, out: Tensor, kind: str, name: str, start: int) -> None:
        """Copy `out.numel()` elements from `start` on into a flat tensor. Raises ValueError that names what is missing."""
        wanted, end = start, start + out.numel()
        for first, numel, piece in self.pieces.get((kind, name), []):
            if first + numel <= wanted or first >= end:
                continue
            if first > wanted:
                break
            until = min(end, first + numel)
            out[wanted - start : until - start] = piece[wanted - first : until - first]
            wanted = until
        if wanted < end:
            raise ValueError(f"{self.folder}: {kind} of {name}: elements {wanted} to {end} are in none of its files")

    def random_state(self, rank: int) -> str | None:
        """Random states that the given rank has left, None when there was no such rank."""
        return self.files[rank].metadata()[RANDOM] if rank < len(self.files) else None


def whole_tensors(folder: Path, names: Iterable[str], shapes: dict[str, list[int]], kind: str) -> dict[str, Tensor]:
    """All parameters of one kind. Raises ValueError that names a missing or an unexpected one."""
    shards = Shards(folder, names)
    strangers = sorted({name for own_kind, name in shards.pieces if own_kind == kind} - shapes.keys())
    if strangers:
        raise ValueError(f"{folder}: {', '.join(strangers)}: unexpected, its manifest does not list them")
    found = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    for name, tensor in found.items():
        shards.fill(tensor.view(-1), kind, name, 0)
    return found
