"""The evaluation files of a variant: their lines, and those of the main setting as arrays over prompts.

Suffixes: P prompts, sorted by task and prompt, the same for every drafter.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longspec import jsonl
from longspec.measure.tasks import OURS, Setting, Settings

WHOLE = ("prompt", "record", "context_tokens", "new_tokens", "rounds", "tokens_compared", "mismatches", "near_ties")
SECONDS = ("seconds_plain", "seconds_speculative", "seconds_draft", "seconds_target")
UNTOLD = ("seconds_draft", "seconds_target")  # vLLM does not tell them apart: null in its lines, NaN in columns
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Evaluation:
    """Measurements of one drafter on every prompt."""

    path: Path
    drafter: str
    columns: dict[str, Array]  # each [P]: task, prompt_hash and the names of WHOLE and SECONDS
    accepted: list[list[int]]  # per prompt: the drafted tokens accepted in each round
    lines: list[dict[str, Any]]  # of every temperature and shape
    left_out: dict[str, int] = field(default_factory=dict)  # by task: prompts of records that are not told

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def of_task(self, task: str | None) -> Array:
        """Which prompts belong to a task, boolean [P]; all for None."""
        return np.ones(len(self["task"]), bool) if task is None else np.asarray(self["task"] == task)


def _check_row(where: str, row: dict[str, Any], drafter: str, settings: Settings) -> Setting:
    """Hold one line against the format; its setting. Raises ValueError with file, line, field and fix."""
    fix = "evaluate this drafter again (rule evaluate)"
    if row.get("engine", OURS) != settings.engine:
        raise ValueError(f"{where}: engine: {row.get('engine', OURS)}, but evaluation.engine is {settings.engine}; {fix}")
    seconds = [name for name in SECONDS if settings.engine == OURS or name not in UNTOLD or row.get(name) is not None]
    for name, kind in [(name, int) for name in WHOLE] + [(name, (int, float)) for name in seconds]:
        if not isinstance(row.get(name), kind) or row[name] < 0:
            raise ValueError(f"{where}: {name}: {row.get(name)!r} is no count or time; {fix}")
    if row.get("drafter") != drafter:
        raise ValueError(f"{where}: drafter: {row.get('drafter')!r} in the file of {drafter!r}; {fix}")
    if row.get("task") not in settings.tasks:
        raise ValueError(f"{where}: task: {row.get('task')!r} is none of {', '.join(settings.tasks)}; {fix}")
    if not isinstance(row.get("prompt_hash"), str):
        raise ValueError(f"{where}: prompt_hash: {row.get('prompt_hash')!r} is no hash of the prompt's tokens; {fix}")
    shape = row.get("shape")
    own = (row.get("temperature"), tuple(shape) if isinstance(shape, list) else shape)
    setting = next((setting for setting in settings.settings if (setting.temperature, setting.shape) == own), None)
    if setting is None:
        raise ValueError(f"{where}: temperature, shape: {own} is none of the settings (evaluation.temperatures, shapes); {fix}")
    if row["near_ties"] > row["mismatches"]:
        raise ValueError(f"{where}: near_ties: {row['near_ties']} of {row['mismatches']} mismatches; {fix}")
    accepted, positions, copied = row.get("accepted"), row.get("positions"), settings.copied_by(drafter)
    if not isinstance(accepted, list) or len(accepted) != row["rounds"]:
        raise ValueError(f"{where}: accepted: must list one count for each of the {row['rounds']} rounds; {fix}")
    if any(not 0 <= count <= max(setting.depth, copied) for count in accepted):
        keys = "evaluation.shapes, with_lookup" if copied else "evaluation.shapes"
        raise ValueError(f"{where}: accepted: counts must lie in 0..{max(setting.depth, copied)} ({keys}); {fix}")
    if not isinstance(positions, list) or len(positions) != setting.depth:
        raise ValueError(f"{where}: positions: must list {setting.depth} pairs of counts; {fix}")
    return setting


def read(path: Path, drafter: str, settings: Settings, left_out: Mapping[str, Collection[int]] | None = None) -> Evaluation:
    """Read a drafter's file, checked and sorted.

    left_out: by task the records whose prompts are not told. Raises ValueError for a line that does not fit or a task without
    one.
    """
    found: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in settings.settings}
    dropped: Counter[str] = Counter()
    for number, row in enumerate(jsonl.read(path), 1):
        setting = _check_row(f"{path}: line {number}", row, drafter, settings)
        if row["record"] not in (left_out or {}).get(row["task"], ()):
            found[setting].append(row)
        elif setting == settings.settings[0]:
            dropped[row["task"]] += 1
    tasks = list(settings.tasks)
    for setting, rows in found.items():
        rows.sort(key=lambda row: (tasks.index(row["task"]), row["prompt"]))
        keys = [(row["task"], row["prompt"]) for row in rows]
        if len(set(keys)) != len(keys):
            raise ValueError(f"{path}: prompt: a prompt stands twice; evaluate this drafter again (rule evaluate)")
        for task in tasks:
            if not sum(row["rounds"] for row in rows if row["task"] == task):
                raise ValueError(
                    f"{path}: task: {task!r} has no prompt with a round at {setting}; evaluate again (rule evaluate)"
                )
    rows = found[settings.settings[0]]
    columns = {name: np.array([row[name] for row in rows]) for name in WHOLE}
    columns |= {name: np.array([row.get(name) for row in rows], float) for name in SECONDS}
    columns |= {name: np.array([row[name] for row in rows]) for name in ("task", "prompt_hash")}
    lines = [row for held in found.values() for row in held]
    return Evaluation(path, drafter, columns, [row["accepted"] for row in rows], lines, dict(dropped))


def check_pairs(first: Evaluation, other: Evaluation) -> None:
    """Two drafters must have met the same prompts, to the token. Raises ValueError that names the first difference."""
    for name in ("task", "prompt", "record", "context_tokens"):
        if len(first[name]) != len(other[name]) or (first[name] != other[name]).any():
            raise ValueError(f"{other.path}: {name}: prompts differ from those of {first.path}; evaluate both again")
    for place in np.flatnonzero(first["prompt_hash"] != other["prompt_hash"]):
        raise ValueError(
            f"{other.path}: task {other['task'][place]}, prompt {other['prompt'][place]}: prompt_hash: "
            f"{other['prompt_hash'][place]}, but {first['prompt_hash'][place]} in {first.path}; only drafters of one target, "
            "on the same data with the same settings, can be compared; evaluate both again"
        )
