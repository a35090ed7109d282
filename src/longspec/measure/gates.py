"""Is a run's draft good enough to go on with? Each gate's figures and verdict, and the command that ends with an error.

The report holds the verdicts of all variants; `python -m longspec.measure gates` reads them there.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longspec import shown
from longspec.atomic_files import read_json, write_json
from longspec.measure.estimates import FEWEST, acceptance, too_few
from longspec.measure.lines import Evaluation, bucket_name, bucket_of
from longspec.measure.tasks import Settings

Row = dict[str, Any]
Measured = Mapping[str, Evaluation]
Stages = Mapping[str, Collection[str]]


def judge(stages: Stages, final: str, measured: Measured, settings: Settings, gates: dict[str, float | None]) -> list[Row]:
    """Return a row for each comparison of each gate that is on: acceptance length before and after, share lost, verdict.

    stages: each stage's data sets by its name, in order; final: the published stage; measured: by drafter. `passed` is None if
    nothing can be compared; `why` gives the reason. The figures themselves are judged, not the ends of their intervals: else a
    gate would pass whenever too little was measured.
    """
    rows: list[Row] = []
    if gates["forgetting"] is not None:
        rows += _forgetting(stages, final, measured, settings, gates["forgetting"])
    if gates["context"] is not None:
        rows += _context(final, measured[final], settings, gates["context"])
    return rows


def _row(gate: str, task: str | None, what: str, limit: float, why: str = "", *figures: Row) -> Row:
    """Return a comparison, judged by two figures unless they rest on too few records. why: the reason if there are none."""
    row: Row = {"gate": gate, "task": task, "what": what, "limit": limit, "why": why}
    if not figures:
        return row | {"before": None, "after": None, "lost": None, "passed": None}
    before, after = figures
    lost, why = 1 - after["mean"] / before["mean"], too_few(before, after)
    return row | {"before": before, "after": after, "lost": lost, "passed": None if why else lost <= limit, "why": why}


def _forgetting(stages: Stages, final: str, measured: Measured, settings: Settings, limit: float) -> Iterator[Row]:
    """Compare each stage with earlier ones on the tasks of their data: for each dataset, with the last that trained on it."""
    if len(stages) == 1:
        yield _row("forgetting", None, final, limit, "there is no stage before it")
    for before, stage, data in _pairs(stages):
        own = [name for name, task in settings.tasks.items() if task.origin == data]
        what = f"{stage} after {before}, on {data}"
        why = f"both stages train on {data}" if data in stages[stage] else "" if own else f"no task measures {data}"
        if why:
            yield _row("forgetting", None, what, limit, why)
        for task in [] if why else own:
            found = [acceptance(measured[name], measured[name].of_task(task)) for name in (before, stage)]
            yield _row("forgetting", task, what, limit, "", *found)


def _pairs(stages: Stages) -> Iterator[tuple[str, str, str]]:
    names = list(stages)
    for number, stage in enumerate(names[1:], 1):
        last_on = {data: before for before in names[:number] for data in stages[before]}
        for data, before in last_on.items():
            if before == names[number - 1] or data not in stages[stage]:
                yield before, stage, data


def _context(final: str, measured: Evaluation, settings: Settings, limit: float) -> Iterator[Row]:
    """Compare the final draft's longest contexts with its shortest, for each task, among buckets with enough records."""
    bucket_P = np.array([bucket_of(int(tokens)) for tokens in measured["context_tokens"]])
    for task in settings.tasks:
        chosen_P = measured.of_task(task)
        buckets = {int(bucket): chosen_P & (bucket_P == bucket) for bucket in np.unique(bucket_P[chosen_P])}
        inside = {bucket_name(bucket): each_P for bucket, each_P in buckets.items() if measured["rounds"][each_P].sum()}
        if len(inside) < 2:
            why = f"all contexts of {task} lie in one bucket"
            yield _row("context", task, f"{final}, {next(iter(inside))} alone", limit, why)
            continue
        found = {name: acceptance(measured, each_P) for name, each_P in inside.items()}
        enough = [name for name, figure in found.items() if figure["documents"] >= FEWEST]
        first, *_, last = enough if len(enough) > 1 else found
        yield _row("context", task, f"{final}, {last} against {first}", limit, "", found[first], found[last])


def told(row: Row) -> str:
    """Return one line with a gate's figures and verdict."""
    name = f"{row['variant']}: {row['gate']}: {row['what']}" + (f", task {row['task']}" if row["task"] else "")
    if row["passed"] is None or row["before"] is None:
        return f"{name}: {'not judged' if row['passed'] is None else 'failed'}, {row['why']}"
    before, after = row["before"]["mean"], row["after"]["mean"]
    figure = row.get("figure", "acceptance length")
    spared = ", and its interval reaches the limit" if row["passed"] and row["lost"] > row["limit"] else ""
    return f"{name}: {figure} {before:.3f} -> {after:.3f}, {row['lost']:.1%} lost of {row['limit']:.1%} allowed{spared}"


def check(report: Path, out: Path) -> None:
    """Print every gate row of a report's numbers, then write the rows to `out`.

    Raises ValueError, with the figures of each failed gate, before anything is written.
    """
    rows = [{"variant": variant} | row for variant, held in read_json(report)["gates"].items() for row in held]
    for row in rows:
        print(told(row))
    judged = sum(row["passed"] is not None for row in rows)
    print(f"{judged} of {len(rows)} comparisons of the gates judged; {len(rows) - judged} not")
    if failed := [told(row) for row in rows if row["passed"] is False]:
        raise shown.ManyLinesError(
            f"{len(failed)} of {len(rows)} comparisons of the gates failed; {report.with_suffix('.html')} shows why and says "
            "where the limits stand:",
            *failed,
        )
    write_json(out, rows)


def main(arguments: list[str]) -> None:
    """Check the gates; report a user's mistake in one line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.measure gates", description=__doc__)
    parser.add_argument("--report", required=True, type=Path, help="a page's numbers, report.json or serves.json")
    parser.add_argument("--out", required=True, type=Path, help="the verdicts, written when no gate failed")
    options = parser.parse_args(arguments)
    with shown.ending_for_mistakes():
        check(options.report, options.out)
