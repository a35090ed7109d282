"""Print a table of all stages below a folder: state, steps, speed, time left, last checkpoint, attempts and Slurm job."""

import argparse
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspec.cluster.queued_jobs import QueuedJob, my_jobs
from longspec.cluster.stages import Stage, find
from longspec.shown import duration
from longspec.slurm import NoAnswerError

STYLES = {"running": "green", "done": "bold", "queued": "cyan", "failed": "bold red", "interrupted": "red", "dead?": "red"}
NOT_STARTED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
WIDTH = 160  # where the output is no terminal


@dataclass(frozen=True)
class Slurm:
    """This user's jobs, ended ones included as long as Slurm remembers them; and why they are not known, if so."""

    jobs: list[QueuedJob]
    silence: str = ""

    @classmethod
    def ask(cls) -> "Slurm":
        """One question for all stages."""
        try:
            return cls(my_jobs(with_ended=True))
        except NoAnswerError as error:
            return cls([], str(error))

    def job_of(self, stage: Stage) -> QueuedJob | None:
        """The stage's newest job that has not ended, else the one that last held its folder."""
        own = [job for job in self.jobs if stage.lease and job.id == stage.lease.job]
        live = [job for job in self.jobs if not job.has_ended and (job in own or is_for(job, stage))]
        return max(live, key=lambda job: (job in own, int(job.number)), default=own[0] if own else None)

    def lost(self, stage: Stage) -> bool:
        """Whether the Slurm job that holds the stage's folder is no longer there; another user's cannot be seen."""
        if self.silence or stage.lease is None or stage.lease.job is None or not stage.lease.mine:
            return False
        return all(job.has_ended for job in self.jobs if job.id == stage.lease.job)


def is_for(job: QueuedJob, stage: Stage) -> bool:
    """Whether the executor sent this job for this stage: it tells the rule and its wildcards in the job's comment."""
    wildcards = stage.name.replace("/", "_")
    # Another clone of the same user may train stages of the same names.
    here = bool(job.workdir) and stage.folder.resolve().is_relative_to(Path(job.workdir).resolve())
    return here and job.comment == f"rule_train_wildcards_{wildcards}"


def state_of(stage: Stage, job: QueuedJob | None, slurm: Slurm) -> str:
    """How a stage stands: what its job wrote down last, unless that job has ended without a word."""
    written, lease = stage.status.get("state"), stage.lease
    if lease and lease.is_alive and not slurm.lost(stage):
        return "done" if written == "done" else "running"
    if job and not job.has_ended:
        if job.state in NOT_STARTED:
            return "queued"
        if lease is None or lease.job != job.id:
            return "running"  # it starts: the folder is still its predecessor's
        if not lease.released and written == "running":
            return "dead?"
    if stage.finished:
        return "done"
    if written == "running":
        known = lease is not None and (lease.job is None or not slurm.silence)
        return "interrupted" if known else "dead?"
    if written in ("stopped", "failed", "done"):
        return str(written)
    return "waiting" if stage.saved is None else "stopped"


def record(stage: Stage, slurm: Slurm) -> dict[str, Any]:
    """The fields that are shown of a stage."""
    job = slurm.job_of(stage)
    state = state_of(stage, job, slurm)
    # A job that does not run goes on from its checkpoint, whatever it did after that.
    going = state in ("running", "dead?") and stage.rows
    step = stage.rows[-1]["step"] if going else stage.saved or 0
    if state == "done":
        step = stage.total or step
    pace, left = stage.middle("seconds"), None
    if pace is not None and stage.total is not None and state != "done":
        left = max(0, stage.total - step) * pace
    return {
        "stage": stage.name,
        "state": state,
        "step": step,
        "steps": stage.total,
        "tokens_per_second": stage.middle("tokens_per_second"),
        "seconds_left": left,
        "checkpoint_step": stage.saved,
        "checkpoint_age": stage.saved_ago,
        "attempts": stage.attempts,
        "job": job.id if job else stage.lease.job if stage.lease else None,
        "slurm": vars(job) if job else None,
        "place": stage.lease.place if stage.lease else None,
        "silent": stage.lease.silent if stage.lease and not stage.lease.released else None,
        "told": stage.status.get("state"),
        "reached": stage.rows[-1]["step"] if stage.rows else stage.status.get("step"),
        "reason": stage.status.get("reason") or None,
        "hopeless": bool(stage.status.get("deterministic")),
        "log": str(stage.log) if stage.log else None,
        "troubles": stage.troubles,
    }


def job_cell(row: dict[str, Any], slurm: Slurm) -> str:
    """The Slurm job and its state, or the process that trains without one."""
    job = row["slurm"]
    if job is None:
        if row["job"] is None:
            return row["place"] if row["state"] == "running" and row["place"] else "-"
        return f"{row['job']} -" if slurm.silence else f"{row['job']} ended"
    if job["state"] == "PENDING":
        return f"{job['id']} PENDING ({job['reason']})"
    return f"{job['id']} {job['state']}" + (f" {job['elapsed']} of {job['limit']}" if job["state"] == "RUNNING" else "")


def cells(row: dict[str, Any], slurm: Slurm) -> list[Text]:
    """One line of the table; names are no markup."""
    speed, saved = row["tokens_per_second"], row["checkpoint_step"]
    percent = f" {row['step'] / row['steps']:4.0%}" if row["steps"] else ""
    texts = [
        f"{row['step']}/{row['steps'] or '?'}{percent}" if row["state"] != "waiting" else "-",
        "-" if speed is None else f"{speed:,.0f}",
        duration(row["seconds_left"]),
        "-" if saved is None else f"{saved}, {duration(row['checkpoint_age'])} ago",
        str(row["attempts"] or "-"),
        job_cell(row, slurm),
    ]
    return [Text(f"  {Path(row['stage']).name}"), Text(row["state"], style=STYLES.get(row["state"], "")), *map(Text, texts)]


def remarks(row: dict[str, Any]) -> list[str]:
    """Lines below the table: why a stage failed or fell silent, and what could not be read."""
    lines = []
    after = f"after step {row['reached'] or 0} of {row['steps'] or '?'}"
    log = f"  log: {row['log']}" if row["log"] else "  no log of it was found"
    if row["told"] == "failed" and row["state"] not in ("running", "done"):
        again = "; settings, data and code must change before it is tried again" if row["hopeless"] else ""
        lines += [f"{row['stage']} failed {after}{again}:", *f"{row['reason']}".splitlines(), log]
    if row["state"] in ("interrupted", "dead?"):
        silent = "" if row["silent"] is None else f", nothing heard of it for {duration(row['silent'])}"
        lines += [f"{row['stage']} ended without a word {after}{silent}; the next attempt goes on from its checkpoint", log]
    return lines + [f"{row['stage']}: {trouble}" for trouble in row["troubles"]]


def render(rows: list[dict[str, Any]], slurm: Slurm, console: Console) -> None:
    """The table, and below it what it has no room for."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("stage", "state", "steps", "tokens/s", "left", "checkpoint", "tries", "job"):
        # On a narrow terminal the others take several lines, and nothing is cut off.
        right = title in ("steps", "tokens/s", "tries")
        table.add_column(title, justify="right" if right else "left", no_wrap=title in ("stage", "state"), overflow="fold")
    for above, group in groupby(rows, key=lambda row: Path(row["stage"]).parent):
        if above.name:
            table.add_row(Text(f"{above}", style="bold"))
        for row in group:
            table.add_row(*cells(row, slurm))
    console.print(table)
    texts = ["\n".join(lines) for row in rows if (lines := remarks(row))]
    if slurm.silence:
        texts.append(f"Slurm's own states are not known: {slurm.silence}")
    for text in texts:
        console.print(Text(f"\n{text}"), soft_wrap=True)


def main(argv: list[str]) -> int:
    """Print the table, as the folders and Slurm are at this moment."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster status", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder; default: %(default)s")
    results = parser.parse_args(argv).results
    stages = find(results)
    if not stages:
        print(
            f"{results}: no stage in it yet (no folder with a recipe.yaml). To start: snakemake --profile slurm final_draft;"
            " for another folder: --results FOLDER"
        )
        return 0
    slurm = Slurm.ask()
    render([record(stage, slurm) for stage in stages], slurm, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0
