"""A whole run disturbed at seeded random moments, compared with the same run undisturbed: `make chaos MOMENTS=300`.

A round begins with nothing and goes to the run's end through several moments. At each, some jobs have been let pass, and one is
in the midst of its work; then a disturbance (KINDS) comes, Snakemake ends, and is called again as before. What its messages
advise is done: unlocking, removing a file that is refused by name. A damaged file is remade, refused, or not read any more. In
the end all files are those of the undisturbed run (same_files.py); else this ends with an error, and the round's folder stays.

Each moment is a line of the result, written when its round has ended, and a round has a line too.
"""

import argparse
import json
import random
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longspec.atomic_files import remove
from tests.workflow.calls import Call, Place
from tests.workflow.same_files import differing, kept_files
from tests.workflow.small_run import INPUT, RUN, small_run

STRIKES = (
    "SIGKILL to a process",
    "SIGKILL to a job",
    "SIGKILL to everything",
    "SIGKILL to Snakemake",
    "SIGTERM to Snakemake",
    "SIGTERM to the group",
    "SIGINT to the group",
    "vanished rank",
)
CUT, FLIPPED = DAMAGES = ("cut", "flipped bit")
CHANGES = {
    "changed input": (INPUT, r"\A", '{"text": "a line more"}\n'),
    "changed recipe": ("config/run/{run}.yaml", "1.0e-2", "2.0e-2"),
}
KINDS = (*STRIKES, *DAMAGES, *DAMAGES, *CHANGES)  # damages twice, since there are more files than signals
GROUPS = ("data/raw", "data/tokens", "data/packed", "data/states", "models", "results/*/*/*/checkpoints", "results/*/*/*/draft")
GROUPS += ("results/*/*/final_draft",)
# What jobs tell one another, lines of a job that is not done, and manifests: they prove all other files, and not themselves.
NOT_DERIVED = re.compile(
    r"/(\.lock|lease\.json|status\.json|\..*\.tmp|checkpoints/metrics\.jsonl|.*(unfinished|measured)\.jsonl|provenance\.json)$"
    r"|^data/.*\.json$|^models/[^/]+/[^/]+$"
)
MOST = 40  # calls of a round
SEED, IN_A_ROUND = 0, 8  # at most so many moments before a run is let end
SCRATCH, OUT = Path(".cache/chaos-graph"), Path("benchmarks/results/chaos_graph.jsonl")
PASSED = (0, 1, 2, 3, 5, 8)  # jobs before a moment: eight moments go through most of the run's thirty


class DisturbedError(AssertionError):
    """Something that must not be: another result, a file refused without its name, a run that does not go on."""


@dataclass
class Moment:
    """One disturbance and what came of it."""

    round: int
    kind: str
    passed: int  # jobs that are let pass in the call
    share: float  # of the time that the next job takes, after which it comes
    job: str = ""  # the one that it came in
    victim: str = ""
    outcome: str = ""
    seconds: float = 0.0


@dataclass
class Round:
    """A run on its way through its moments."""

    place: Place
    draw: random.Random
    times: dict[str, float]
    number: int
    moments: list[Moment] = field(default_factory=list)
    damaged: dict[str, tuple[Moment, bytes]] = field(default_factory=dict)

    def run(self, most: int) -> None:
        """Call Snakemake until it has ended well, with at most so many disturbances."""
        for _ in range(MOST):
            if self.disturbed_call() if len(self.moments) < most else self.has_ended(self.place.call()):
                return
        raise DisturbedError(f"round {self.number}: not at its end after {MOST} calls")

    def disturbed_call(self) -> bool:
        """One call with a disturbance; whether the run came to its end before that."""
        began = time.monotonic()
        moment = Moment(self.number, self.draw.choice(KINDS), self.draw.choice(PASSED), round(self.draw.random(), 3))
        call = self.place.call()
        moment.job = call.wait_for(moment.passed, moment.share, self.times, ranks=moment.kind == "vanished rank")
        if not moment.job:
            return self.has_ended(call)
        moment.victim = call.strike(moment.kind if moment.kind in STRIKES else "SIGINT to the group", self.draw)
        call.finish()
        if call.code and moment.kind in CHANGES:
            self.changed_call(moment)
        elif moment.kind in DAMAGES:
            self.damage(moment)
        moment.seconds = round(time.monotonic() - began, 1)
        self.moments.append(moment)
        print(asdict(moment), file=sys.stderr, flush=True)
        self.after(call, moment)
        return False

    def after(self, call: Call, moment: Moment) -> None:
        """What the struck call told is heeded where it tells of a damaged file; all else is the disturbance's."""
        for name in list(self.damaged):
            if name in call.refused() and self.damaged[name][0] is not moment:
                self.follow(call)
                return

    def damage(self, moment: Moment) -> None:
        """Cut a file that is there, or flip a bit in it."""
        there = {group: self.files_of(group) for group in GROUPS}
        group = self.draw.choice([group for group, files in there.items() if files] or [""])
        if not group:
            moment.victim = moment.outcome = "no file was there yet"
            return
        path = self.draw.choice(there[group])
        content = bytearray(path.read_bytes())
        at = self.draw.randrange(len(content))
        if moment.kind == CUT:
            del content[at:]
        else:
            content[at] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content)
        name = path.relative_to(self.place.folder).as_posix()
        moment.victim = f"{name} at byte {at}"
        self.damaged[name] = moment, bytes(content)

    def files_of(self, group: str) -> list[Path]:
        """Files of a group that hold something."""
        levels = "*" if group.endswith("*") else "**/*"
        found = [path for folder in self.place.folder.glob(group) for path in folder.glob(levels)]
        names = {
            path: path.relative_to(self.place.folder).as_posix() for path in found if path.is_file() and path.stat().st_size
        }
        return sorted(path for path, name in names.items() if not NOT_DERIVED.search(name) and name not in self.damaged)

    def changed_call(self, moment: Moment) -> None:
        """Change what a user may change, see that the plan has it, call, and take the change back."""
        name, pattern, new = CHANGES[moment.kind]
        path = self.place.folder / (name := name.format(run=self.place.run))
        before = path.read_text()
        path.write_text(re.sub(pattern, new, before, count=1))
        moment.victim = name
        planned = self.place.output("-n")
        if "Nothing to be done" in planned:
            raise DisturbedError(f"round {self.number}: nothing is done again after a change of {name}")
        call = self.place.call()
        call.wait_for(self.draw.choice((1, 2, 3, 4)), self.draw.random(), self.times)
        call.strike("SIGINT to the group", self.draw)
        call.finish()
        moment.outcome = call.refused().replace("\n", "; ") or (
            "done again" if call.code == 0 else "stopped while it was done again"
        )
        path.write_text(before)

    def has_ended(self, call: Call) -> bool:
        """Whether a call that nobody struck came to the run's end; else its advice is followed."""
        call.finish()
        if call.code:
            self.follow(call)
        return call.code == 0

    def follow(self, call: Call) -> None:
        """Do what the messages of a call that failed advise. Raises DisturbedError where they advise nothing known."""
        text, told, followed = call.text(), call.refused(), False
        if "--unlock" in text and "LockException" in text:
            self.place.output("--unlock")
            return
        if "another job is writing here" in told:
            self.place.wait_for_orphans()
            return
        if "start the same command again" in text:
            return  # the next call does; one that is told so for ever comes to MOST
        for advised in re.findall(r"\brm (?:-r )?([^;)\n]+)", told):
            for path in filter(Path.exists, (self.place.folder / word for word in shlex.split(advised))):
                remove(path)
                followed = True
        for name, (moment, _) in self.damaged.items():
            if name in told:
                moment.outcome = f"refused: {told[:300]}"
                if not followed:
                    (self.place.folder / name).unlink(missing_ok=True)
                    followed = True
        if self.moments and not followed:
            raise DisturbedError(f"round {self.number}: the same call does not go on, and advises nothing:\n{text[-6000:]}")
        if not followed:
            raise DisturbedError(f"round {self.number}: the run fails without a disturbance:\n{text[-6000:]}")

    def check(self, expected: dict[str, str]) -> None:
        """Hold the run's files against the undisturbed ones, and say what became of each damaged file."""
        left = {}
        for name, (moment, content) in self.damaged.items():
            path = self.place.folder / name
            if path.is_file() and path.read_bytes() == content:
                left[name] = moment
                moment.outcome = moment.outcome or "not read any more"
            elif not moment.outcome:
                moment.outcome = "remade" if path.is_file() else "removed, since it is needed no more"
        other = [name for name in differing(expected, kept_files(self.place.folder)) if name not in left]
        if other:
            raise DisturbedError(f"round {self.number}: not as undisturbed: {', '.join(other)}")


@contextmanager
def place_for(folder: Path, root: Path) -> Iterator[Place]:
    """A copy of the workflow with the small run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    small_run(folder, root)
    place = Place(folder.resolve(), RUN)
    with place.warmed(root):
        yield place


def undisturbed(place: Place) -> tuple[dict[str, str], dict[str, float]]:
    """The files of a run that nobody disturbs, and the seconds that its jobs take."""
    call = place.call()
    times = call.watch()
    if call.code:
        raise DisturbedError(f"the run fails without a disturbance:\n{call.text()[-6000:]}")
    return kept_files(place.folder), times


def main() -> None:
    """Disturb rounds until there were so many moments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=300)
    wanted, root = parser.parse_args().moments, Path(__file__).parents[2]
    with place_for(SCRATCH / "undisturbed", root) as place:
        expected, times = undisturbed(place)
    lines: list[dict[str, Any]] = [{"seed": SEED, "in_a_round": IN_A_ROUND}]
    moments: list[Moment] = []
    while len(moments) < wanted:
        number = len(lines) - len(moments) - 1
        with place_for(SCRATCH / f"round-{number}", root) as place:
            current = Round(place, random.Random(f"{SEED} {number}"), times, number)
            try:
                current.run(min(IN_A_ROUND, wanted - len(moments)))
                current.check(expected)
            except AssertionError:
                shutil.copytree(place.folder, SCRATCH / f"failed-{number}", symlinks=True)
                raise
        moments += current.moments
        lines += [*map(asdict, current.moments), {"round": number, "end": "as undisturbed"}]
        OUT.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = Counter((moment.kind, moment.outcome.partition(":")[0]) for moment in moments)
    print("\n".join(f"{kind}: {outcome or 'goes on'}: {count}" for (kind, outcome), count in sorted(outcomes.items())))


if __name__ == "__main__":
    main()
