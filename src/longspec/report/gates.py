"""Is the draft good enough to go on with? Each gate's figures and verdict; `python -m longspec.measure gates` acts on them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from longspec.measure.estimates import FEWEST, acceptance
from longspec.measure.summary import bucket_name, bucket_of
from longspec.measure.tasks import Settings
from longspec.report.inputs import Stage, Variant

Row = dict[str, Any]


def judge(variant: Variant, settings: Settings, gates: dict[str, float | None]) -> list[Row]:
    """A row for each comparison of each gate that is on: acceptance length before and after, the share lost, the verdict.

    `passed` is None where nothing can be compared, and `why` says so. The figures themselves are judged, not the ends of their
    intervals: a gate that held whenever too little was measured would be none.
    """
    rows: list[Row] = []
    if gates["forgetting"] is not None:
        rows += _forgetting(variant, settings, gates["forgetting"])
    if gates["context"] is not None:
        rows += _context(variant, settings, gates["context"])
    return rows


def count(rows: list[Row]) -> Row:
    """How many of a variant's rows were judged, and how many of these failed."""
    passed = [row["passed"] for row in rows]
    return {"gates": len(rows), "judged": len(rows) - passed.count(None), "failed": passed.count(False)}


def _unjudged(gate: str, task: str | None, what: str, limit: float, why: str) -> Row:
    row: Row = {"gate": gate, "task": task, "what": what, "limit": limit, "why": why}
    return row | {"before": None, "after": None, "lost": None, "passed": None}


def _judged(gate: str, task: str, what: str, limit: float, before: Row, after: Row) -> Row:
    lost, why = 1 - after["mean"] / before["mean"], ""
    fewest = min(before["documents"], after["documents"])
    if fewest < FEWEST:
        why = f"{fewest} {'record is' if fewest == 1 else 'records are'} too few to judge by; {FEWEST} are needed"
    row = _unjudged(gate, task, what, limit, why)
    return row | {"before": before, "after": after, "lost": lost, "passed": None if why else lost <= limit}


def _forgetting(variant: Variant, settings: Settings, limit: float) -> Iterator[Row]:
    """Each stage against those before it, on the tasks of their data: of each dataset, against the last that trained on it."""
    if len(variant.stages) == 1:
        yield _unjudged("forgetting", None, variant.final, limit, "there is no stage before it")
    for before, stage in _earlier(variant.stages):
        old, new = variant.evaluations[before.name], variant.evaluations[stage.name]
        own = [name for name, task in settings.tasks.items() if task.origin == before.data]
        what = f"{stage.name} after {before.name}, on {before.data}"
        if stage.data == before.data:
            yield _unjudged("forgetting", None, what, limit, f"both stages train on {before.data}")
        elif not own:
            yield _unjudged("forgetting", None, what, limit, f"no task measures {before.data}")
        for task in own if stage.data != before.data else []:
            found = [acceptance(one, one.of_task(task)) for one in (old, new)]
            yield _judged("forgetting", task, what, limit, *found)


def _earlier(stages: list[Stage]) -> Iterator[tuple[Stage, Stage]]:
    """The pairs of an earlier and a later stage to compare."""
    for number, stage in enumerate(stages[1:], 1):
        last_on = {before.data: before for before in stages[:number]}
        yield from ((before, stage) for before in last_on.values() if before is stages[number - 1] or before.data != stage.data)


def _context(variant: Variant, settings: Settings, limit: float) -> Iterator[Row]:
    """The final draft on each task: its longest contexts against its shortest, of those with records enough to judge by."""
    final = variant.evaluations[variant.final]
    bucket_P = np.array([bucket_of(int(tokens)) for tokens in final["context_tokens"]])
    for task in settings.tasks:
        chosen_P = final.of_task(task)
        buckets = {int(bucket): chosen_P & (bucket_P == bucket) for bucket in np.unique(bucket_P[chosen_P])}
        inside = {bucket: inside_P for bucket, inside_P in buckets.items() if final["rounds"][inside_P].sum()}
        names = [bucket_name(bucket) for bucket in inside]
        if len(inside) < 2:
            why = f"all contexts of {task} lie in one bucket"
            yield _unjudged("context", task, f"{variant.final}, {names[0]} alone", limit, why)
            continue
        found = {name: acceptance(final, chosen_P) for name, chosen_P in zip(names, inside.values(), strict=True)}
        enough = [name for name in names if found[name]["documents"] >= FEWEST]
        first, *_, last = enough if len(enough) > 1 else names
        yield _judged("context", task, f"{variant.final}, {last} against {first}", limit, found[first], found[last])
