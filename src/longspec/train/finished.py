"""The end of a stage: checkpoint.json (where its last checkpoint is, of what it was trained, in which time), and its draft."""

import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from longspec.atomic_files import sha256_file, write_json
from longspec.config import plain
from longspec.distributed import Ranks, log
from longspec.train.arguments import Job
from longspec.train.checkpoint import checkpoint_dir

CHECKPOINT, DRAFT = "checkpoint.json", "draft"
VERSIONS_OF = ("longspec", "torch", "transformers", "deepspeed", "numpy", "pyarrow", "tokenizers")


def publish(job: Job, folder: Path, ranks: Ranks, times: dict[str, float], steps: int, check_owner: Callable[[], None]) -> None:
    """Write checkpoint.json for the slot of the last step, which has just been saved.

    times: seconds by their names in it; check_owner: called before it is written.
    """
    slot = checkpoint_dir.SLOTS[0]
    manifest = checkpoint_dir.read_manifest(folder / slot)
    assert manifest["step"] == steps, f"{folder / slot} is of step {manifest['step']}"
    content = {
        "slot": f"{folder.name}/{slot}",
        "manifest_sha256": sha256_file(folder / slot / checkpoint_dir.MANIFEST),
        "step": manifest["step"],
        "identity": manifest["identity"],
        "runtime": plain(job.runtime),
        "world_size": ranks.world_size,
        "zero_stage": job.runtime.deepspeed.zero_stage,
        **times,
        "tokens_seen": manifest["tokens_seen"],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONS_OF},
    }
    check_owner()
    write_json(job.out / CHECKPOINT, content)
    log(f"done: {job.out / CHECKPOINT}")


def extract_draft(job: Job) -> None:
    """Write the finished stage's draft folder beside its checkpoint.json, by the verb that a person would type.

    A process of its own: making drafts is no part of training. Raises ValueError with the verb's own words where it fails.
    """
    options = [job.out / CHECKPOINT, "--target", job.target, "--out", job.out / DRAFT, "--data", job.data]
    options += [] if job.vocabulary is None else ["--vocabulary", job.vocabulary]
    command = [sys.executable, "-m", "longspec.draft", "extract", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"runtime.extract_at_end: {done.stderr.strip()}; mend it, then: {' '.join(command)}")
    log(done.stdout.strip())
