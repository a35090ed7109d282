"""Stored states on the disk, and the target as its draft sees it when they are read back.

shard.json      {"declaration", "parts": names of its files of rows}; written last

Shapes: B rows, S tokens.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from shlex import join, quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import logging

from longspec.atomic_files import read_json_object
from longspec.config import differences
from longspec.models.target import load_target, without_layers
from longspec.states.encoding import decode
from longspec.states.forward import FrozenTarget

SHARD = "shard.json"
PART = re.compile(r"rows-(\d+)-(\d+)\.safetensors$")
OPEN_PARTS = 64  # files that stay open


def rows_of_shard(num_rows: int, shard: int, num_shards: int) -> range:
    """Return the rows of a shard; none of some, where there are fewer rows. Raises ValueError for a shard that is none."""
    if not 0 <= shard < num_shards:
        raise ValueError(f"--shard {shard} --num-shards {num_shards}: there are shards 0 to {num_shards - 1}")
    return range(shard * num_rows // num_shards, (shard + 1) * num_rows // num_shards)


def part_name(rows: range) -> str:
    """Return the name of the file that holds these rows."""
    return f"rows-{rows.start:06d}-{rows.stop - 1:06d}.safetensors"


def rows_in(name: str) -> range:
    """Return the rows of a file of this name."""
    found = PART.search(name)
    assert found, name
    return range(int(found[1]), int(found[2]) + 1)


def read_shard(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return a shard's declaration and its files of rows. Raises ValueError for one that is gone or of another version."""
    content = read_json_object(path) if path.is_file() else {}
    if {"declaration", "parts"} - content.keys():
        raise ValueError(
            f"{path}: holds no stored states of this version; after rm -f {quote(str(path.parents[1]))}/*/{SHARD} all "
            "are built again: by the same snakemake command, or by python -m longspec.states build"
        )
    parts = [path.with_name(name) for name in content["parts"]]
    for part in parts:
        if not part.is_file():
            raise ValueError(f"{part}: missing; {_made_again(part)}")
    return content["declaration"], parts


def _made_again(part: Path) -> str:
    """Return how a file of rows is made again."""
    return f"have it made again after: {join(['rm', '-f', str(part), str(part.with_name(SHARD))])}"


def _open(part: Path) -> Any:
    try:
        return safe_open(part, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{part}: damaged ({error}); {_made_again(part)}") from error


class StoredRows:
    """The rows of some files, numbered through. What is stored of a row is the same in all of them."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self.parts, self._firsts = parts, list(accumulate((len(rows_in(path.name)) for path in parts), initial=0))
        self._opened = lru_cache(maxsize=OPEN_PARTS)(_open)

    @classmethod
    def of(cls, wanted: Sequence[dict[str, Any]], paths: Sequence[Path]) -> "StoredRows":
        """Find the rows of these declarations, one after another, among shards: in any that has the same one.

        Raises ValueError for what is missing.
        """
        shards, found = {path: read_shard(path) for path in paths}, []
        for declaration in wanted:
            same = [part for held, of_shard in shards.values() if held == declaration for part in of_shard]
            parts = list(dict(sorted((rows_in(part.name).start, part) for part in same)).values())
            rows = [row for part in parts for row in rows_in(part.name)]
            if not parts:
                apart = [(differences(declaration, held), path) for path, (held, _) in shards.items()]
                near, path = min(apart, key=lambda each: len(each[0]))
                raise ValueError(
                    f"{path}: holds other states than this job reads: {'; '.join(near)} (wanted -> stored); start the same "
                    "snakemake command again, which builds them, or give those of this recipe, target and data, and of the "
                    "held-out rows (build --held-out) where runtime.held_out_every is set"
                )
            if rows != list(range(declaration["num_rows"])):
                held = ", ".join(f"{part.parent} {rows_in(part.name)}" for part in parts)
                raise ValueError(f"--states: wanted are rows 0 to {declaration['num_rows'] - 1}; give each shard once: {held}")
            found += parts
        return cls(found)

    def read(self, rows: Sequence[int], *, pinned: bool) -> dict[str, Tensor]:
        """Read the stored tensors of some rows, [B, S, ...] on the host."""
        found = [self._row(row) for row in rows]
        joined = {name: torch.stack([each[name] for each in found]) for name in found[0]}
        return {name: tensor.pin_memory() for name, tensor in joined.items()} if pinned else joined

    def _row(self, row: int) -> dict[str, Tensor]:
        number = bisect_right(self._firsts, row) - 1
        file = self._opened(self.parts[number])
        return {name: file.get_slice(name)[row - self._firsts[number]] for name in file.keys()}  # noqa: SIM118 - no dictionary


def load_without_layers(path: str, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model of a target's folder with embedding, rotations, final norm and head alone."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # else it reports all weights of all layers as not expected
    try:
        return load_target(path, without_layers(config), dtype)
    finally:
        logging.set_verbosity(level)


class StoredStates(FrozenTarget):
    """Stored states of training rows, and of held-out ones under the numbers ~row; a face like forward.TargetStates.

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
            source, rows = self.held_out, [~number for number in numbers]
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
        return self.inputs(input_ids_BS, position_ids_BS) | decode(encoded, dtype)
