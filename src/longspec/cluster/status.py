"""Print a table of all stages below a folder: state, steps, speed, time left, last checkpoint, attempts and Slurm job."""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspec.cluster.stages import Stage, find
from longspec.shown import duration
from longspec.slurm import NoAnswerError, my_jobs

STYLES = {"running": "green", "done": "bold", "queued": "cyan", "failed": "bold red", "silent": "red"}
WIDTH = 160  # where the output is no terminal


def job_cell(stage: Stage) -> str:
    """Name the Slurm job and its state, or the process that trains without one."""
    job = stage.job
    if job is None:
        if stage.job_id is None:
            return str(stage.holder) if stage.state == "running" and stage.holder else "-"
        return f"{stage.job_id} {'-' if stage.jobs is None else 'ended'}"
    if job.state == "PENDING":
        return f"{job.id} PENDING ({job.reason})"
    return f"{job.id} {job.state} {job.elapsed} of {job.limit}"


def cells(stage: Stage) -> list[Text]:
    """Return the cells of a stage's line; names are no markup."""
    state, speed = stage.state, stage.middle("tokens_per_second")
    percent = f" {stage.step / stage.total:4.0%}" if stage.total else ""
    texts = [
        f"{stage.step}/{stage.total or '?'}{percent}" if state != "waiting" else "-",
        "-" if speed is None else f"{speed:,.0f}",
        duration(stage.seconds_left),
        "-" if stage.saved is None else f"{stage.saved}, {duration(stage.saved_ago)} ago",
        str(stage.attempts or "-"),
        job_cell(stage),
    ]
    return [Text(f"  {Path(stage.name).name}"), Text(state, style=STYLES.get(state, "")), *map(Text, texts)]


def remarks(stage: Stage) -> list[str]:
    """Return what to say below the table: why a stage failed or fell silent."""
    reached = stage.rows[-1]["step"] if stage.rows else stage.status.get("step", 0)
    after = f"after step {reached} of {stage.total or '?'}"
    if stage.status.get("state") == "failed" and stage.state not in ("running", "done"):
        again = "; settings, data and code must change before it is tried again" if stage.status["deterministic"] else ""
        lines = [f"{stage.name} failed {after}{again}:", *stage.status["reason"].splitlines()]
    elif stage.state == "silent":
        silent = f", nothing heard of it for {duration(stage.silent)}" if stage.holder else ""
        lines = [f"{stage.name} ended without a word or hangs {after}{silent}; the next attempt goes on from its checkpoint"]
    else:
        return []
    return [*lines, f"  log: {stage.log}" if stage.log else "  no log of it was found"]


def render(stages: list[Stage], console: Console) -> None:
    """Print the table, and the remarks below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("stage", "state", "steps", "tokens/s", "left", "checkpoint", "tries", "job"):
        # On a narrow terminal the other columns take several lines, and nothing is cut off.
        right = title in ("steps", "tokens/s", "tries")
        table.add_column(title, justify="right" if right else "left", no_wrap=title in ("stage", "state"), overflow="fold")
    for above, group in groupby(stages, key=lambda stage: Path(stage.name).parent):
        if above.name:
            table.add_row(Text(f"{above}", style="bold"))
        for stage in group:
            table.add_row(*cells(stage))
    console.print(table)
    for lines in filter(None, map(remarks, stages)):
        console.print(Text("\n" + "\n".join(lines)), soft_wrap=True)


def main(argv: list[str]) -> int:
    """Print the table of folders and Slurm's jobs as they are at this moment."""
    parser = argparse.ArgumentParser(prog="python -m longspec.cluster status", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder; default: %(default)s")
    results = parser.parse_args(argv).results
    try:
        jobs, silence = my_jobs(), ""
    except NoAnswerError as error:
        jobs, silence = None, f"\nSlurm's own states are not known: {error}"
    stages = find(results, jobs)
    if not stages:
        print(
            f"{results}: no stage in it yet (no folder with a recipe.yaml). To start: longspec train mine.yaml --profile slurm;"
            " for another folder: --results FOLDER"
        )
        return 0
    render(stages, Console(width=None if sys.stdout.isatty() else WIDTH))
    if silence:
        print(silence)
    return 0
