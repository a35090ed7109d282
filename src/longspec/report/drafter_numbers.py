"""What one drafter's measurements say: acceptance, buckets of context length, positions in the round, speed.

Suffix: P prompts.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from longspec.evaluate.tasks import Settings
from longspec.report.estimates import acceptance, ratio_of
from longspec.report.evaluations import Evaluation

Row = dict[str, Any]


def by_task(found: Evaluation, settings: Settings) -> Row:
    """task -> acceptance."""
    return {task: acceptance(found, found.of_task(task), settings.seed) for task in settings.tasks}


def overall(found: Evaluation, settings: Settings) -> Row:
    """Acceptance over all tasks; resampling keeps each task's number of records."""
    return acceptance(found, found.of_task(None), settings.seed)


def bucket_edges(longest: int) -> list[int]:
    """0, 256, 512, 1024, ... up to the first edge above the longest context, in tokens."""
    edges = [0, 256]
    while edges[-1] <= longest:
        edges.append(edges[-1] * 2)
    return edges


def by_context(found: Evaluation, settings: Settings) -> list[Row]:
    """Acceptance by task and bucket of context length (low <= tokens < high); filled buckets only."""
    rows = []
    for task in settings.tasks:
        for low, high in pairwise(bucket_edges(int(found["context_tokens"].max()))):
            chosen_P = found.of_task(task) & (found["context_tokens"] >= low) & (found["context_tokens"] < high)
            if found["rounds"][chosen_P].sum():
                rows.append({"task": task, "from": low, "to": high, **acceptance(found, chosen_P, settings.seed)})
    return rows


def by_position(found: Evaluation, settings: Settings) -> dict[str, list[float]]:
    """task -> share of rounds in which the first, second, ... drafted token was accepted."""
    shares = {}
    for task in settings.tasks:
        inside = zip(found.accepted, found.of_task(task), strict=True)
        accepted = np.array([count for rounds, chosen in inside if chosen for count in rounds])
        shares[task] = [float(np.mean(accepted >= place)) for place in range(1, settings.draft_tokens + 1)]
    return shares


def speed(found: Evaluation, settings: Settings) -> Row:
    """Measured speed-up with interval, shares of the speculative time, cost of a draft step and of a verification.

    Both costs are in plain steps; a draft step is a token of a chain or a level of a tree. Shares and costs are None where the
    engine does not tell the seconds of draft and target apart.
    """
    plain, speculative = float(found["seconds_plain"].sum()), float(found["seconds_speculative"].sum())
    if not plain or not speculative:
        raise ValueError(f"{found.path}: seconds_plain, seconds_speculative: no time measured; evaluate again")
    draft, target = (float(found[name].sum()) for name in ("seconds_draft", "seconds_target"))
    step_draft = draft / (found["rounds"].sum() * settings.draft_tokens)
    step_plain = plain / found["new_tokens"].sum()
    parts = {
        "draft_share": draft / speculative,
        "target_share": target / speculative,
        "other_share": 1 - (draft + target) / speculative,
        "measured_cost_ratio": float(step_draft / step_plain),
        "verification_cost_ratio": float(target / found["rounds"].sum() / step_plain),
    }
    return {
        "speed_up": ratio_of(found, "seconds_plain", "seconds_speculative", found.of_task(None), settings.seed),
        "seconds_plain": plain,
        "seconds_speculative": speculative,
        **{name: None if np.isnan(value) else value for name, value in parts.items()},
    }


def speed_by_task(found: Evaluation, settings: Settings) -> Row:
    """task -> measured speed-up."""
    columns = "seconds_plain", "seconds_speculative"
    return {task: ratio_of(found, *columns, found.of_task(task), settings.seed) for task in settings.tasks}


# What reports and comparisons tell of every drafter, by its name there.
PARTS: dict[str, Callable[[Evaluation, Settings], Any]] = {
    "variants": by_task,
    "overall": overall,
    "by_context": by_context,
    "by_position": by_position,
    "speed": speed,
    "speed_by_task": speed_by_task,
}
