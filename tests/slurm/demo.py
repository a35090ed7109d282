"""The whole demo on a real Slurm of this machine, disturbed or not, against a draft that was made without Slurm.

    snakemake final_draft --set-resources train:ranks=2          in one clone
    python -m tests.slurm.demo ITS_FOLDER [--disturbed]          in another one, in which nothing is built

Disturbed: jobs of two minutes, one stage's job cancelled, a node drained and without power, the controller killed and resumed.
The result is kept in benchmarks/results.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from longspec.atomic_files import sha256_file, write_json
from tests.slurm.cluster import Cluster, until
from tests.slurm.submitted import CLUSTER, state_of

VARIANT = "results/demo/sinkpi-slicing"
DRAFT = f"{VARIANT}/final_draft/model.safetensors"
WANTED = [*CLUSTER, "final_draft"]
PROFILE = Path("tests/slurm/profile/profile.yaml")
SHORT = Path("two-minutes")  # the same with a shorter time limit
HOUR = 3600.0


def attempts(stage: str) -> list[Path]:
    """The logs of a stage's attempts."""
    return sorted(Path(f"logs/train/demo/sinkpi-slicing/{stage}").glob("attempt-*.log"))


def job_of(path: Path) -> str:
    return path.stem.split("-job-")[1]


def in_training(stage: str, steps: int) -> str:
    """The Slurm job of a stage's attempt that runs, once it has done some steps."""

    def trains() -> bool:
        logs = attempts(stage)
        return bool(logs) and logs[-1].read_text().count(" tokens/s\n") >= steps and state_of(job_of(logs[-1])) == "RUNNING"

    until(trains, HOUR, f"{stage} trains")
    return job_of(attempts(stage)[-1])


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    with Path("output.log").open("a") as output:
        return subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output, start_new_session=True)


def disturb(cluster: Cluster, controller: "subprocess.Popen[bytes]", told: Callable[[str], None]) -> "subprocess.Popen[bytes]":
    """All that happens to the run; the Snakemake that ends it."""
    job = in_training("base", random.randint(5, 60))
    subprocess.run(["scancel", job], check=True)
    told(f"job {job} of stage base cancelled")

    job = in_training("long", random.randint(2, 10))
    node = subprocess.run(["squeue", "-h", "-j", job, "-o", "%N"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=drain", "reason=test"], check=True)
    time.sleep(2)
    cluster.power_off(node)
    told(f"{node} drained and without power, job {job} of stage long on it")
    in_training("long", 1)
    cluster.power_on(node)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=True)

    job = in_training("longcot", random.randint(2, 20))
    os.killpg(controller.pid, signal.SIGKILL)
    controller.wait()
    told(f"the controlling Snakemake killed, job {job} of stage longcot lives on")
    time.sleep(5)
    return start(["longspec.cluster", "resume", "--", *WANTED])


def main() -> int:
    """Run it, compare, and write down how it went."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("reference", type=Path)
    parser.add_argument("--disturbed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    began, events = time.time(), []

    def told(event: str) -> None:
        events.append({"after_seconds": round(time.time() - began), "event": event})
        print(events[-1], flush=True)

    if options.disturbed:
        short = re.sub(r"^    runtime: 60$", "    runtime: 2", PROFILE.read_text(), flags=re.MULTILINE)
        SHORT.mkdir()
        (SHORT / PROFILE.name).write_text(short)
        WANTED[WANTED.index(str(PROFILE.parent))] = str(SHORT)
    controller = None
    with Cluster() as cluster:
        try:
            controller = start(["snakemake", *WANTED])
            controller = disturb(cluster, controller, told) if options.disturbed else controller
            code = controller.wait(HOUR)
        finally:
            if controller is not None and controller.poll() is None:
                os.killpg(controller.pid, signal.SIGKILL)
        stages = {
            stage: [state_of(job_of(path)) or "forgotten" for path in attempts(stage)] for stage in ("base", "long", "longcot")
        }
    assert code == 0, Path("output.log").read_text()[-6000:]
    ended = Counter(path.read_text().rstrip().splitlines()[-1].split(": ")[-1] for s in stages for path in attempts(s))
    equal = sha256_file(Path(DRAFT)) == sha256_file(options.reference / DRAFT)
    numbers = {"seconds": round(time.time() - began), "disturbed": options.disturbed, "events": events}
    numbers |= {"slurm_states_of_attempts": stages, "stopped_at_their_deadline": ended["deadline"], "bit_equal": equal}
    write_json(Path(f"benchmarks/results/slurm_demo{'_disturbed' if options.disturbed else ''}.json"), numbers)
    print(json.dumps(numbers, indent=2))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
