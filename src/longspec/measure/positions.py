"""Acceptance by position of a draft in another engine beside our own loop: figures with intervals, and the gate between them.

A position's acceptance: of the rounds that kept all drafted tokens before it, the share that kept it too. Suffixes: P prompts,
N records.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from longspec.measure.estimates import FEWEST, acceptance, difference, estimate, sums_by_record
from longspec.measure.lines import FAULT, Array, Evaluation

LESS = 0.02  # share of our acceptance that an engine may lose
SHARE, LENGTH = "acceptance", "acceptance length"  # what a row of the gate compares
Row = dict[str, Any]


def on_tasks(found: Evaluation, tasks: Collection[str]) -> Evaluation:
    """Return the measurements of some tasks, of the main setting."""
    chosen_P = np.isin(found["task"], list(tasks))
    lines = [line for line in found.main_lines if line["task"] in tasks]
    return Evaluation(found.path, {name: column_P[chosen_P] for name, column_P in found.columns.items()}, lines)


def depth(found: Evaluation) -> int:
    """Return the number of drafted tokens of a round."""
    return len(found.main_lines[0]["positions"])


def _counts(found: Evaluation, place: int) -> tuple[Array, Array]:
    """Return how often each prompt's rounds kept the token at a place, and all before it, each [P]."""
    kept_P, reached_P = np.array([line["positions"][place] for line in found.main_lines]).T
    return kept_P, reached_P


def at_place(place: int, *found: Evaluation) -> Row | None:
    """Return the acceptance at a place, from 0, with its interval and the records that it rests on; None without a round there.

    Of two measurements of the same prompts it is the first less the second. No interval below FEWEST records.
    """
    columns = [column_P for one in found for column_P in _counts(one, place)]
    tasks_N, sums = sums_by_record(found[0]["task"], found[0]["record"], *columns)
    inside_N = np.all([reached_N > 0 for reached_N in sums[1::2]], axis=0)
    if not inside_N.any():
        return None
    pairs = [(kept_N[inside_N], reached_N[inside_N]) for kept_N, reached_N in zip(sums[::2], sums[1::2], strict=True)]
    figure: Row = estimate(*pairs, strata_N=tasks_N[inside_N])
    records = int(inside_N.sum())
    return (figure if records >= FEWEST else figure | {"low": None, "high": None}) | {"documents": records}


def judge(title: str, ours: Evaluation, served: Evaluation) -> list[Row]:
    """Return a row for each position, and one for the tokens of a round: ours, the engine's, share lost, verdict.

    A row fails where the whole 95 % interval of the difference, record by record, lies below -LESS of ours. `passed` is None
    where too few records were measured, and `why` says so. The rows are those of gates.py.
    """
    rows = []
    for place in range(depth(ours)):
        before, after = at_place(place, ours), at_place(place, served)
        apart = at_place(place, served, ours)
        rows.append(_row(title, f"token {place + 1}", SHARE, before, after, apart))
    all_P = ours.of_task(None)
    apart = difference(served, ours, all_P)
    apart |= {"mean": apart["difference"], "documents": acceptance(ours, all_P)["documents"]}
    return [*rows, _row(title, "tokens a round", LENGTH, acceptance(ours, all_P), acceptance(served, all_P), apart)]


def _row(title: str, what: str, figure: str, before: Row | None, after: Row | None, apart: Row | None) -> Row:
    """Return one comparison; apart: the engine's figure less ours, None where one of them has no round."""
    row: Row = {"gate": title, "task": None, "what": what, "figure": figure, "limit": LESS, "before": before, "after": after}
    if before is None or after is None or apart is None:
        why = f"no round of {'ours' if before is None else title} came so far"
        return row | {"before": None, "lost": None, "difference": apart, "passed": None, "why": why}
    row |= {"lost": 1 - after["mean"] / before["mean"] if before["mean"] else 0.0, "difference": apart, "why": ""}
    if apart["high"] is None:
        records = apart["documents"]
        few = f"{records} {'record is' if records == 1 else 'records are'} too few to judge by; {FEWEST} are needed"
        return row | {"passed": None, "why": few}
    return row | {"passed": bool(apart["high"] >= -LESS * before["mean"])}


def unmeasured(title: str, fault: Row) -> Row:
    """Return the row of an engine that has no measurements: not judged where it refuses, failed where its text is wrong."""
    passed = False if fault["failed"] else None
    return _row(title, "measurement", SHARE, None, None, None) | {"passed": passed, "why": fault[FAULT]}


def same_texts(ours: Evaluation, served: Evaluation) -> int:
    """Return how many prompts have the same text in both; texts part after a near-tie, and where rounding differs."""
    pairs = zip(ours.main_lines, served.main_lines, strict=True)
    return sum(all(a == b for a, b in zip(one["tokens"], other["tokens"], strict=False)) for one, other in pairs)
