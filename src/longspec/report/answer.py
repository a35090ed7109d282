"""The answer of a page about several variants: which final draft is better, by how much, and what differs between the two."""

from collections.abc import Iterable
from typing import Any

from longspec.measure.estimates import difference
from longspec.report.inputs import Variant

Row = dict[str, Any]
YES, NO, SAME, UNDECIDED, TOO_FEW, UNMEASURED = "yes", "no", "the same", "undecided", "too few records", "not measured"


def verdict(found: Row) -> str:
    """Return whether a paired difference is better: YES and NO are surely so, with a whole interval above or below 0."""
    if found["difference"] is None:
        return UNMEASURED
    if found["low"] is None:
        return TOO_FEW
    if found["low"] == found["high"] == 0:
        return SAME
    return YES if found["low"] > 0 else NO if found["high"] < 0 else UNDECIDED


def judged(found: Row, before: str, other: str) -> Row:
    """Return a difference, other less before, the way that its reader asks: better, worse and by how much.

    Where none of the two is surely better these are None, and the difference stays as it is.
    """
    told, by, low, high = verdict(found), found["difference"], found["low"], found["high"]
    if told == NO:
        by, low, high = -by, -high, -low
    better, worse = {YES: (other, before), NO: (before, other)}.get(told, (None, None))
    return {"verdict": told, "better": better, "worse": worse, "by": by, "low": low, "high": high}


def answers(variants: list[Variant], between: list[Row], differing: list[Row]) -> list[Row]:
    """Return the answer of each pair of variants: acceptance over all and by task, speed-up, and what differs.

    between: their final drafts' differences; differing: the keys of recipes and provenance in which they differ.
    """
    named, rows = {variant.name: variant for variant in variants}, list[Row]()
    finals = [row for row in between if row["drafter"] == "final draft"]
    for old, new in dict.fromkeys((row["before"], row["variant"]) for row in finals):
        by_task = {row["task"]: judged(row, old, new) for row in finals if (row["before"], row["variant"]) == (old, new)}
        before, other = named[old], named[new]
        slower, faster = before.evaluations[before.final], other.evaluations[other.final]
        speed = difference(faster, slower, faster.of_task(None), ("seconds_plain", "seconds_speculative"))
        keys = [row for row in differing if (row["before"], row["variant"]) == (old, new)]
        rows.append(
            {"variant": new, "before": old, "acceptance": by_task.pop(None), "tasks": by_task}
            | {"speed_up": judged(speed, old, new), "differs": _grouped(before, other, keys)}
        )
    return rows


def _grouped(before: Variant, other: Variant, keys: Iterable[Row]) -> list[Row]:
    """Return the keys that differ, recipes first; a key that differs in the same way in several stages stands once.

    Of two methods the names are told: that each has settings and a class of its own follows from them.
    """
    stages = set(before.stage_names) & set(other.stage_names)
    method = [variant.stages[-1].recipe.method.name for variant in (before, other)]
    rows: dict[tuple[str, str], Row] = {}
    if method[0] != method[1]:
        rows["", ""] = {"key": "method", "old": method[0], "new": method[1], "stages": []}
    for row in sorted(keys, key=lambda row: row["key"].partition(".")[0] not in stages):
        stage, _, key = row["key"].partition(".")
        if stage not in stages:
            stage, key = "", row["key"]
        elif method[0] != method[1] and key.startswith(("method.", "draft.", "model.")):
            continue
        values = {"key": key, "old": row["old"], "new": row["new"]}
        rows.setdefault((key, repr(values)), values | {"stages": []})["stages"] += [stage] if stage else []
    return list(rows.values())
