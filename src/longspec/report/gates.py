"""Is the draft good enough to go on with? Each gate's figures and verdict; `python -m longspec.gates` acts on them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from longspec.evaluate.summary import bucket_name, bucket_of
from longspec.report.estimates import FEWEST, acceptance
from longspec.report.evaluations import Array, Evaluation
from longspec.report.inputs import Settings, Variant

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


def _row(gate: str, task: str | None, what: str, limit: float, found: tuple[Row, Row] | None, why: str = "") -> Row:
    row: Row = {"gate": gate, "task": task, "what": what, "limit": limit, "why": why}
    if found is None:
        return row | {"before": None, "after": None, "lost": None, "passed": None}
    before, after = found
    lost = 1 - after["mean"] / before["mean"]
    fewest = min(before["documents"], after["documents"])
    if fewest < FEWEST:
        row["why"] = f"{fewest} {'record is' if fewest == 1 else 'records are'} too few to judge by; {FEWEST} are needed"
    return row | {"before": before, "after": after, "lost": lost, "passed": None if row["why"] else lost <= limit}


def _forgetting(variant: Variant, settings: Settings, limit: float) -> Iterator[Row]:
    """Each stage against the one before, on the tasks of that one's data."""
    for before, stage in pairwise(variant.stages):
        old, new = variant.evaluations[before.name], variant.evaluations[stage.name]
        own = [task for task, data in settings.tasks.items() if data == before.data]
        what = f"{stage.name} after {before.name}, on {before.data}"
        if stage.data == before.data:
            yield _row("forgetting", None, what, limit, None, "both stages train on it")
        elif not own:
            yield _row("forgetting", None, what, limit, None, "no task measures it")
        for task in own if stage.data != before.data else []:
            old_P, new_P = old.of_task(task), new.of_task(task)
            found = acceptance(old, old_P, settings.seed), acceptance(new, new_P, settings.seed)
            yield _row("forgetting", task, what, limit, found)


def _context(variant: Variant, settings: Settings, limit: float) -> Iterator[Row]:
    """The final draft on each task: its longest contexts against its shortest, of those with records enough to judge by."""
    final = variant.evaluations[variant.final]
    for task in settings.tasks:
        inside = _filled(final, final.of_task(task))
        names = [bucket_name(bucket) for bucket in inside]
        if len(inside) < 2:
            yield _row("context", task, f"{variant.final}, {names[0]} alone", limit, None, "all contexts lie in one bucket")
            continue
        found = {
            name: acceptance(final, chosen_P, settings.seed) for name, chosen_P in zip(names, inside.values(), strict=True)
        }
        enough = [name for name in names if found[name]["documents"] >= FEWEST]
        first, *_, last = enough if len(enough) > 1 else names
        yield _row("context", task, f"{variant.final}, {last} against {first}", limit, (found[first], found[last]))


def _filled(found: Evaluation, chosen_P: Array) -> dict[int, Array]:
    """The buckets of context length in which something was decoded, and which of the chosen prompts each holds."""
    bucket_P = np.array([bucket_of(int(tokens)) for tokens in found["context_tokens"]])
    buckets = {int(bucket): chosen_P & (bucket_P == bucket) for bucket in np.unique(bucket_P[chosen_P])}
    return {bucket: inside_P for bucket, inside_P in buckets.items() if found["rounds"][inside_P].sum()}
