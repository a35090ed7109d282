"""The choice among stages: the last one, unless an earlier one is surely better on records that are set apart.

These held-out records are measured as all others are, and told nowhere else. Suffix: P prompts.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longspec import jsonl
from longspec.atomic_files import sha256_text
from longspec.data.read.records import Text, to_messages_or_text
from longspec.measure.estimates import FEWEST, acceptance, difference, drafted
from longspec.measure.lines import Array, Evaluation
from longspec.measure.tasks import Settings

Row = dict[str, Any]
ONE_IN = 4  # of a task's records that are measured, the others are told

Lines = dict[str, list[int]]  # by dataset: lines of its held_out.jsonl from 0, as evaluations number records


def figures(measured: Mapping[str, Evaluation], chosen_P: Array) -> dict[str, Row]:
    """By stage its acceptance length over the chosen prompts, [P], with a 95 % interval over records.

    Empty where some stage has fewer than FEWEST records with a round: they say too little to choose by.
    """
    found = {stage: acceptance(lines, chosen_P) for stage, lines in measured.items() if drafted(chosen_P, lines).any()}
    enough = [figure["documents"] >= FEWEST for figure in found.values()]
    return found if enough.count(True) == len(measured) else {}


def best_of(found: Mapping[str, Row], against_last: Mapping[str, Row]) -> tuple[str, str]:
    """Return the stage to publish and why; found: by stage its figure, against_last: of each but the last its difference.

    Training longer on the data that the draft is for is what the stages do, so a chance difference must not undo it: an earlier
    stage is published only where its whole interval lies above the last one's.
    """
    *_, last = found
    better = [stage for stage, row in against_last.items() if row["improved"]]
    if better:
        best = max(reversed(better), key=lambda stage: float(found[stage]["mean"]))
        return best, f"better than the last stage, {last}: the whole 95 % interval of the difference lies above 0"
    if not against_last:
        return last, "the only stage"
    nearest = max(against_last, key=lambda stage: float(found[stage]["mean"]))
    row = against_last[nearest]
    told = "{difference:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}".format(**row)
    return last, f"the last stage: no earlier one is surely better ({nearest} less {last}: {told})"


def choice(measured: Mapping[str, Evaluation], settings: Settings, records: Mapping[str, list[int]]) -> Row:
    """The content of final_stage.json; the last stage, and all records to be told, where too few could be set apart.

    measured: of each stage in order; records: set apart, by dataset.
    """
    tasks, first = settings.data, next(iter(measured.values()))
    chosen_P = chosen_by(first, tasks, records)
    *_, last = measured
    found = figures(measured, chosen_P)
    if not found:
        counted = sum(len(lines) for lines in records.values())
        why = (
            f"the last stage: fewer than {FEWEST} records of {', '.join(tasks)} could be set apart to choose by ({counted}); "
            "raise evaluation.prompts, or held_out of their data"
        )
        return {"stage": last, "why": why, "figures": {}, "against_last": None, "prompts": {}, "records": {}}
    against_last = {stage: difference(lines, measured[last], chosen_P) for stage, lines in measured.items() if stage != last}
    best, why = best_of(found, against_last)
    return {
        "stage": best,
        "why": why,
        "figures": found,
        "against_last": against_last.get(best),
        "prompts": {task: int((first.of_task(task) & chosen_P).sum()) for task in tasks},
        "records": dict(records),
    }


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
