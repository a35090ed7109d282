"""Show each stage of a run that trains at this moment: its steps, speed and time left. No torch; Slurm is not asked."""

from pathlib import Path

from longspec.cluster.stages import find, read
from longspec.shown import duration

EVERY = 30.0  # seconds between two looks


def lines(results: Path, told: dict[str, int]) -> list[str]:
    """Return a line for each stage below a run's folder that has come further. told: by stage its step; updated."""
    found = []
    for stage in find(results):
        if stage.state != "running" or stage.step == told.get(stage.name):
            continue
        told[stage.name] = stage.step
        pace, seconds = stage.middle("tokens_per_second"), stage.seconds_left
        speed = f", {pace:,.0f} tokens/s" if pace else ""
        left = f", {duration(seconds)} left" if seconds is not None else ""
        found.append(f"{results.name}/{stage.name}: step {stage.step} of {stage.total or '?'}{speed}{left}")
    return found


def cost(folder: Path, steps: int | None) -> str:
    """Return the number of steps of a stage that is to be trained, and their time as far as an earlier training tells it."""
    before = read(folder, folder.name, folder.parent) if (folder / "recipe.yaml").is_file() else None
    number, pace = (steps, None) if before is None else (steps or before.total, before.middle("seconds"))
    if number is None:
        return ""
    return f"; {number} steps" + (f", about {duration(number * pace)}" if pace is not None else "")
