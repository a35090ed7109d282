"""Build one shard of stored states: a part that is whole stays, the others are computed by the target and written.

    rows-000064-000127.safetensors    tensors [rows, S, ...] of rows 64 to 127; it has this name once it is whole

Each rank computes and writes parts of its own. A part's forwards have the same rows whatever else is missing, so its bytes are
the same however often a builder was killed. Two builders of one folder write the same bytes. Shapes: S tokens.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longspec.atomic_files import checked_folder, new_file, remove_strays, write_json
from longspec.config import OFFLINE
from longspec.distributed import Ranks, log
from longspec.methods import method_of, vocabulary_for
from longspec.models.target import resolve_dtype
from longspec.process_group import of_first_rank
from longspec.states.declaration import SCALE, RowSource, bytes_a_token, checked_config, declare, hash_of
from longspec.states.encoding import encode, top_k_of
from longspec.states.forward import TargetStates
from longspec.states.load import load_states
from longspec.states.stored_states import SHARD, part_name
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP, TOP_TOKENS

PART_BYTES = 128 * 2**20  # of one file at most, unless one micro batch has more
PROGRESS = 30.0  # seconds between two lines


class Computation:
    """The target, and what is stored of its states of some rows. All ranks make the same forwards at the same time."""

    def __init__(
        self,
        recipe: Any,
        runtime: Any,
        target: Path,
        source: RowSource,
        vocabulary: Path | None,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """Raises ValueError for what does not fit, with the key."""
        if recipe.states.source != OFFLINE:
            raise ValueError(
                f"recipe.states.source: is {recipe.states.source}: this stage reads no stored states; set {OFFLINE}"
            )
        self.runtime, self.source, self.ranks, self.device = runtime, source, ranks, device
        self.target_path, self.dtype, self.top_k = checked_folder(target), resolve_dtype(recipe.precision), recipe.states.top_k
        self.config, chosen = checked_config(self.target_path, recipe), None
        if self.top_k is not None:
            chosen = vocabulary_for(recipe, vocabulary)
            if chosen is not None:
                chosen.check_tokens(vocabulary, self.config.vocab_size, self.target_path, source.tokenizer)
        self.declaration = declare(recipe, self.config, target, source, self.dtype, chosen)
        method, settings = method_of(recipe, chosen)
        self.learnt, self.stored = method.learnt(settings), self.declaration["tensors"]
        self.names = [name for name in self.stored if name not in TOP and not name.endswith(SCALE)]
        self.names += [FINAL] if TOP_TOKENS in self.stored else []

    @cached_property
    def states(self) -> TargetStates:
        """The target, loaded where it is first asked for: a shard that is whole needs none."""
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
            k, chosen, temperature = 1, None, 1.0
            if self.top_k is not None and self.learnt is not None:
                k, chosen, temperature = self.top_k, self.learnt.ids, self.learnt.temperature
            ids_V = None if chosen is None else torch.tensor(chosen, device=self.device)
            next_N = ids.roll(-1, dims=1).flatten()  # behind a row's last token its first
            with self.states.gather([self.states.head_weight]):
                top = top_k_of(found[FINAL].flatten(0, 1), self.states.head_weight, k, ids_V, temperature, next_N)
            found = found | {name: part.unflatten(0, ids.shape) for name, part in zip(TOP, top, strict=True)}
        return {name: tensor.cpu() for name, tensor in encode(found, self.stored).items()}


def parts_of(rows: range, computation: Computation) -> list[range]:
    """Return the rows of each file of a shard, about as many in each; whatever the micro batch, so that it may change."""
    size = bytes_a_token(computation.stored) * computation.source.sequence_length
    number = max(1, -(-len(rows) * size // PART_BYTES))
    each = max(1, -(-len(rows) // number))
    return [rows[start : start + each] for start in range(0, len(rows), each)]


def build(out: Path, computation: Computation, rows: range) -> Path:
    """Build a shard in a folder, which all ranks call; return the path of its shard.json, which comes last."""
    ranks, whole_hash = computation.ranks, hash_of(computation.declaration)
    parts, began = parts_of(rows, computation), time.monotonic()
    missing, said = of_first_rank(lambda: _find_missing(out, parts, whole_hash), ranks), began
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:  # the target does not wait for the disk
        for first in range(0, len(missing), ranks.world_size):
            # A rank without a part of its own computes one for nothing: a target that ranks share needs all of them.
            own = missing[min(first + ranks.rank, len(missing) - 1)]
            tensors = _compute(own, len(parts[0]), computation)
            if writing is not None:
                writing.result()  # raises what went wrong there
            if first + ranks.rank < len(missing):
                writing = pool.submit(_write, out / part_name(own), tensors, whole_hash)
            if time.monotonic() - said > PROGRESS or first + ranks.world_size >= len(missing):
                said, done = time.monotonic(), sum(map(len, missing[: first + ranks.world_size]))
                log(f"{done} rows, {done * computation.source.sequence_length / (said - began):.0f} tokens/s", ranks)
        if writing is not None:
            writing.result()
    if ranks.world_size > 1:
        dist.barrier()
    content = {"declaration": computation.declaration, "parts": [part_name(part) for part in parts]}
    of_first_rank(lambda: write_json(out / SHARD, content), ranks)
    return out / SHARD


def _find_missing(out: Path, parts: list[range], whole_hash: str) -> list[range]:
    """Return the parts that are to be computed; files of rows that are none of these, or not whole, are removed."""
    out.mkdir(parents=True, exist_ok=True)
    names = {part_name(part) for part in parts}
    remove_strays(*(out / name for name in names))
    for path in out.glob("rows-*"):
        if path.name not in names or not _is_whole(path, whole_hash):
            path.unlink()
    missing = [part for part in parts if not (out / part_name(part)).exists()]
    if missing:
        (out / SHARD).unlink(missing_ok=True)  # of other files of the same names
    log(f"{out}: {len(parts) - len(missing)} of {len(parts)} files of rows are there")
    return missing


def _is_whole(path: Path, whole_hash: str) -> bool:
    """Tell whether a file is whole and holds states of this declaration."""
    with suppress(SafetensorError), safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("declaration") == whole_hash
    return False


def _compute(part: range, size: int, computation: Computation) -> dict[str, Tensor]:
    """Compute a part's rows by as many forwards of whole micro batches as every other's, the last row again and again."""
    each = computation.runtime.micro_batch
    batches = [[min(part.start + row, part.stop - 1) for row in range(start, start + each)] for start in range(0, size, each)]
    found = [computation.of(batch) for batch in batches]
    return {name: torch.cat([tensors[name] for tensors in found])[: len(part)] for name in found[0]}


def _write(path: Path, tensors: dict[str, Tensor], whole_hash: str) -> None:
    with new_file(path) as beside:
        beside.write_bytes(save(tensors, {"declaration": whole_hash}))
