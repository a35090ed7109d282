"""Checkpoints: every rank writes what it holds of the draft's training state; any number of ranks goes on from it.

DeepSpeed's own checkpoints are not used: they belong to one number of ranks and one ZeRO stage, their `latest` file is
written before the other ranks have finished, and stage 0 leaves out the float32 weights. All ranks agree before and after
each save and load: what fails on one fails on all, with the same message.

A rank's file is safetensors. Keys are `kind|parameter|start`: `kind` of zero_state.KINDS, `start` the first element of the
flattened parameter. Each tensor is flat float32. No random state is kept: what training draws depends on seed, step and row.
"""

import hashlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.atomic_files import fsync_path
from longspec.distributed import Ranks, log, of_first_rank
from longspec.methods.draft_files import TRAINING_PREFIX
from longspec.models.weight_files import open_safetensors, telling_damage
from longspec.train.checkpoint import checkpoint_dir, zero_state

RESERVE = 2**20  # bytes left free on a disk for the manifest, the metrics and status.json
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
SEPARATOR = "|"
ALIGNMENT = 8


class SaveError(OSError):
    """Report that a checkpoint could not be written; earlier ones are whole, and nothing of it is left."""


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def shard_key(kind: str, name: str, start: int) -> str:
    """Return the key of one tensor in a rank's file."""
    return SEPARATOR.join((kind, name, str(start)))


def header(sizes: dict[str, int]) -> bytes:
    """Return the header of a safetensors file of flat float32 tensors. sizes: key -> number of elements."""
    entries, end = {}, 0
    for key, numel in sizes.items():
        entries[key] = {"dtype": "F32", "shape": [numel], "data_offsets": [end, end := end + 4 * numel]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_shard(path: Path, begin: bytes, tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Write a file from a header and its tensors, flush it to disk, and return its size and hash."""
    digest = hashlib.sha256(begin)
    with path.open("wb") as handle:
        handle.write(begin)
        for tensor in tensors:
            part = tensor.cpu().contiguous().numpy().data.cast("B")
            digest.update(part)
            handle.write(part)
        handle.flush()
        os.fsync(handle.fileno())
        return {"bytes": handle.tell(), "sha256": digest.hexdigest()}


class Shards:
    """Read tensors, or parts of them, from the files of any number of ranks."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        # (kind, parameter) -> its pieces: (first element, number of elements, slice of the file)
        self.pieces: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
        for path in (folder / name for name in sorted(names)):
            file = open_safetensors(path)
            with telling_damage(path):
                for key in file.keys():  # noqa: SIM118 - not a dictionary
                    kind, name, start = key.split(SEPARATOR)
                    piece = file.get_slice(key)
                    self.pieces.setdefault((kind, name), []).append((int(start), piece.get_shape()[0], piece))
        for pieces in self.pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def fill(self, out: Tensor, kind: str, name: str, start: int) -> None:
        """Copy `out.numel()` elements from `start` on into the flat tensor `out`. Raises ValueError if some are missing."""
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


def _together(work: Callable[[], Any], ranks: Ranks) -> list[Any]:
    """Return each rank's result, on every rank. Raises ValueError, on all ranks, with the first failing rank's error."""
    result, fault = None, ""
    try:
        result = work()
    except (OSError, ValueError) as error:
        where = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""
        fault = f"{where}{error}"
    answers: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(answers, (result, fault))
    for _, fault in answers:
        if fault:
            raise ValueError(fault)
    return [result for result, _ in answers]


def _outline(engine: Any) -> tuple[bytes, int]:
    """Return the header of this rank's file of a checkpoint, and the size of the whole file in bytes."""
    sizes = {shard_key(kind, f.name, f.start): f.numel for f in zero_state.owned(engine) for kind in zero_state.KINDS}
    begin = header(sizes)
    return begin, len(begin) + 4 * sum(sizes.values())


def check_room(engine: Any, folder: Path, saves: int, ranks: Ranks) -> int:
    """Return the bytes of a checkpoint. saves: number of coming ones. Raises ValueError, on every rank, if the disk lacks room.

    Both slots and the one being written exist at the same time.
    """
    size = sum(_together(lambda: _outline(engine)[1], ranks))

    def check() -> None:
        checkpoint_dir.remove_unfinished(folder)
        there = sum(os.path.lexists(folder / name) for name in checkpoint_dir.SLOTS)
        needed = min(3 - there, saves) * size + RESERVE
        place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        if (free := shutil.disk_usage(place).free) < needed:
            raise ValueError(
                f"{folder}: checkpoints of {size} bytes need {needed}, and {free} are free: {needed - free} are missing; make "
                "room on the disk"
            )

    of_first_rank(check, ranks)
    return size


def save(
    engine: Any, folder: Path, state: dict[str, Any], ranks: Ranks, check_owner: Callable[[], None], record: Callable[[], None]
) -> int:
    """Commit a checkpoint of all ranks to the slot `last`; the slot before it becomes `last_2`. Return its size in bytes.

    state: JSON values: step, steps, identity (recipe, data, target, initial weights), and what else the loop needs again.
    Before writing, rank 0 calls `record`, to put on disk what must be there before a checkpoint says that its steps are done.
    It calls `check_owner` before it changes the folder, and again right before the commit. Raises SaveError, the same on every
    rank, if the checkpoint cannot be written.
    """
    begin, own = _outline(engine)
    # A unique name: ranks of a job taken for dead must not write into the folder of the job that took over.
    offers = _together(lambda: (own, secrets.token_hex(4)), ranks)
    size = sum(of_rank for of_rank, _ in offers)
    beside = folder / f"{checkpoint_dir.UNFINISHED}{state['step']}-{offers[0][1]}"

    def prepare() -> None:
        check_owner()
        record()
        checkpoint_dir.remove_unfinished(folder)  # left by a killed job
        beside.mkdir(parents=True)
        needed, free = size + RESERVE, shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(f"{needed} bytes are needed and {free} are free: {needed - free} are missing")

    def write() -> dict[str, Any]:
        # Another machine may not see the folder yet.
        beside.mkdir(parents=True, exist_ok=True)
        tensors = (fragment.kinds[kind] for fragment in zero_state.owned(engine) for kind in zero_state.KINDS)
        return write_shard(beside / shard_name(ranks.rank), begin, tensors)

    def commit() -> None:
        content = state | {
            "zero_stage": engine.zero_optimization_stage(),
            "shapes": zero_state.shapes(engine),
            "optimizer_step": zero_state.optimizer_step(engine),
            "scheduler": engine.lr_scheduler.state_dict(),
            "counters": {name: getattr(engine, name) for name in COUNTERS},
            "world_size": ranks.world_size,
            "files": {shard_name(rank): entry for rank, entry in enumerate(written)},
        }
        manifest = beside / checkpoint_dir.MANIFEST
        manifest.write_text(json.dumps(checkpoint_dir.seal(content), indent=2, sort_keys=True), encoding="utf-8")
        fsync_path(manifest)
        fsync_path(beside)
        check_owner()
        checkpoint_dir.rotate(folder, beside)

    try:
        of_first_rank(prepare, ranks)
        written = _together(write, ranks)
        of_first_rank(commit, ranks)
    except (OSError, ValueError) as error:
        of_first_rank(lambda: shutil.rmtree(beside, ignore_errors=True), ranks)
        raise SaveError(
            f"{folder}: the checkpoint of step {state['step']} could not be saved: {error}; those before it are whole. Make "
            "room on the disk or under the quota, then start again"
        ) from error
    return size


def load(engine: Any, slot: Path, manifest: dict[str, Any], ranks: Ranks) -> None:
    """Restore the engine from a whole slot, as find_resumable returns it.

    The number of ranks and the ZeRO stage may differ from those that saved. Raises ValueError, the same on every rank, if the
    slot has other parameters or is damaged.
    """

    def read() -> None:
        if (own := zero_state.shapes(engine)) != manifest["shapes"]:
            differing = sorted(n for n in own.keys() | manifest["shapes"].keys() if own.get(n) != manifest["shapes"].get(n))
            raise ValueError(f"{slot}: its parameters are not this draft's: {', '.join(differing)}; train in another folder")
        shards = Shards(slot, manifest["files"])
        for fragment in zero_state.held(engine, write=True):
            for kind, tensor in fragment.kinds.items():
                shards.fill(tensor, kind, fragment.name, fragment.start)

    zero_state.before_writing(engine)
    _together(read, ranks)
    zero_state.after_writing(engine, manifest["optimizer_step"])
    for counter in COUNTERS:
        setattr(engine, counter, manifest["counters"][counter])
    engine.lr_scheduler.load_state_dict(manifest["scheduler"])
    for group, rate in zip(engine.optimizer.param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    before = (manifest["world_size"], manifest["zero_stage"])
    if before != (ranks.world_size, engine.zero_optimization_stage()):
        log(f"going on from a checkpoint of {before[0]} processes with ZeRO-{before[1]}", ranks)


def begin(engine: Any, weights: dict[str, Tensor]) -> None:
    """Give a fresh engine a draft's float32 weights, by the layer's own names; its layer was filled with rounded ones."""
    zero_state.before_writing(engine)
    for fragment in zero_state.held(engine, write=True):
        whole = weights[fragment.name.removeprefix(TRAINING_PREFIX)].flatten()
        fragment.kinds["fp32"].copy_(whole[fragment.start : fragment.start + fragment.numel])
    zero_state.after_writing(engine, 0.0)


def draft_state_dict(slot: Path) -> dict[str, Tensor]:
    """Return the draft's float32 weights from a slot of any ZeRO stage and number of ranks, names without the prefix.

    Raises ValueError that names a damaged or missing file, or a missing tensor.
    """
    manifest = checkpoint_dir.read_slot(slot)
    shards = Shards(slot, manifest["files"])
    weights = {name: torch.empty(shape, dtype=torch.float32) for name, shape in manifest["shapes"].items()}
    for name, tensor in weights.items():
        shards.fill(tensor.view(-1), "fp32", name, 0)
    return {name.removeprefix(TRAINING_PREFIX): tensor for name, tensor in weights.items()}
