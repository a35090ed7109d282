"""`python -m longspec.cluster preflight`: check within a minute, on an allocated node or several, what a job of days needs.

Every rank of a launcher runs it; without one it is the only rank. All checks run, whatever the others found; rank 0 prints
the table. With 1 it ends when a check failed.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longspec.atomic_files import write_json
from longspec.cluster import preflight_compute, preflight_job, preflight_node
from longspec.cluster.preflight_ranks import FAIL, OK, WARN, Facts, Finding, Place, UnreadableTargetError, meet, open_store
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
    "optimizer": preflight_compute.optimizer,
    "collective": preflight_node.collective,
    "bf16": preflight_compute.bf16,
    "attention": preflight_compute.attention_of,
    "loss": preflight_compute.loss,
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
    return found[0] if found else Finding(FAIL, f"no end after {seconds:.0f} s", "see whether a file system or a device hangs")


def run_checks(place: Place, until: float, checks: dict[str, Check]) -> None:
    """Run all checks, and show rank 0 after each what was found so far. Raises Told, with the others shown as not done."""
    found: dict[str, Any] = {}
    name = next(iter(checks))
    try:
        for name, check in checks.items():
            place.tell("findings", found | {name: asdict(Finding(FAIL, "not done", "see this node and the rank's log"))})
            finding = limited(check, place, min(1.5 * place.seconds, until - time.monotonic()))
            if finding is not None:
                found[name] = asdict(finding)
    except Told:
        # The check that was stopped counts as failed: other ranks may have crashed in it, or wait for this one.
        later = dict.fromkeys(list(checks)[list(checks).index(name) + 1 :], asdict(Finding(WARN, "told to stop before it")))
        place.tell("findings", {name: asdict(Finding(FAIL, "told to stop in it"))} | later | found)
        raise
    place.tell("findings", found)
    place.tell("done", True)


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


def collect(place: Place, seconds: float) -> dict[str, Finding]:
    """All ranks' findings, check by check; what a rank has not done in time is a finding too."""
    place.hear("done", place.facts, seconds)
    told = place.hear("findings", place.facts, 0)
    of_ranks = {rank: {name: Finding(**finding) for name, finding in found.items()} for rank, found in told.items()}
    found = {}
    for name in CHECKS:
        findings = {rank: by_name[name] for rank, by_name in of_ranks.items() if name in by_name}
        if findings:
            found[name] = merged(place, findings)
    return found


def summary(findings: dict[str, Finding]) -> str:
    """The last line."""
    counts = {level: sum(finding.level == level for finding in findings.values()) for level in (OK, WARN, FAIL)}
    return f"preflight: {counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed"


def show(findings: dict[str, Finding]) -> None:
    """Print the table: for a terminal, or as plain lines."""
    if sys.stdout.isatty():
        table, colours = Table(box=None, header_style="bold"), {OK: "green", WARN: "yellow", FAIL: "bold red"}
        for column in ("check", "", "found"):
            table.add_column(column)
        for name, finding in findings.items():
            fix = f"\n[bold]do:[/bold] {escape(finding.fix)}" if finding.fix else ""
            level = f"[{colours[finding.level]}]{finding.level}"
            table.add_row(name, level, escape(finding.found) + fix)
        Console().print(table)
    else:
        for name, finding in findings.items():
            print(f"{finding.level:4s}  {name:13s}  {finding.found}")
            if finding.fix:
                print(f"{'':4s}  {'':13s}  do: {finding.fix}")
    print(summary(findings), flush=True)


def report_of(place: Place, findings: dict[str, Finding]) -> dict[str, Any]:
    """The report's content."""
    checks = [{"name": name} | asdict(finding) for name, finding in findings.items()]
    facts = {str(rank): asdict(facts) for rank, facts in place.facts.items()}
    return {"summary": summary(findings), "checks": checks, "world_size": place.ranks.world_size, "ranks": facts}


def lead(place: Place, report: Path | None, until: float) -> int:
    """Rank 0: check, gather, print; the exit code."""

    def told(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm and the launcher may both send it
        raise Told

    signal.signal(signal.SIGTERM, told)
    ended: dict[str, Finding] = {}
    try:
        meet(place)
        run_checks(place, until, CHECKS)
        findings = collect(place, min(place.seconds, max(0.0, until - time.monotonic())))
    except Told:
        place.facts = place.facts or {0: Facts("this node", time.time(), {}, 0)}
        findings = collect(place, 0)
        fix = "see the log for a rank that crashed, and whether the job's time was over"
        ended["end"] = Finding(FAIL, "told to stop (SIGTERM) before all checks were done", fix)
    findings |= ended
    if report is not None:
        try:
            write_json(report, report_of(place, findings))
        except OSError as error:
            findings["report"] = Finding(FAIL, f"{report}: {error}", "give --report a folder that can be written")
    show(findings)
    place.tell("over", True)
    return int(any(finding.level == FAIL for finding in findings.values()))


def follow(place: Place, until: float) -> int:
    """Another rank: check, and stay until rank 0 has printed, since a launcher ends all ranks when one ends with an error."""
    meet(place)
    if 0 not in place.facts:
        raise ValueError(f"rank 0 did not come within {place.seconds:.0f} s, so nobody gathers what the ranks find")
    run_checks(place, until, CHECKS)
    with suppress(torch.distributed.DistError):  # the store went with rank 0
        place.hear("over", [0], until + place.seconds - time.monotonic())
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
