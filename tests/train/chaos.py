"""Three stages disturbed at seeded random moments, compared with the same stages undisturbed: `make chaos-stages`.

    python -m tests.train.chaos --moments 30 --out benchmarks/results/chaos.json      (where `make demo` is done)

Disturbances: SIGKILL of a random rank; SIGTERM to the launcher; SIGKILL and then a random file of the newest or of the older
checkpoint slot truncated; a disk that is full when a checkpoint is to be written (a small tmpfs, where one may be mounted); a
limit on the size of files that one rank runs into there. Each must end the job, show in its log, and cost no more than the
steps since the newest whole slot; else this ends with an AssertionError.
"""

import argparse
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from longspec.atomic_files import sha256_file, write_json
from longspec.config import compose
from longspec.train.checkpoint import checkpoint_dir
from tests.jobs import Job, finish, kill_rank, ranks_of, start, torchrun

KILL, TERMINATE, NEWEST, OLDER, FULL_DISK, FILE_LIMIT = KINDS = (
    "SIGKILL",
    "SIGTERM",
    "newest slot truncated",
    "older slot truncated",
    "full disk",
    "file limit",
)
TRUNCATED = {NEWEST: checkpoint_dir.SLOTS[0], OLDER: checkpoint_dir.SLOTS[1]}
KILLED = r"Signal 9 \(SIGKILL\) received by PID \d+"
# How the job that it ends tells of each.
EFFECTS = {
    KILL: KILLED,
    TERMINATE: r"stopped at step \d+ of \d+: signal SIGTERM",
    NEWEST: KILLED,
    OLDER: KILLED,
    FULL_DISK: r"step \d+ could not be saved: .*(?:are missing|No space left on device)",
    FILE_LIMIT: r"step \d+ could not be saved: .*File too large",
}
STEPS = {"base": 100, "long": 36, "longcot": 40}  # of the demo's stages: a part of its own, most of the time goes into starts
DISK_MB = 64
LIMIT_BYTES = 10_000


@dataclass
class Moment:
    """One disturbance and what came of it."""

    stage: str
    step: int  # it comes when this step is done; a truncation waits for two whole slots
    kind: str
    victim: str = ""
    effect: str = ""  # in the words of the log, without folders
    resumed_at: int | None = None  # the step at which the next start went on


@contextmanager
def small_disk(folder: Path, megabytes: int = DISK_MB) -> Iterator[Path | None]:
    """The path of a file system of its own, mounted on `folder`; None where this user may mount none.

    It is mounted in a namespace for which no rights are needed, seen from outside through a process in it, and gone with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("unshare") is None:
        yield None
        return
    mount = 'mount -t tmpfs -o size="$0"m tmpfs "$1" && echo mounted && exec cat'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(megabytes), str(folder.resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        mounted = bool(keeper.stdout.readline())
        try:
            yield Path(f"/proc/{keeper.pid}/root{folder.resolve()}") if mounted else None
        finally:
            keeper.stdin.close()  # `cat` ends


def fill(folder: Path) -> Path:
    """Leave no room on the disk of `folder`; the file to remove afterwards."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as handle, suppress(OSError):
        while True:
            handle.write(bytes(2**16))
    return filler


def whole_slots(job: Job) -> dict[str, int]:
    """The job's slots of which nothing is missing, and the step of each."""
    found = {}
    for name in checkpoint_dir.SLOTS:
        with suppress(ValueError, OSError):  # damaged, or being renamed by the job
            found[name] = checkpoint_dir.read_slot(job.out / "checkpoints" / name)["step"]
    return found


def truncate_one(slot: Path, draw: random.Random) -> str:
    """Cut a random file of a slot; what was cut."""
    victim = draw.choice(sorted(path for path in slot.rglob("*") if path.is_file()))
    size = victim.stat().st_size
    left = draw.randrange(size)
    os.truncate(victim, left)
    return f"{slot.name}/{victim.name}, {left} of {size} bytes left"


@contextmanager
def strike(job: Job, process: subprocess.Popen[str], kind: str, draw: random.Random) -> Iterator[str]:
    """Do to a running job what a kind of disturbance does; the victim's name. What keeps it from saving ends with the block."""
    rank = draw.choice(sorted(ranks_of(process)))
    if kind == TERMINATE:
        process.terminate()
        yield "launcher"
    elif kind == FULL_DISK:
        filler = fill(job.out)
        yield "disk"
        filler.unlink()
    elif kind == FILE_LIMIT:
        resource.prlimit(ranks_of(process)[rank], resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
        yield f"rank {rank}"
    else:
        kill_rank(process, rank)
        yield f"rank {rank}"


def disturb(job: Job, moment: Moment, draw: random.Random) -> str:
    """Start the job, wait for the moment, and end it in that way; the log. No effect: it must come again."""
    process = job.start()
    job.wait_until(lambda: job.step() >= moment.step, process)
    if moment.kind in TRUNCATED:
        job.wait_until(lambda: len(whole_slots(job)) == 2, process)
    time.sleep(draw.random() * job.seconds())  # anywhere in the step after it, or in the save before that
    with strike(job, process, moment.kind, draw) as moment.victim:
        text, code = finish(process)
    told = re.search(EFFECTS[moment.kind], text)
    assert code != 0, f"{moment}: the job ended well:\n{text[-3000:]}"
    assert told, f"{moment}: nothing of it in the log:\n{text[-3000:]}"
    whole, newest = whole_slots(job), checkpoint_dir.SLOTS[0]
    assert newest in whole or not (job.out / "checkpoints" / newest).exists(), f"{moment}: it left a damaged slot"
    if moment.kind in TRUNCATED:
        if len(whole) < 2:  # killed while it renamed them; without any whole slot nothing goes on
            return text
        moment.victim = truncate_one(job.out / "checkpoints" / TRUNCATED[moment.kind], draw)
    moment.effect = re.sub(r"/\S*/", "", told[0])
    return text


def check_resumption(moment: Moment, newest: int, text: str) -> None:
    """The log of the next start: it goes on from the newest whole slot, and tells once of one that it cannot read."""
    damaged = re.findall(r"checkpoint slot \w+ is damaged and not used", text)
    began = re.search(r"starting at step (\d+)", text)
    assert began, text[-3000:]
    assert len(damaged) == (moment.kind == NEWEST and bool(moment.effect)), f"{moment}: {damaged}"
    assert int(began[1]) == newest, f"{moment}: step {newest} was whole, and the next start went on from {began[1]}"
    moment.effect, moment.resumed_at = damaged[0] if damaged else moment.effect, newest


def plan(steps: dict[str, int], count: int, kinds: list[str], draw: random.Random) -> list[Moment]:
    """`count` moments over stages of so many steps, in their order; each kind and each stage as often as the others."""
    chosen = [kinds[i % len(kinds)] for i in range(count)]
    draw.shuffle(chosen)
    moments = []
    for number, (stage, total) in enumerate(steps.items()):
        own = chosen[number :: len(steps)]
        # Not in the last half: a job must still have a checkpoint to write when the moment reaches it, however late that is.
        places = sorted(draw.sample(range(1, total - total // 2), len(own)))
        moments += [Moment(stage, step, kind) for step, kind in zip(places, own, strict=True)]
    return moments


def extract(job: Job) -> Path:
    """The stage's draft folder, made as the workflow makes it."""
    out = job.out / "draft"
    files = [job.out / "checkpoint.json", "--recipe", job.out / "recipe.yaml", "--target", job.target]
    command = [sys.executable, "-m", "longspec.draft", "extract", *map(str, files), "--out", str(out)]
    text, code = finish(start(command, job.out))
    assert code == 0, text
    return out


def chain(jobs: list[Job], moments: list[Moment], seed: int) -> str:
    """Train all stages, each from the one before, through the moments of disturbance; the last draft's SHA-256."""
    draw, weights = random.Random(seed), None
    for job in jobs:
        job.init_weights = weights
        before: tuple[Moment, int] | None = None
        for moment in [moment for moment in moments if moment.stage == job.out.name]:
            while not moment.effect:
                text = disturb(job, moment, draw)
                if before is not None:
                    check_resumption(*before, text)
                before = moment, max(whole_slots(job).values(), default=0)
            print(f"{moment.stage} step {moment.step}: {moment.kind} ({moment.victim}): {moment.effect}", flush=True)
        text = job.run()
        if before is not None:
            check_resumption(*before, text)
        weights = extract(job)
    assert weights is not None
    return sha256_file(weights / "model.safetensors")


def demo_jobs(folder: Path, ranks: int) -> list[Job]:
    """The three stages of the demo, on the target and rows that `make demo` has left; they are shorter, and save more often."""
    jobs, datasets = [], {}
    for stage, steps in STEPS.items():
        base = ["run=demo", "variant=sinkpi-slicing", f"stage={stage}"]
        recipe = compose("train", base).recipe
        model, data = recipe.model.name, recipe.data
        datasets[stage] = data.name
        kind = f"{data.collation}-{data.sequence_length}-{data.overlong}"
        rows = {name: Path(f"data/packed/{model}/{datasets[name]}-{kind}/manifest.json") for name in (stage, *data.replay)}
        target, packed = Path(f"models/{model}/target_manifest.json"), rows.pop(stage)
        overrides = [f"recipe.steps={steps}", "runtime.save_every=5"]
        jobs.append(Job(folder / stage, target, packed, overrides, torchrun(ranks), base, replay=rows))
    return jobs


def steps_of(jobs: list[Job]) -> dict[str, int]:
    """The optimizer steps of each stage."""
    return {job.out.name: compose("train", [*job.base, *job.overrides]).recipe.steps for job in jobs}


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
    with small_disk(options.scratch / "disturbed") as disk:
        jobs = demo_jobs(disk or options.scratch / "disturbed", options.ranks)
        kinds = [kind for kind in KINDS if disk or kind != FULL_DISK]
        moments = plan(steps_of(jobs), options.moments, kinds, random.Random(options.seed))
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
