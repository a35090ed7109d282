"""Load the frozen target for a job's draft: on each rank whole, partitioned over the ranks by ZeRO-3, or split by heads. Beside
stored states, load only the parts needed; the states are read from

    FOLDER/0-of-4/shard.json                        {"declaration", "parts": names of its files of rows}; written last
    FOLDER/0-of-4/rows-000064-000127.safetensors    tensors [rows, S, ...]; it has this name once it is whole

Shapes: B rows, S tokens.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from shlex import join, quote
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.utils import logging

from longspec.atomic_files import read_json
from longspec.config import PARTITIONED, TENSOR_PARALLEL, differences
from longspec.models.attention.backends import choose
from longspec.models.target import check_splits, head_width, load_target, without_layers
from longspec.models.target_config import CONFIG
from longspec.states.declaration import decode
from longspec.states.forward import STATES_ATTENTION, TargetStates

SHARD = "shard.json"
OPEN_PARTS = 64  # number of files that stay open

Place = tuple[Path, int]  # a file of rows, and a row's index in it


def part_name(rows: range) -> str:
    """Return the name of the file that holds these rows."""
    return f"rows-{rows.start:06d}-{rows.stop - 1:06d}.safetensors"


def _made_again(part: Path) -> str:
    """Return the advice how to make a file of rows again."""
    return f"have it made again after: {join(['rm', '-f', str(part), str(part.with_name(SHARD))])}"


def _built_again(path: Path) -> str:
    """Return the advice how to build the shards of a folder again."""
    shards = f"{quote(str(path.parent.parent))}/*/{SHARD}"
    return f"after rm -f {shards} the same snakemake command, or python -m longspec.states build, builds all of them again"


def _read_shard(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return a shard's declaration and its files of rows. Raises ValueError if it is missing or of another version."""
    content = read_json(path) if path.is_file() else {}
    if {"declaration", "parts"} - content.keys():
        raise ValueError(f"{path}: holds no stored states of this version; {_built_again(path)}")
    parts = [path.with_name(name) for name in content["parts"]]
    for part in parts:
        if not part.is_file():
            raise ValueError(f"{part}: missing; {_made_again(part)}")
    return content["declaration"], parts


def find_rows(wanted: Sequence[dict[str, Any]], paths: Sequence[Path]) -> list[Place]:
    """Find the rows of these declarations, in order, in any shard with an equal declaration.

    Raises ValueError, with the fix, for what is missing.
    """
    shards, found = {path: _read_shard(path) for path in paths}, []
    for declaration in wanted:
        places: dict[int, Place] = {}
        for held, parts in shards.values():
            for part in parts if held == declaration else ():
                first, last = map(int, re.findall(r"\d+", part.stem))
                places |= {row: (part, row - first) for row in range(first, last + 1)}
        apart = [(differences(declaration, held), path) for path, (held, _) in shards.items()]
        near, path = min(apart, key=lambda each: len(each[0]))
        if near or len(places) != declaration["num_rows"]:
            other = f"other states than this job reads: {'; '.join(near)} (wanted -> stored)"
            told = other if near else f"states of which {len(places)} of {declaration['num_rows']} rows are given"
            raise ValueError(
                f"{path}: holds {told}; give all shards of this recipe, target and data, and those of the held-out rows where "
                f"runtime.held_out_every is set. Where they are of another recipe or target: {_built_again(path)}"
            )
        found += [places[row] for row in range(len(places))]
    return found


class StoredStates(TargetStates):
    """Hold a target's embedding, rotations, final norm and head; its other states are stored in files.

    config: of the whole target; attention: the draft's backend. rows: first the trained rows in order of their numbers, then
    the held-out rows from last to first, numbered -1, -2, ... from the end.
    """

    def __init__(self, path: str, config: Any, dtype: torch.dtype, attention: str, rows: Sequence[Place]) -> None:
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # else transformers reports every weight of the layers as unexpected
        super().__init__(load_target(path, without_layers(config), dtype), attention=attention)
        logging.set_verbosity(level)
        self.config, self.rows = config, rows
        self._opened = lru_cache(maxsize=OPEN_PARTS)(_open)
        self._ahead: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def prefetch(self, row_numbers: Sequence[int]) -> None:
        """Read the rows of a coming forward; another thread may do so while the forward before it runs."""
        numbers = tuple(int(number) for number in row_numbers)
        self._ahead[numbers] = self.read(numbers)

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the stored tensors of some rows, [B, S, ...] on the host."""
        rows = [self._row(*self.rows[number]) for number in numbers]
        found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        on_gpu = self.head_weight.device.type == "cuda"  # a GPU copies from pinned memory by itself
        return {name: tensor.pin_memory() for name, tensor in found.items()} if on_gpu else found

    def _row(self, part: Path, place: int) -> dict[str, Tensor]:
        file = self._opened(part)
        return {name: file.get_slice(name)[place] for name in file.keys()}  # noqa: SIM118 - no dictionary

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
        encoded = self._ahead.pop(numbers, None) or self.read(numbers)
        device, dtype = self.head_weight.device, self.head_weight.dtype
        encoded = {name: tensor.to(device, non_blocking=True) for name, tensor in encoded.items()}
        return self.inputs(input_ids_BS, position_ids_BS) | decode(encoded, dtype)


def _open(part: Path) -> Any:
    try:
        return safe_open(part, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{part}: damaged ({error}); {_made_again(part)}") from error


def check_ranks(config: Any, runtime: Any, ranks: int) -> None:
    """Raise ValueError, with the key, if a target is to be split over ranks that cannot share it."""
    if runtime.target == TENSOR_PARALLEL and ranks > 1:
        try:
            check_splits(config, ranks, f"{config.name_or_path or 'target'}/{CONFIG}")
        except ValueError as error:
            raise ValueError(f"runtime.target: {TENSOR_PARALLEL}: {error}, or set it to {PARTITIONED}") from None


def load_states(
    path: str, config: Any, runtime: Any, device: torch.device, dtype: torch.dtype, stored: Sequence[Place] | None = None
) -> TargetStates:
    """Load the target of a folder: replicated (still on the CPU), partitioned over the ranks, or split over them.

    stored: rows whose states are read instead. Raises ValueError for a target that is not supported or cannot be split so, and
    for an attention backend that cannot train here.
    """
    attention = choose(runtime.attention, device, dtype, head_width(config))
    if stored is not None:
        return StoredStates(path, config, dtype, attention, stored)
    if runtime.target == PARTITIONED:
        return _load_partitioned(path, config, dtype, attention, runtime.target_chunk)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    check_ranks(config, runtime, ranks)
    target = load_target(path, config, dtype, STATES_ATTENTION, ranks if runtime.target == TENSOR_PARALLEL else 1)
    return TargetStates(target, runtime.target_chunk, attention)


def _load_partitioned(path: str, config: Any, dtype: torch.dtype, attention: str, chunk: int | None) -> TargetStates:
    """Load a target partitioned over the ranks by ZeRO-3 while it is made and filled: no rank ever holds the whole.

    The target has its own engine without an optimizer, independent of the draft's: the draft may be trained with any ZeRO
    stage, and its checkpoints equal those with a replicated target. Every rank must call this, and later run the same sequence
    of forwards.
    """
    import deepspeed  # takes seconds, and only partitioned targets need it

    settings = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires it; no effect without an optimizer
        "bf16": {"enabled": dtype == torch.bfloat16},
        # Else ZeRO-3 replaces torch's linear in the whole process, with other bf16 rounding.
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
        "steps_per_print": 10**9,
    }
    loading = HfDeepSpeedConfig(settings)  # while it exists, transformers partitions weights as they load
    target = load_target(path, config, dtype, STATES_ATTENTION)
    del loading
    states = TargetStates(target, chunk, attention, deepspeed.zero.GatheredParameters)
    deepspeed.initialize(model=states, config=settings)
    return states
