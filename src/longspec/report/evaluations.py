"""The evaluation files of a variant, as arrays over prompts.

Suffixes: P prompts, sorted by task and prompt, the same for every drafter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longspec import jsonl

WHOLE = ("prompt", "record", "context_tokens", "new_tokens", "rounds", "tokens_compared", "mismatches", "near_ties")
SECONDS = ("seconds_plain", "seconds_speculative", "seconds_draft", "seconds_target")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Evaluation:
    """What one drafter did on every prompt."""

    path: Path
    drafter: str
    columns: dict[str, Array]  # each [P]: task and the names of WHOLE and SECONDS
    accepted: list[list[int]]  # per prompt: the drafted tokens accepted in each round

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def of_task(self, task: str) -> Array:
        """Which prompts belong to a task, boolean [P]."""
        return np.asarray(self["task"] == task)


def _check_row(where: str, row: dict[str, Any], drafter: str, tasks: list[str], gamma: int) -> None:
    """Hold one line against the format. Raises ValueError with file, line, field and fix."""
    fix = "evaluate this drafter again (rule evaluate)"
    for name, kind in [(name, int) for name in WHOLE] + [(name, (int, float)) for name in SECONDS]:
        if not isinstance(row.get(name), kind) or row[name] < 0:
            raise ValueError(f"{where}: {name}: {row.get(name)!r} is no count or time; {fix}")
    if row.get("drafter") != drafter:
        raise ValueError(f"{where}: drafter: {row.get('drafter')!r} in the file of {drafter!r}; {fix}")
    if row.get("task") not in tasks:
        raise ValueError(f"{where}: task: {row.get('task')!r} is none of {', '.join(tasks)}; {fix}")
    if row["near_ties"] > row["mismatches"]:
        raise ValueError(f"{where}: near_ties: {row['near_ties']} of {row['mismatches']} mismatches; {fix}")
    accepted = row.get("accepted")
    if not isinstance(accepted, list) or len(accepted) != row["rounds"]:
        raise ValueError(f"{where}: accepted: must list one count for each of the {row['rounds']} rounds; {fix}")
    if any(not 0 <= count <= gamma for count in accepted):
        raise ValueError(f"{where}: accepted: counts must lie in 0..{gamma} (evaluation.draft_tokens); {fix}")


def read(path: Path, drafter: str, tasks: list[str], gamma: int) -> Evaluation:
    """Read a drafter's file, checked and sorted. Raises ValueError for a line that does not fit or an empty task."""
    rows = []
    for number, row in enumerate(jsonl.read(path), 1):
        _check_row(f"{path}: line {number}", row, drafter, tasks, gamma)
        rows.append(row)
    rows.sort(key=lambda row: (tasks.index(row["task"]), row["prompt"]))
    keys = [(row["task"], row["prompt"]) for row in rows]
    if len(set(keys)) != len(keys):
        raise ValueError(f"{path}: prompt: a prompt stands twice; evaluate this drafter again (rule evaluate)")
    for task in tasks:
        if not sum(row["rounds"] for row in rows if row["task"] == task):
            raise ValueError(f"{path}: task: {task!r} has no prompt with a round; evaluate again (rule evaluate)")
    columns = {name: np.array([row[name] for row in rows]) for name in (*WHOLE, *SECONDS)}
    columns["task"] = np.array([row["task"] for row in rows])
    return Evaluation(path, drafter, columns, [row["accepted"] for row in rows])


def check_pairs(first: Evaluation, other: Evaluation) -> None:
    """Two drafters must have met the same prompts. Raises ValueError that names the file and the first difference."""
    for name in ("task", "prompt", "record", "context_tokens"):
        if len(first[name]) != len(other[name]) or (first[name] != other[name]).any():
            raise ValueError(f"{other.path}: {name}: prompts differ from those of {first.path}; evaluate both again")
