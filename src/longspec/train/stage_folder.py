"""Read from a stage's folder whether a job may go on, how the last one ended, and where its checkpoint is. No torch.

    status.json: {"state": "running" | "done" | "stopped" | "failed", "step", "steps", "reason", "deterministic"}

Exit codes do not survive the launchers in between (torchrun returns 1 whatever its workers return): this file does.
"""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from shlex import join
from typing import Any

from longspec.atomic_files import read_json, remove, sha256_file, write_json
from longspec.config import differences, plain
from longspec.config.schema import DTYPES
from longspec.distributed import Ranks, log
from longspec.train.arguments import Job
from longspec.train.checkpoint.checkpoint_dir import CHECKPOINTS, MANIFEST, SLOTS, find_slot, read_manifest

STATUS, CHECKPOINT, DRAFT = "status.json", "checkpoint.json", "draft"
VERSIONS_OF = ("longspec", "torch", "transformers", "deepspeed", "numpy", "pyarrow", "tokenizers")


# A key that says where something comes from -> the identity's key with its hash.
SAME_BY_HASH = {
    "recipe.model.source": "target",
    "recipe.model.sha256": "target",
    "recipe.init": "init_weights",
    "recipe.method.vocabulary_from": "vocabulary",
    "recipe.precision": "dtype",
}
OF_PRECISION = {"dtype", "states", "replayed_states"}  # the identity's keys that follow from the machine's precision


class NonRetryableError(ValueError):
    """Report a failure that the same job would meet again: do not restart it."""


@contextmanager
def non_retryable(*, unless: bool = False) -> Iterator[None]:
    """Turn a ValueError into a NonRetryableError: wrong settings, data or weights stay wrong in the next attempt.

    unless: the stage has trained before, so its files and disk were right then, and may be right on another node or later.
    """
    try:
        yield
    except ValueError as error:
        if unless:
            raise
        raise NonRetryableError(str(error)) from error


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return how two identities differ; a different source does not count if the hash is the same."""
    same = {place for place, key in SAME_BY_HASH.items() if before.get(key) == now.get(key) is not None}
    return [line for line in differences(before, now) if line.partition(": ")[0] not in same]


def find_resumable(folder: Path, identity: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Find the slot to resume from; None to start afresh.

    If the identity (recipe, data, target, initial weights, dtype) of a finished stage has changed, its checkpoints are set
    aside, never deleted; undoing an edit brings them back. Raises ValueError if the checkpoints of an unfinished stage have
    another identity and none are to bring back: an edit must not throw away half a training. Nor does a machine that chooses
    another precision: there a finished stage stays finished.
    """
    found = find_slot(folder)
    changed = changes(found[1]["identity"], identity) if found else []
    if found and not changed:
        return found
    of_precision = "dtype" in (keys := {re.split("[.:]", line)[0] for line in changed}) and keys <= OF_PRECISION
    # If several kept folders have this identity, take the one with the most steps.
    held = [(manifest["step"], each) for each, manifest in set_aside(folder) if not changes(manifest["identity"], identity)]
    kept, told = max(held, default=(0, None))[1], ""
    if found:
        slot, manifest = found
        if kept is None and of_precision and manifest["step"] == manifest["steps"]:
            return found
        if kept is None and manifest["step"] < manifest["steps"]:
            if of_precision:
                raise ValueError(
                    f"{folder}: its checkpoints (step {manifest['step']} of {manifest['steps']}) are of another precision than "
                    f"recipe.precision chooses on this machine ({changed[0]}); go on where there is the one they were made with"
                )
            raise NonRetryableError(
                f"{folder}: its checkpoints (step {manifest['step']} of {manifest['steps']}) were made with other settings: "
                f"{'; '.join(changed)}. Undo the change to go on, or train anew after: {join(['rm', '-r', str(folder)])}"
            )
        beside = folder.with_name(f"{folder.name}.{sha256_file(folder / slot / MANIFEST)[:8]}")
        folder.rename(beside)
        told = f"; those of other settings ({'; '.join(changed)}) are kept in {beside}"
    if kept is None:
        if found:
            log(f"training anew{told}")
        return None
    remove(folder)  # holds no checkpoint now
    kept.rename(folder)
    log(f"the checkpoints of these settings, which {kept} has kept, are taken back{told}")
    return find_slot(folder)


def set_aside(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each folder next to a stage's checkpoints that keeps checkpoints of other settings, with each slot's manifest."""
    for slot in (aside / name for aside in sorted(folder.parent.glob(f"{folder.name}.*")) for name in SLOTS):
        with suppress(OSError, ValueError):  # missing or damaged
            yield slot.parent, read_manifest(slot)


def is_trained(folder: Path, recipe: dict[str, Any], begun_with: str | None = None) -> bool:
    """Tell whether a stage has been trained to its end with a recipe, which may name another place of the target.

    begun_with: the hash of the weights that it must have begun with; None: any. Without checkpoint.json, which Snakemake
    removes before a job, its last checkpoint tells; a damaged file tells nothing.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        told = folder / CHECKPOINT
        manifest = read_json(told) if told.exists() else read_manifest(folder / CHECKPOINTS / SLOTS[0])
        identity = manifest["identity"]
        same = {"target": True}  # the trainer compares its hash
        if DTYPES.get(recipe.get("precision", "")) == identity.get("dtype"):
            same |= {"dtype": identity.get("dtype")}
        differing = changes({"recipe": identity["recipe"]} | same, {"recipe": recipe} | same)
        is_done = told.exists() or manifest["step"] == manifest["steps"]
        return is_done and not differing and begun_with in (None, identity["init_weights"])
    return False


class Status:
    """Write a job's status.json, on rank 0. check_owner: ends this process if the folder now belongs to another job."""

    def __init__(self, out: Path, check_owner: Callable[[], None]) -> None:
        self.out, self.check_owner = out, check_owner
        self.step, self.steps = 0, 0  # the last step that is done, and the number of steps

    def write(self, state: str, reason: str = "", deterministic: bool = False) -> None:
        self.check_owner()
        content = {"state": state, "reason": reason, "deterministic": deterministic, "step": self.step, "steps": self.steps}
        write_json(self.out / STATUS, content)

    def fail(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        self.write("failed", reason, isinstance(error, NonRetryableError))


def non_retryable_reason(out: Path, since: float) -> str:
    """Return why a stage's job would fail again, from a status.json written after `since` (seconds since 1970); else ""."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: no reason is known
        status = read_json(out / STATUS)
        if (out / STATUS).stat().st_mtime >= since and status["state"] == "failed" and status["deterministic"]:
            return str(status["reason"])
    return ""


def git_commit() -> str:
    """Return the commit of this code, marked if there are uncommitted changes; 'unknown' outside a clone."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() or "unknown"


def trained_by() -> dict[str, Any]:
    """Return the commit and the versions of what trains here, by their names in checkpoint.json."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in VERSIONS_OF}
    return {"git_commit": git_commit(), "versions": versions}


def publish(job: Job, folder: Path, ranks: Ranks, times: dict[str, float], steps: int, check_owner: Callable[[], None]) -> None:
    """Write checkpoint.json for the last step's slot, which has just been saved. times: seconds, by their names in it."""
    slot = SLOTS[0]
    manifest = read_manifest(folder / slot)
    assert manifest["step"] == steps, f"{folder / slot} is of step {manifest['step']}"
    content = {
        "slot": f"{folder.name}/{slot}",
        "manifest_sha256": sha256_file(folder / slot / MANIFEST),
        "step": manifest["step"],
        "identity": manifest["identity"] | {"recipe": plain(job.recipe)},
        "runtime": plain(job.runtime),
        "world_size": ranks.world_size,
        "zero_stage": job.runtime.deepspeed.zero_stage,
        **times,
        "tokens_seen": manifest["tokens_seen"],
    }
    content |= {key: manifest.get(key, now) for key, now in trained_by().items()}
    check_owner()
    write_json(job.out / CHECKPOINT, content)
    log(f"done: {job.out / CHECKPOINT}")


def extract_draft(job: Job) -> None:
    """Write the finished stage's draft folder next to its checkpoint.json, with the command that a person would type.

    It runs in a separate process: making drafts is no part of training. Raises ValueError with the command's error if it fails.
    """
    options = [job.out / CHECKPOINT, "--target", job.target, "--out", job.out / DRAFT, "--data", *job.data]
    options += [] if job.vocabulary is None else ["--vocabulary", job.vocabulary]
    command = [sys.executable, "-m", "longspec.draft", "extract", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"runtime.extract_at_end: {done.stderr.strip()}; mend it, then: {join(command)}")
    log(done.stdout.strip())
