"""Manifests of stored states: a shard's, which is written last, and that of all shards; how both are checked.

shard.json      {"declaration", "hash", "shard", "num_shards", "first", "rows", "chunks": [{"name", "first", "rows",
                "sha256"}], "left_out": {row: reason}, "bytes", "command"}; sha256: of the chunk's checksums
manifest.json   {"declaration", "hash", "shards": [{"path", "sha256"}], "left_out", "bytes"}; paths from its own folder
contents.json   {"hash", "left_out"}: all of it that decides what is trained; built again by other machines it is the same
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json_object, sha256_file, sha256_text, write_json
from longspec.states.stored.chunk import ROW, SUMS, WHOLE, Layout, is_line
from longspec.states.stored.declaration import Declaration

SHARD, MANIFEST, CONTENTS = "shard.json", "manifest.json", "contents.json"


def rows_of_shard(num_rows: int, shard: int, num_shards: int) -> range:
    """The rows of one shard, none for some of more shards than rows. Raises ValueError for a shard that there is not."""
    if not 0 <= shard < num_shards:
        raise ValueError(f"--shard {shard} --num-shards {num_shards}: there are shards 0 to {num_shards - 1}")
    return range(shard * num_rows // num_shards, (shard + 1) * num_rows // num_shards)


@dataclass(frozen=True)
class Shard:
    """A finished shard."""

    path: Path  # of shard.json
    content: dict[str, Any]
    declaration: Declaration

    @classmethod
    def read(cls, path: Path) -> "Shard":
        """Read a shard's manifest. Raises ValueError for one that is missing or not as a builder writes it."""
        content = read_json_object(path)
        try:
            declaration = Declaration.of_plain(content["declaration"])
            if content["hash"] != declaration.hash or {"first", "rows", "chunks", "command"} - content.keys():
                raise ValueError("its hash does not fit")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: is damaged or no shard of stored states ({error!r}); build it again") from error
        return cls(path, content, declaration)

    @property
    def rows(self) -> range:
        """The numbers of its rows."""
        return range(self.content["first"], self.content["first"] + self.content["rows"])

    @property
    def advice(self) -> str:
        """The end of a message about damage: the command that builds the shard again."""
        return f"build it again, which computes what is damaged: {self.content['command']}"

    def layout(self, chunk: dict[str, Any]) -> Layout:
        """The layout of one of its chunks."""
        return Layout(self.declaration, chunk["first"], chunk["rows"])

    def file(self, chunk: dict[str, Any]) -> Path:
        """The file of one of its chunks."""
        return self.path.with_name(chunk["name"] + WHOLE)

    def lines(self, chunk: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The line of each row of a chunk. Raises ValueError for a file of checksums that is missing or not the shard's."""
        path = self.path.with_name(chunk["name"] + SUMS)
        text = path.read_text(errors="replace") if path.is_file() else ""
        if sha256_text(text) != chunk["sha256"]:
            raise ValueError(f"{path}: is missing, torn or edited; {self.advice}")
        return {line[ROW]: line for line in json.loads(text)["rows"] if is_line(self.layout(chunk), line)}


def read_shards(path: Path) -> list[Shard]:
    """The shards of a manifest.json, or the one of a shard.json, in the order of their rows.

    Raises ValueError that names what is missing, damaged, or was made again since it was merged.
    """
    content = read_json_object(path)
    if "chunks" in content:
        return [Shard.read(path)]
    if not isinstance(content.get("shards"), list):
        raise ValueError(f"{path}: holds no shards; give the manifest.json or shard.json of python -m longspec.states")
    shards = []
    for each in content["shards"]:
        place = path.parent / each["path"]
        shard = Shard.read(place)
        if sha256_file(place) != each["sha256"]:
            raise ValueError(f"{place}: is not what {path} lists; merge the shards again: python -m longspec.states merge")
        shards.append(shard)
    return shards


def merge(paths: list[Path], out: Path) -> dict[str, Any]:
    """Write manifest.json, and contents.json beside it; returns the first. Raises ValueError for shards that are no whole."""
    shards = sorted((Shard.read(path) for path in paths), key=lambda shard: (shard.rows.start, shard.rows.stop))
    first, reached = shards[0], 0
    for shard in shards:
        if shard.declaration != first.declaration:
            raise ValueError(f"{shard.path}: holds other states than {first.path}: of other rows, settings or target")
        if shard.rows.start != reached:
            raise ValueError(f"{shard.path}: begins with row {shard.rows.start}, row {reached} is next; give each shard once")
        reached = shard.rows.stop
    if reached != first.declaration.num_rows:
        raise ValueError(
            f"{shards[-1].path}: ends with row {reached - 1} of {first.declaration.num_rows} rows; give all shards"
        )
    content = {
        "declaration": first.declaration.plain(),
        "hash": first.declaration.hash,
        "shards": [{"path": os.path.relpath(shard.path, out.parent), "sha256": sha256_file(shard.path)} for shard in shards],
        "left_out": {row: reason for shard in shards for row, reason in shard.content["left_out"].items()},
        "bytes": sum(shard.content["bytes"] for shard in shards),
    }
    write_json(out, content)
    write_json(out.with_name(CONTENTS), {"hash": content["hash"], "left_out": content["left_out"]})
    return content
