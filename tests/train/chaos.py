"""Three stages disturbed at seeded random moments, compared with the same stages undisturbed: `make chaos`.

    python -m tests.train.chaos --moments 30 --out benchmarks/results/chaos.json      (after `make demo`)

Disturbances: SIGKILL of a random rank; SIGTERM to the launcher; SIGKILL and then a random file of a random checkpoint slot
truncated; a disk that is full when a checkpoint is to be written (a small tmpfs, where one may be mounted).
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from longspec.artefact import sha256_file, write_json
from longspec.config import compose_stage
from tests.train.jobs import Job, finish, kill_rank, ranks_of, torchrun

KILL, TERMINATE, TRUNCATE, FULL_DISK = KINDS = ("SIGKILL", "SIGTERM", "truncated file", "full disk")
STAGES = ("base", "long", "longcot")
DISK_MB = 64


@dataclass
class Moment:
    """One disturbance and what came of it."""

    stage: str
    step: int  # it comes when this step is done
    kind: str
    exit_code: int = 0


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """`folder` on a file system of its own of DISK_MB, if this user may mount one; whether it is so."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], capture_output=True
    ).returncode
    try:
        yield mounted == 0
    finally:
        if mounted == 0:
            subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on the disk of `folder`; the file to remove afterwards."""
    filler = folder / "filler"
    with filler.open("wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize)
    return filler


def truncate_one(job: Job, draw: random.Random) -> None:
    """Cut a random file of one slot, never of both: a checkpoint of which nothing is whole is told, not gone on from."""
    slots = [slot for name in ("last", "last_2") if (slot := job.out / "checkpoints" / name).exists()]
    if len(slots) < 2:
        return
    files = sorted(path for path in draw.choice(slots).rglob("*") if path.is_file() and path.stat().st_size)
    victim = draw.choice(files)
    os.truncate(victim, draw.randrange(victim.stat().st_size))


def disturb(job: Job, moment: Moment, draw: random.Random) -> None:
    """Start the job, wait for the moment, and end it in that way."""
    process = job.start()
    job.wait_for(moment.step, process)
    time.sleep(draw.uniform(0, 0.3))
    filler = fill(job.out) if moment.kind == FULL_DISK else None
    if moment.kind == TERMINATE:
        process.terminate()
    elif moment.kind in (KILL, TRUNCATE) and (ranks := ranks_of(process)):
        kill_rank(process, draw.choice(sorted(ranks)))
    text, moment.exit_code = finish(process)
    if filler is not None:
        filler.unlink()
        assert moment.exit_code == 0 or "free" in text, text[-3000:]
    if moment.kind == TRUNCATE and moment.exit_code:
        truncate_one(job, draw)


def plan(stage: str, steps: int, count: int, kinds: list[str], draw: random.Random) -> list[Moment]:
    """`count` moments of a stage, in the order of their steps, each kind as often as the others."""
    chosen = [kinds[i % len(kinds)] for i in range(count)]
    draw.shuffle(chosen)
    return [Moment(stage, step, kind) for step, kind in zip(sorted(draw.sample(range(1, steps), count)), chosen, strict=True)]


def extract(job: Job) -> Path:
    """The stage's draft folder, made as the workflow makes it."""
    out = job.out / "draft"
    files = [job.out / "checkpoint.json", "--recipe", job.out / "recipe.yaml", "--target", job.target]
    subprocess.run([sys.executable, "-m", "longspec.draft", "extract", *map(str, files), "--out", str(out)], check=True)
    return out


def chain(jobs: list[Job], moments: list[Moment], seed: int) -> str:
    """Train all stages, each from the one before, through the moments of disturbance; the last draft's SHA-256."""
    draw, weights = random.Random(seed), None
    for job in jobs:
        job.init_weights = weights
        for moment in [moment for moment in moments if moment.stage == job.out.name]:
            if job.step() < moment.step:
                disturb(job, moment, draw)
                print(f"{moment.stage} step {moment.step}: {moment.kind}, exit code {moment.exit_code}", flush=True)
        if not (job.out / "checkpoint.json").exists():
            job.run()
        weights = extract(job)
    assert weights is not None
    return sha256_file(weights / "model.safetensors")


def demo_jobs(folder: Path, ranks: int) -> list[Job]:
    """The three stages of the demo, on the target and the rows that `make demo` has left."""
    jobs = []
    for stage in STAGES:
        recipe = compose_stage("demo", "sinkpi-slicing", stage).recipe
        data = recipe.data
        rows = (
            f"data/packed/{recipe.model.name}/{data.name}-{data.collation}-{data.sequence_length}-{data.overlong}/manifest.json"
        )
        base = ["run=demo", "variant=sinkpi-slicing", f"stage={stage}"]
        target = Path(f"models/{recipe.model.name}/target_manifest.json")
        jobs.append(
            Job(folder / stage, target, Path(f"data/packed/{recipe.model.name}/{rows}"), launcher=torchrun(ranks), base=base)
        )
    return jobs


def main() -> None:
    """The long version, on the demo; its result is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(".cache/chaos"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chaos.json"))
    options = parser.parse_args()
    shutil.rmtree(options.scratch, ignore_errors=True)
    began = time.perf_counter()
    expected = chain(demo_jobs(options.scratch / "whole", options.ranks), [], options.seed)
    quiet = time.perf_counter() - began
    began = time.perf_counter()
    with small_disk(options.scratch / "disturbed") as small:
        jobs = demo_jobs(options.scratch / "disturbed", options.ranks)
        kinds = list(KINDS if small else KINDS[:3])
        each = -(-options.moments // len(jobs))
        moments = []
        for number, job in enumerate(jobs):
            steps = compose_stage("demo", "sinkpi-slicing", job.out.name).recipe.steps
            moments += plan(job.out.name, steps, each, kinds, random.Random(options.seed * 100 + number))
        found = chain(jobs, moments, options.seed)
    result = {
        "moments": [asdict(moment) for moment in moments],
        "kinds": kinds,
        "ranks": options.ranks,
        "sha256_undisturbed": expected,
        "sha256_disturbed": found,
        "bit_equal": expected == found,
        "seconds_undisturbed": round(quiet, 1),
        "seconds_disturbed": round(time.perf_counter() - began, 1),
    }
    write_json(options.out, result)
    print(f"{len(moments)} moments; bit-equal: {expected == found}; {options.out}")
    sys.exit(expected != found)


if __name__ == "__main__":
    main()
