"""Check in minutes, on an allocated node or several, what a job of days needs.

Every rank of a launcher runs it; without one it is the only rank. All checks run, whatever the others found, each on all
ranks at once; rank 0 prints what they found. With 1 it ends when a check failed.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import torch

from longspec.atomic_files import write_json
from longspec.cluster import preflight_job, preflight_node
from longspec.cluster.preflight_ranks import FAIL, NETWORK, OK, WARN, Finding, Place, UnreadableTargetError, meet
from longspec.config import ConfigError, Recipe, Runtime, load
from longspec.distributed import Ranks, end_at_once, find_ranks
from longspec.shown import one_line

Check = Callable[[Place], Finding | None]
# Run in this order on every rank; a check returns None where another rank reports its finding.
CHECKS: dict[str, Check] = {
    "ranks": preflight_node.ranks,
    "versions": preflight_node.versions,
    "gpus": preflight_node.gpus,
    "collective": preflight_node.collective,
    "attention": preflight_node.attention,
    "memory": preflight_job.memory,
    "disk": preflight_job.disk,
    "shared folder": preflight_job.shared_folder,
    "target": preflight_job.target,
    "tokenizer": preflight_job.tokenizer,
    "trackers": preflight_job.trackers,
}


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
    recipes = [load(path, Recipe) for path in options.recipe]
    runtimes = [load(path, Runtime) for path in options.runtime]
    files = {name: getattr(options, name) for name in ("target", "tokenizer", "out")}
    return Place(ranks, options.seconds, recipes, runtimes, gpus_expected=options.gpus_expected, **files)


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
    thread.join(seconds)
    if found:
        return found[0]
    return Finding(FAIL, f"no end after {seconds:.0f} s", f"see which hangs, a file system, a device or the network: {NETWORK}")


def checked_by_all(place: Place) -> dict[str, Finding]:
    """Run all checks together with the other ranks; rank 0 prints what they found, and returns it.

    A rank that tells nothing in time has failed in that check, and takes part in no other.
    """
    findings: dict[str, Finding] = {}
    for name, check in CHECKS.items():
        if place.ranks.is_main:
            place.tell(f"begin {name}", sorted(place.gone))
        begun = place.hear(f"begin {name}", [0], 4 * place.seconds)
        if 0 not in begun or place.ranks.rank in begun[0]:
            break
        place.gone = set(begun[0])
        found = limited(check, place, 1.5 * place.seconds)
        place.tell(f"found {name}", found and asdict(found))
        if place.ranks.is_main:
            told = place.hear(f"found {name}", place.facts.keys() - place.gone, 2 * place.seconds)
            silent = place.facts.keys() - place.gone - told.keys()
            place.gone |= silent
            known = {rank: Finding(**finding) for rank, finding in told.items() if finding}
            not_done = Finding(FAIL, "not done", "see this node and the rank's log")
            findings[name] = merged(place, known | dict.fromkeys(silent, not_done))
            show(name, findings[name])
    return findings


def merged(place: Place, findings: dict[int, Finding]) -> Finding:
    """The findings of all ranks as one: the worst, with the ranks that found it where not all found the same."""
    worst = max((finding.level for finding in findings.values()), key=(OK, WARN, FAIL).index)
    same: dict[Finding, list[int]] = {}
    for rank, finding in sorted(findings.items()):
        if finding.level == worst:
            same.setdefault(finding, []).append(rank)
    first = next(iter(same))
    if worst == OK or len(same[first]) == len(findings):
        return first
    found = "; ".join(f"{place.names(ranks)}: {finding.found}" for finding, ranks in same.items())
    return Finding(worst, found, "; ".join(dict.fromkeys(finding.fix for finding in same if finding.fix)))


def show(name: str, finding: Finding) -> None:
    """Print what a check found."""
    print(f"{finding.level:4s}  {name:13s}  {finding.found}")
    if finding.fix:
        print(f"{'':4s}  {'':13s}  do: {finding.fix}")
    sys.stdout.flush()


def concluded(place: Place, findings: dict[str, Finding], report: Path | None) -> int:
    """Print the last line and write the report; the exit code. Raises OSError where it cannot be written."""
    counts = {level: sum(finding.level == level for finding in findings.values()) for level in (OK, WARN, FAIL)}
    summary = f"preflight: {counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed"
    print(summary, flush=True)
    if report is not None:
        checks = [{"name": name} | asdict(finding) for name, finding in findings.items()]
        facts = {str(rank): asdict(found) for rank, found in place.facts.items()}
        told = {"summary": summary, "checks": checks, "world_size": place.ranks.world_size, "ranks": facts}
        write_json(report, told)
    return int(counts[FAIL] > 0)


def run(argv: list[str]) -> int:
    """Run this rank; the exit code. What is wrong is rank 0's to say: the others end with 0."""
    options, ranks = parser().parse_args(argv), find_ranks()
    try:
        place = place_of(options, ranks)
        meet(place)
        if 0 not in place.facts:
            raise ValueError(f"rank 0 did not come within {place.seconds:.0f} s, so nobody gathers what the ranks find")
        findings = checked_by_all(place)
        if not ranks.is_main:
            return 0
        preflight_job.remove_shown(place)
        return concluded(place, findings, options.report)
    except (*ConfigError, OSError, torch.distributed.DistError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1


def main(argv: list[str]) -> int:
    """Run this rank and end it at once: a check that hangs must not keep it."""
    end_at_once(run(argv))
