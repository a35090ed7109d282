"""Build a folder of stored states: a part that is whole stays, the others are computed by the target and written.

Each rank computes and writes parts of its own. A part's forwards have the same rows whatever else is missing, so its bytes are
the same however often a builder was killed. Two builders of one folder write the same bytes.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from math import ceil
from pathlib import Path
from shlex import join
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longspec.atomic_files import checked_folder, new_file, remove_strays, sha256_json, write_json
from longspec.config.schema import DTYPES
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.distributed import Ranks, log, of_first_rank
from longspec.methods import vocabulary_for
from longspec.models.target import resolve_dtype
from longspec.states.declaration import SCALE, RowSource, bytes_a_token, checked_config, declare, encode, top_k_of
from longspec.states.forward import TargetStates
from longspec.states.load import SHARD, load_states, part_name
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP, TOP_TOKENS

PART_BYTES = 128 * 2**20  # bytes of one file; less than twice that if rows do not fit evenly


def rows_of(folder: Path, packed: PackedRows) -> tuple[RowSource, range]:
    """Return the rows that a folder's name describes: 0-of-4: the first of four shards; held-out-8: 8 held-out rows.

    A shard may be empty if there are fewer rows than shards. Raises ValueError for any other name.
    """
    found = re.fullmatch(r"(\d+)-of-(\d+)|held-out-(\d+)", folder.name)
    if found and found[3]:
        source = RowSource(packed, held_out_rows(packed, int(found[3])))
        return source, range(len(source.rows))
    if not found or int(found[1]) >= int(found[2]):
        raise ValueError(f"--out {folder}: its name says which rows: give .../0-of-4, the first of 4 shards, or .../held-out-8")
    shard, shards = int(found[1]), int(found[2])
    return RowSource(packed), range(shard * len(packed) // shards, (shard + 1) * len(packed) // shards)


class Computation:
    """Compute what is stored of the target's states of some rows. All ranks run the same forwards at the same time."""

    def __init__(
        self, recipe: Any, runtime: Any, target: Path, source: RowSource, vocabulary: Path | None, device: torch.device
    ) -> None:
        """Check that everything fits. Raises ValueError, with the key, if it does not."""
        self.runtime, self.source, self.device = runtime, source, device
        self.target_path, self.dtype, self.top_k = checked_folder(target), resolve_dtype(recipe.precision), recipe.states.top_k
        self.config = checked_config(self.target_path, recipe)
        chosen = None if self.top_k is None else vocabulary_for(recipe, vocabulary)
        if chosen is not None:
            chosen.check_tokens(vocabulary, self.config.vocab_size, self.target_path, source.tokenizer)
        self.declaration = declare(recipe, self.config, target, source, self.dtype, chosen)
        self.ids_V = None if chosen is None else torch.tensor(chosen.ids, device=device)
        self.stored = self.declaration["tensors"]
        self.names = [name for name in self.stored if name not in TOP and not name.endswith(SCALE)]
        self.names += [FINAL] if TOP_TOKENS in self.stored else []

    @cached_property
    def states(self) -> TargetStates:
        """Return the target, loaded at first use: a shard that is whole needs none."""
        states = load_states(self.target_path, self.config, self.runtime, self.device, self.dtype)
        states.follow(self.device)
        return states

    @torch.no_grad()
    def of(self, numbers: list[int]) -> dict[str, Tensor]:
        """Compute the stored tensors of some rows in one forward."""
        ids, positions, documents = self.source.batch(numbers)
        ids, documents = ids.to(self.device), None if documents is None else documents.to(self.device)
        found = self.states(ids, positions.to(self.device), documents, self.names)
        if BEST_TOKEN in self.stored:
            next_N = ids.roll(-1, dims=1).flatten()  # after a row's last token comes its first
            k, temperature, head = self.top_k or 1, self.declaration["temperature"] or 1.0, self.states.head_weight
            with self.states.gather([head]):
                top = top_k_of(found[FINAL].flatten(0, 1), head, k, self.ids_V, temperature, next_N)
            found = found | {name: part.unflatten(0, ids.shape) for name, part in zip(TOP, top, strict=True)}
        return {name: tensor.cpu() for name, tensor in encode(found, self.stored).items()}

    def part(self, rows: range, size: int) -> dict[str, Tensor]:
        """Compute a part's rows; all parts have as many forwards of whole micro batches, padded with the last row."""
        each, last = self.runtime.micro_batch, rows.stop - 1
        found = [self.of([min(rows.start + row, last) for row in range(start, start + each)]) for start in range(0, size, each)]
        return {name: torch.cat([tensors[name] for tensors in found])[: len(rows)] for name in found[0]}


def build(out: Path, computation: Computation, rows: range, ranks: Ranks) -> Path:
    """Build a shard in a folder; all ranks call this. Return the path of its shard.json, which is written last."""
    whole_hash, began = sha256_json(computation.declaration), time.monotonic()
    # Parts have about equal numbers of rows, independent of the micro batch, so that it may change.
    bytes_of_rows = len(rows) * bytes_a_token(computation.stored) * computation.source.sequence_length
    each = max(1, ceil(len(rows) / max(1, ceil(bytes_of_rows / PART_BYTES))))
    parts = [rows[start : start + each] for start in range(0, len(rows), each)]
    missing = of_first_rank(lambda: _find_missing(out, parts, computation.declaration), ranks)
    with ThreadPoolExecutor(1) as pool:  # the target need not wait for the disk
        writing = pool.submit(lambda: None)
        for first in range(0, len(missing), ranks.world_size):
            # A rank without a part of its own computes one without writing it: a shared target needs all ranks.
            own = missing[min(first + ranks.rank, len(missing) - 1)]
            tensors = computation.part(own, len(parts[0]))
            writing.result()  # raises the writer's error
            if first + ranks.rank < len(missing):
                writing = pool.submit(_write, out / part_name(own), tensors, whole_hash)
            done = sum(map(len, missing[: first + ranks.world_size]))
            speed = done * computation.source.sequence_length / (time.monotonic() - began)
            log(f"{done} of {sum(map(len, missing))} rows, {speed:.0f} tokens/s", ranks)
        writing.result()
    if ranks.world_size > 1:
        dist.barrier()
    content = {"declaration": computation.declaration, "parts": [part_name(part) for part in parts]}
    of_first_rank(lambda: write_json(out / SHARD, content), ranks)
    return out / SHARD


def _find_missing(out: Path, parts: list[range], declaration: dict[str, Any]) -> list[range]:
    """Return the missing parts. Files of rows that belong to no part, or are not whole, are removed.

    Raises ValueError for files that differ in nothing but the precision that `auto` or `fastest` chose on another machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = {part_name(part) for part in parts}
    remove_strays(*(out / name for name in names))
    found, whole_hash = {path: _declared(path) for path in out.glob("rows-*")}, sha256_json(declaration)
    for dtype in set(DTYPES.values()) - {declaration["computed_in"]}:
        if sha256_json(declaration | {"computed_in": dtype}) in found.values():
            raise ValueError(
                f"{out}: its rows were computed in {dtype}, and recipe.precision chooses {declaration['computed_in']} on this "
                f"machine; go on where it chooses the former, or begin anew after: {join(['rm', '-r', str(out)])}"
            )
    for path, of in found.items():
        if path.name not in names or of != whole_hash:
            path.unlink()
    missing = [part for part in parts if not (out / part_name(part)).exists()]
    if missing:
        (out / SHARD).unlink(missing_ok=True)  # it describes other files with the same names
    log(f"{out}: {len(parts) - len(missing)} of {len(parts)} files of rows are there")
    return missing


def _declared(path: Path) -> str | None:
    """Return the hash of the declaration of the states in a file; None if the file is not whole."""
    with suppress(SafetensorError), safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("declaration")
    return None


def _write(path: Path, tensors: dict[str, Tensor], whole_hash: str) -> None:
    with new_file(path) as beside:
        beside.write_bytes(save(tensors, {"declaration": whole_hash}))
