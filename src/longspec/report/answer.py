"""Answer which final draft of several variants is better, by how much, and what differs between them."""

from typing import Any

from longspec.config import plain
from longspec.config.names import FINAL
from longspec.measure.estimates import difference
from longspec.methods import has_own_vocabulary
from longspec.report.inputs import Variant
from longspec.report.tables import flatten

Row = dict[str, Any]
YES, NO, SAME, UNDECIDED, TOO_FEW, UNMEASURED = "yes", "no", "the same", "undecided", "too few records", "not measured"

OTHER_DEVICES = "measured on other devices or threads"


def verdict(found: Row) -> str:
    """Return the verdict on a paired difference: YES or NO if its whole interval lies above or below 0."""
    if found["difference"] is None:
        return UNMEASURED
    if found["low"] is None:
        return TOO_FEW
    if found["low"] == found["high"] == 0:
        return SAME
    return YES if found["low"] > 0 else NO if found["high"] < 0 else UNDECIDED


def judged(found: Row, before: str, other: str) -> Row:
    """Return a difference, other minus before, as its reader asks: which is better, which is worse, and by how much.

    If neither is surely better, `better` and `worse` are None, and the difference keeps its sign.
    """
    told, by, low, high = verdict(found), found["difference"], found["low"], found["high"]
    if told == NO:
        by, low, high = -by, -high, -low
    better, worse = {YES: (other, before), NO: (before, other)}.get(told, (None, None))
    return {"verdict": told, "better": better, "worse": worse, "by": by, "low": low, "high": high}


def answers(pairs: list[tuple[Variant, Variant]], between: list[Row]) -> list[Row]:
    """Return the answer for each pair of variants: acceptance over all and by task, speed-up, and what differs.

    between: the differences of between_variants.
    """
    rows = []
    for before, other in pairs:
        names = {"variant": other.name, "before": before.name}
        finals = [row for row in between if row["drafter"] == "final draft" and row.items() >= names.items()]
        by_task = {row["task"]: judged(row, before.name, other.name) for row in finals}
        slower, faster = before.evaluations[before.final], other.evaluations[other.final]
        speed = difference(faster, slower, faster.of_task(None), ("seconds_plain", "seconds_speculative"))
        row = names | {"acceptance": by_task.pop(None), "tasks": by_task, "differs": differing(before, other)}
        faster_by = judged(speed, before.name, other.name)
        if _other_devices(before, other):  # an interval over records does not cover differences of devices
            faster_by |= {"verdict": OTHER_DEVICES, "better": None, "worse": None, "by": speed["difference"]}
            faster_by |= {end: speed[end] for end in ("low", "high")}
        rows.append(row | {"speed_up": faster_by})
    return rows


def _other_devices(before: Variant, other: Variant) -> bool:
    """Tell whether the two speeds are known to be from different devices."""
    return bool(before.machine and other.machine) and before.machine != other.machine


def differing(before: Variant, other: Variant) -> list[Row]:
    """Return the keys in which the recipes of common stages differ, then those of the final drafts' provenance, devices, and
    vocabulary while decoding.

    A key that differs in the same way in several stages is listed once. If the methods differ only their names are listed: they
    imply other settings and another class. Provenance of stages, files and the choice is left out: the page shows it elsewhere.
    """
    method = [variant.stages[-1].recipe.method.name for variant in (before, other)]
    rows: dict[str, Row] = {}
    if method[0] != method[1]:
        rows["method"] = {"key": "method", "old": method[0], "new": method[1], "stages": []}
    recipes = [{stage.name: flatten(plain(stage.recipe)) for stage in variant.stages} for variant in (before, other)]
    told: list[Row] = [
        flatten({key: value for key, value in variant.provenance.items() if key not in ("stages", "files", FINAL)})
        for variant in (before, other)
    ]
    if not (rows or has_own_vocabulary(method[0])):
        sizes = [len(variant.vocabulary.ids) if variant.vocabulary else None for variant in (before, other)]
        told = [each | {"draft vocabulary": size} for each, size in zip(told, sizes, strict=True)]
    if _other_devices(before, other):
        told = [each | variant.machine for each, variant in zip(told, (before, other), strict=True)]
    both = [(stage, recipes[0][stage], recipes[1][stage]) for stage in recipes[0] if stage in recipes[1]]
    for stage, old, new in [*both, ("", told[0], told[1])]:
        for key in sorted(old | new):
            is_implied = bool(stage and "method" in rows) and key.startswith(("method.", "draft.", "model."))
            if old.get(key) != new.get(key) and not is_implied:
                row = {"key": key, "old": old.get(key), "new": new.get(key)}
                rows.setdefault(repr(row), row | {"stages": []})["stages"] += [stage] if stage else []
    return list(rows.values())
