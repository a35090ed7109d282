"""Held-out records by which the published stage is chosen. They are measured as all others are, and told nowhere else.

Suffix: P prompts.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from longspec import jsonl
from longspec.atomic_files import sha256_text
from longspec.data.read.records import Text, to_messages_or_text
from longspec.report.evaluations import Array, Evaluation

ONE_IN = 4  # of a task's records that are measured, the others are told

Lines = dict[str, list[int]]  # by dataset: lines of its held_out.jsonl from 0, as evaluations number records


def set_apart(measured: Evaluation, tasks: Mapping[str, str], manifests: Mapping[str, Path], seed: int) -> Lines:
    """A quarter of each task's measured records, drawn by the hash of seed and text, and the same texts in all other tasks.

    tasks: by name the dataset of each task of held-out records; manifests: by dataset, each beside its held_out.jsonl. The
    record of a task's first prompt is told, since the page shows that prompt's text. Raises ValueError, with the file, where
    the records are not those that were measured.
    """
    lines: dict[str, set[int]] = {}
    for task, data in tasks.items():
        lines.setdefault(data, set()).update(_records(measured, measured.of_task(task)))
    keys = {data: _keys(manifests[data].parent / "held_out.jsonl", held, seed) for data, held in lines.items()}
    first_P = measured["prompt"] == 0
    shown = {keys[data][line] for task, data in tasks.items() for line in _records(measured, measured.of_task(task) & first_P)}
    drawn: set[str] = set()
    for task, data in tasks.items():
        of_task = {keys[data][line] for line in _records(measured, measured.of_task(task))}
        drawn.update(sorted(of_task - shown)[: len(of_task) // ONE_IN])
    return {data: sorted(line for line, key in found.items() if key in drawn) for data, found in keys.items()}


def chosen_by(measured: Evaluation, tasks: Mapping[str, str], records: Mapping[str, Collection[int]]) -> Array:
    """Which prompts are of the records that are set apart, [P]."""
    inside_P = np.zeros(len(measured["task"]), bool)
    for task, data in tasks.items():
        inside_P |= measured.of_task(task) & np.isin(measured["record"], list(records[data]))
    return inside_P


def _records(measured: Evaluation, chosen_P: Array) -> list[int]:
    return sorted({int(line) for line in measured["record"][chosen_P]})


def _keys(path: Path, lines: Iterable[int], seed: int) -> dict[int, str]:
    """By line a hash of each of these records' text or messages. Raises ValueError for a line that is not there."""
    wanted = set(lines)
    keys = {}
    for line, record in enumerate(jsonl.read(path)):
        if line in wanted:
            document = to_messages_or_text(record, unanswered=True)
            content = document.text if isinstance(document, Text) else document.messages
            keys[line] = sha256_text(json.dumps([seed, content], sort_keys=True))
    if missing := sorted(wanted - keys.keys()):
        raise ValueError(
            f"{path}: line {missing[0] + 1}: missing, though a prompt of it was measured; evaluate again (rule evaluate)"
        )
    return keys
