"""Keep two rotating slots, `last` and `last_2`: a slot is complete or does not exist.

A checkpoint is written to a folder next to them; one rename commits it, and only the folder's name says which slot is the
newest. No torch: what reads a slot's manifest needs none.
"""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shlex import join
from typing import Any

from longspec.atomic_files import check_files, fsync_path, read_json, remove, sha256_json
from longspec.distributed import log

CHECKPOINTS = "checkpoints"  # name of the slots' folder inside a stage's
SLOTS = ("last", "last_2")
MANIFEST, SEAL = "manifest.json", "sha256"
UNFINISHED, REPLACED = ".saving-", ".saving-old"


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints that a killed job left."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        remove(leftover)


def rotate(folder: Path, beside: Path) -> None:
    """Make a finished folder the slot `last`; at every moment one of the two slots is whole."""
    last, last_2 = (folder / name for name in SLOTS)
    if last.is_dir():
        if os.path.lexists(last_2):
            last_2.rename(folder / REPLACED)
        last.rename(last_2)
    beside.rename(last)
    fsync_path(folder)
    with suppress(OSError):  # the checkpoint is committed; the next save tries again
        remove(folder / REPLACED)


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with a hash of its content added."""
    return content | {SEAL: sha256_json(content)}


def read_manifest(slot: Path) -> dict[str, Any]:
    """Return the manifest of a slot without reading its files. Raises ValueError if it is missing or damaged."""
    manifest = read_json(slot / MANIFEST)
    if seal({k: v for k, v in manifest.items() if k != SEAL}) != manifest:
        raise ValueError(f"{slot / MANIFEST}: differs from its own hash; corrupt or edited")
    return manifest


def read_slot(slot: Path) -> dict[str, Any]:
    """Return the manifest of a slot whose files all match it. Raises ValueError that names a file that does not."""
    manifest = read_manifest(slot)
    with ThreadPoolExecutor() as pool:  # hashing a large model's state on one core would delay every start
        for _ in pool.map(lambda item: check_files(slot, dict([item])), manifest["files"].items()):
            pass
    return manifest


def find_slot(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the newest whole slot and its manifest, None if there is no slot; newer damaged slots are renamed.

    Raises ValueError if slots exist but none is whole: otherwise training would silently start afresh.
    """
    damaged: dict[str, str] = {}
    for name in SLOTS:
        if not os.path.lexists(folder / name):  # a dangling link is a damaged slot
            continue
        try:
            manifest = read_slot(folder / name)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise  # it may pass, where a part of a disk is lost for good
            log(f"WARNING checkpoint slot {name} is damaged and not used: {error}")
            damaged[name] = str(error)
            continue
        for other in damaged:  # else the next save would replace this slot by a damaged one
            remove(folder / f"damaged_{other}")
            (folder / other).rename(folder / f"damaged_{other}")
        return name, manifest
    if damaged:
        raise ValueError(
            f"{folder}: every checkpoint slot is damaged ({'; '.join(damaged.values())}). To train this stage from its start: "
            f"{join(['rm', '-r', str(folder)])}"
        )
    return None
