"""Check within a minute, on an allocated node or several, what a job of days needs.

Every rank of a launcher runs it; without one it is the only rank. All checks run, whatever the others found, each on all
ranks at once; rank 0 prints what they found. With 1 it ends when a check failed.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import torch

from longspec.atomic_files import write_json
from longspec.cluster import preflight_job, preflight_node
from longspec.cluster.preflight_ranks import FAIL, NETWORK, OK, WARN, Finding, Place, UnreadableTargetError, meet, open_store
from longspec.config import ConfigError, Recipe, Runtime, load
from longspec.distributed import Ranks, end_at_once, find_ranks
from longspec.shown import one_line

WHOLE = 5  # times the limit of one check is the limit of all
Check = Callable[[Place], Finding | None]
# Run in this order on every rank; a check returns None where another rank reports its finding.
CHECKS: dict[str, Check] = {
    "ranks": preflight_node.ranks,
    "versions": preflight_node.versions,
    "clock": preflight_node.clock,
    "limits": preflight_node.limits,
    "gpus": preflight_node.gpus,
    "optimizer": preflight_node.optimizer,
    "collective": preflight_node.collective,
    "attention": preflight_node.attention,
    "loss": preflight_node.loss,
    "memory": preflight_job.memory,
    "disk": preflight_job.disk,
    "shared folder": preflight_job.shared_folder,
    "target": preflight_job.target,
    "tokenizer": preflight_job.tokenizer,
    "trackers": preflight_job.trackers,
}


class Told(BaseException):
    """SIGTERM: a launcher ends all ranks when one is gone, Slurm a job whose time is over."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster preflight", description=__doc__)
    parser.add_argument("--recipe", type=Path, nargs="+", required=True, help="recipe.yaml of each stage")
    parser.add_argument("--runtime", type=Path, nargs="+", required=True, help="runtime.yaml of each stage")
    parser.add_argument("--target", type=Path, required=True, help="target_manifest.json")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer_manifest.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder below which the stages will write")
    parser.add_argument("--gpus-expected", type=int, default=0, help="GPUs of each node")
    parser.add_argument("--report", type=Path, help="the findings as JSON")
    parser.add_argument("--seconds", type=float, default=60, help="the longest wait for other ranks, and for one check")
    return parser


def place_of(options: argparse.Namespace, ranks: Ranks) -> Place:
    """This rank's place. Raises ValueError for stages that cannot be read."""
    if len(options.recipe) != len(options.runtime):
        raise ValueError(f"{len(options.recipe)} --recipe, but {len(options.runtime)} --runtime: give both for each stage")
    return Place(
        ranks=ranks,
        store=None,
        seconds=options.seconds,
        recipes=[load(path, Recipe) for path in options.recipe],
        runtimes=[load(path, Runtime) for path in options.runtime],
        target=options.target,
        tokenizer=options.tokenizer,
        out=options.out,
        gpus_expected=options.gpus_expected,
    )


def limited(check: Check, place: Place, seconds: float) -> Finding | None:
    """Run a check; an exception in it, or no end in time, is a finding too. A thread that hangs is left behind."""
    found: list[Finding | None] = []

    def run() -> None:
        try:
            if torch.cuda.is_available() and place.ranks.local_rank < torch.cuda.device_count():
                torch.cuda.set_device(place.device)  # of this thread
            found.append(check(place))
        except UnreadableTargetError as error:
            found.append(Finding(WARN, str(error)))
        except Exception as error:
            found.append(Finding(FAIL, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if found:
        return found[0]
    return Finding(FAIL, f"no end after {seconds:.0f} s", f"see which hangs, a file system, a device or the network: {NETWORK}")


def checked(place: Place, name: str, until: float) -> None:
    """Run a check, and tell rank 0 what it found here."""
    finding = limited(CHECKS[name], place, min(1.5 * place.seconds, until - time.monotonic()))
    place.tell(f"found {name}", finding and asdict(finding))


def gathered(place: Place, name: str, seconds: float) -> Finding:
    """Rank 0: what all ranks have found in a check. One that tells nothing in time has failed, and takes part in no other."""
    told = place.hear(f"found {name}", place.facts.keys() - place.gone, seconds)
    findings = {rank: Finding(**finding) for rank, finding in told.items() if finding}
    silent = place.facts.keys() - place.gone - told.keys()
    place.gone |= silent
    return merged(place, findings | dict.fromkeys(silent, Finding(FAIL, "not done", "see this node and the rank's log")))


def merged(place: Place, findings: dict[int, Finding]) -> Finding:
    """The findings of all ranks as one: the worst, with the ranks that found it where not all found the same."""
    levels = [finding.level for finding in findings.values()]
    worst = FAIL if FAIL in levels else WARN if WARN in levels else OK
    same: dict[Finding, list[int]] = {}
    for rank, finding in sorted(findings.items()):
        if finding.level == worst:
            same.setdefault(finding, []).append(rank)
    first = next(iter(same))
    if worst == OK or len(same[first]) == len(findings):
        return first
    found = "; ".join(f"{place.names(ranks)}: {finding.found}" for finding, ranks in same.items())
    return Finding(worst, found, "; ".join(dict.fromkeys(finding.fix for finding in same if finding.fix)))


def summary(findings: dict[str, Finding]) -> str:
    """The last line."""
    counts = {level: sum(finding.level == level for finding in findings.values()) for level in (OK, WARN, FAIL)}
    return f"preflight: {counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed"


def show(name: str, finding: Finding) -> None:
    """Print what a check found."""
    print(f"{finding.level:4s}  {name:13s}  {finding.found}")
    if finding.fix:
        print(f"{'':4s}  {'':13s}  do: {finding.fix}")
    sys.stdout.flush()


def checked_by_all(place: Place, until: float) -> dict[str, Finding]:
    """Rank 0: run all checks together with the other ranks, and print what is found; SIGTERM ends them early."""

    def told(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm and the launcher may both send it
        raise Told

    signal.signal(signal.SIGTERM, told)
    findings: dict[str, Finding] = {}
    name = next(iter(CHECKS))
    try:
        for name in CHECKS:
            place.tell(f"begin {name}", sorted(place.gone))
            checked(place, name, until)
            findings[name] = gathered(place, name, max(place.seconds / 4, min(2 * place.seconds, until - time.monotonic())))
            show(name, findings[name])
    except Told:
        # Ranks may have crashed in this check, or wait in it for one that has.
        if not place.hear(f"found {name}", [0], 0):
            place.tell(f"found {name}", asdict(Finding(FAIL, "told to stop in it")))
        findings[name] = gathered(place, name, 0)
        fix = "see the log for a rank that crashed, and whether the job's time was over"
        findings["end"] = Finding(FAIL, f"told to stop (SIGTERM) in the check of {name}", fix)
        show(name, findings[name])
        show("end", findings["end"])
    return findings


def lead(place: Place, report: Path | None, until: float) -> int:
    """Rank 0: check, print, write the report; the exit code."""
    meet(place)
    facts = {str(rank): asdict(found) for rank, found in place.facts.items()}
    try:
        findings = checked_by_all(place, until)
    finally:
        preflight_job.remove_shown(place)
    if report is not None:
        checks = [{"name": name} | asdict(finding) for name, finding in findings.items()]
        told = {"summary": summary(findings), "checks": checks, "world_size": place.ranks.world_size, "ranks": facts}
        try:
            write_json(report, told)
        except OSError as error:
            findings["report"] = Finding(FAIL, f"{report}: {error}", "give --report a folder that can be written")
            show("report", findings["report"])
    print(summary(findings), flush=True)
    return int(any(finding.level == FAIL for finding in findings.values()))


def follow(place: Place, until: float) -> int:
    """Another rank: each check together with rank 0, which prints. Ends with 0, since what is wrong is rank 0's to say."""
    meet(place)
    if 0 not in place.facts:
        raise ValueError(f"rank 0 did not come within {place.seconds:.0f} s, so nobody gathers what the ranks find")
    for name in CHECKS:
        begun = place.hear(f"begin {name}", [0], 4 * place.seconds)
        if 0 not in begun or place.ranks.rank in begun[0]:
            break  # rank 0 is gone, or counts this one as gone
        place.gone = set(begun[0])
        checked(place, name, until)
    return 0


def run(argv: list[str]) -> int:
    """Run this rank; the exit code."""
    options = parser().parse_args(argv)
    ranks, until = find_ranks(), time.monotonic() + WHOLE * options.seconds
    try:
        place = place_of(options, ranks)
        place.store = open_store(ranks, options.seconds)
        return lead(place, options.report, until) if ranks.is_main else follow(place, until)
    except (*ConfigError, torch.distributed.DistError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1


def main(argv: list[str]) -> int:
    """Run this rank and end it at once: a check that hangs must not keep it."""
    end_at_once(run(argv))
