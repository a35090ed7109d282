"""Print how a draft stands against its run's gates; end with an error, and write nothing, when one of them failed."""

import argparse
from pathlib import Path
from typing import Any

from longspec import shown
from longspec.atomic_files import read_json, write_json


def told(row: dict[str, Any]) -> str:
    """A gate's figures in one line."""
    name = f"{row['gate']}: {row['what']}" + (f", task {row['task']}" if row["task"] else "")
    if row["passed"] is None:
        return f"{name}: not judged, {row['why']}"
    before, after = row["before"]["mean"], row["after"]["mean"]
    return f"{name}: acceptance length {before:.3f} -> {after:.3f}, {row['lost']:.1%} lost of {row['limit']:.1%} allowed"


def check(report: Path, out: Path) -> None:
    """Write every row to `out`. Raises ValueError with the figures of each gate that failed; then nothing is written."""
    numbers = read_json(report)
    rows = [{"variant": variant} | row for variant, held in numbers["gates"].items() for row in held]
    for row in rows:
        print(f"{row['variant']}: {told(row)}")
    judged = sum(row["passed"] is not None for row in rows)
    print(f"{judged} of {len(rows)} comparisons of the gates judged; {len(rows) - judged} not")
    failed = [f"{row['variant']}: {told(row)}" for row in rows if row["passed"] is False]
    if failed:
        page, few = report.with_suffix(".html"), len(failed)
        raise shown.ManyLinesError(
            f"{few} of {len(rows)} comparisons of the gates failed; {page} shows why, and `gates` in config/workflow.yaml"
            " holds the limits:",
            *failed,
        )
    write_json(out, rows)


def main(given: list[str]) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.measure gates", description=__doc__)
    parser.add_argument("--report", required=True, type=Path, help="the report's numbers, report.json")
    parser.add_argument("--out", required=True, type=Path, help="the verdicts, written when no gate failed")
    arguments = parser.parse_args(given)
    with shown.ending_for_mistakes():
        check(arguments.report, arguments.out)
