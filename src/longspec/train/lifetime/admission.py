"""May this job go on? Whatever in a stage's folder speaks against it is judged here. No torch: rules and reports ask too.

checkpoints of another recipe, data, target, initial weights or dtype       refuse_changed, find_resumable
status.json, in which a job failed for a reason that stays                  non_retryable_reason
"""

from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, sha256_file
from longspec.config import differences
from longspec.distributed import log
from longspec.train.checkpoint.checkpoint_dir import MANIFEST, SLOTS, find_slot, read_manifest
from longspec.train.names import STATUS


class NonRetryableError(ValueError):
    """A failure that the same job would run into again: starting it anew is of no use."""


def refuse_changed(folder: Path, identity: dict[str, Any]) -> None:
    """Raise find_resumable's ValueError from the newest readable manifest alone, before anything is loaded or hashed."""
    for name in SLOTS:
        try:
            manifest = read_manifest(folder / name)
        except (OSError, ValueError):  # damaged, which find_slot names, or rotated away at this moment
            continue
        if changed := differences(manifest["identity"], identity):
            _refuse_unfinished(folder, manifest, changed)
        return


def _refuse_unfinished(folder: Path, manifest: dict[str, Any], changed: list[str]) -> None:
    if manifest["step"] < manifest["steps"]:
        raise ValueError(
            f"{folder}: its checkpoints (step {manifest['step']} of {manifest['steps']}) were made with other settings: "
            f"{'; '.join(changed)}. Undo the change to go on, or train anew after: rm -r {folder}"
        )


def find_resumable(folder: Path, identity: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The slot to go on from, None to start afresh.

    Checkpoints of a finished stage with another identity (recipe, data, target, initial weights, dtype) are set aside, none
    is deleted. Raises ValueError for those of an unfinished one: half a training is not thrown away by an edit.
    """
    found = find_slot(folder)
    changed = differences(found[1]["identity"], identity) if found else []
    if not found or not changed:
        return found
    _refuse_unfinished(folder, found[1], changed)
    aside = folder.with_name(f"{folder.name}.{sha256_file(folder / found[0] / MANIFEST)[:8]}")
    folder.rename(aside)
    log(f"training anew, since {'; '.join(changed)}; the finished stage's checkpoints are kept in {aside}")
    return None


def non_retryable_reason(out: Path, since: float) -> str:
    """Why a stage's job would fail in the same way again, by what it wrote after `since` (seconds since 1970); else empty."""
    try:
        status = read_json(out / STATUS)
        if (out / STATUS).stat().st_mtime >= since and status["state"] == "failed" and status["deterministic"]:
            return str(status["reason"])
    except (OSError, ValueError, KeyError, TypeError):  # no file yet, or a damaged one: no reason is known
        pass
    return ""
