"""Acceptance by position of a draft in another engine beside our own loop: figures with intervals, and the gate between them.

A position's acceptance: of the rounds that kept all drafted tokens before it, the share that kept it too. Suffix: P prompts.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np

from longspec.measure.estimates import ratio_of, too_few
from longspec.measure.lines import FAULT, Evaluation

LESS = 0.02  # share of our acceptance that an engine may lose
SHARE, LENGTH = "acceptance", "acceptance length"  # what a row of the gate compares
Row = dict[str, Any]


def on_tasks(found: Evaluation, tasks: Collection[str]) -> Evaluation:
    """Return the measurements of some tasks, of the main setting."""
    chosen_P = np.isin(found["task"], list(tasks))
    lines = [line for line in found.main_lines if line["task"] in tasks]
    columns = {name: column_P[chosen_P] for name, column_P in found.columns.items()}
    return Evaluation(found.path, columns, {next(iter(found.by_setting)): lines})


def depth(found: Evaluation) -> int:
    """Return the number of drafted tokens of a round."""
    return len(found.main_lines[0]["positions"])


def ratio(over: str, under: str, *found: Evaluation) -> Row | None:
    """Return a ratio of two columns over all prompts; of two measurements the first less the second. None without a round."""
    with suppress(ValueError):
        return ratio_of(found[0].of_task(None), *((one, over, under) for one in found))
    return None


def judge(title: str, ours: Evaluation, served: Evaluation) -> list[Row]:
    """Return a row for each position, and one for the tokens of a round: ours, the engine's, share lost, verdict.

    A row fails where the whole 95 % interval of the difference, record by record, lies below -LESS of ours. `passed` is None
    where too few records were measured, and `why` says so. The rows are those of gates.py.
    """
    asked = [(f"token {place + 1}", SHARE, f"kept {place}", f"reached {place}") for place in range(depth(ours))]
    rows = []
    for what, figure, over, under in [*asked, ("tokens a round", LENGTH, "new_tokens", "rounds")]:
        before, after, apart = (ratio(over, under, *found) for found in ([ours], [served], [served, ours]))
        row = _row(title, what, figure)
        if before is None or after is None or apart is None:
            rows.append(row | {"after": after, "why": f"no round of {'ours' if before is None else title} came so far"})
            continue
        lost, why = 1 - after["mean"] / before["mean"] if before["mean"] else 0.0, too_few(apart)
        passed = None if why else bool(apart["high"] >= -LESS * before["mean"])
        rows.append(row | {"before": before, "after": after, "lost": lost, "difference": apart, "passed": passed, "why": why})
    return rows


def _row(title: str, what: str, figure: str) -> Row:
    """Return a comparison before anything is compared."""
    row: Row = {"gate": title, "task": None, "what": what, "figure": figure, "limit": LESS}
    return row | dict.fromkeys(("before", "after", "lost", "difference", "passed"))


def unmeasured(title: str, fault: Row) -> Row:
    """Return the row of an engine that has no measurements: not judged where it refuses, failed where its text is wrong."""
    passed = False if fault["failed"] else None
    return _row(title, "measurement", SHARE) | {"passed": passed, "why": fault[FAULT]}


def same_texts(ours: Evaluation, served: Evaluation) -> int:
    """Return how many prompts have the same text in both; texts part after a near-tie, and where rounding differs."""
    pairs = zip(ours.main_lines, served.main_lines, strict=True)
    return sum(all(a == b for a, b in zip(one["tokens"], other["tokens"], strict=False)) for one, other in pairs)
