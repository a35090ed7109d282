"""Choose the stage whose draft is published, by measurements on records that the report leaves out.

It is the last one, unless an earlier one is surely better. Suffix: P prompts.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longspec import jsonl, shown
from longspec.atomic_files import checked_file, sha256_json, write_json
from longspec.data.read.records import Text, to_messages_or_text
from longspec.measure import lines
from longspec.measure.estimates import FEWEST, acceptance, difference, drafted
from longspec.measure.lines import Evaluation
from longspec.measure.tasks import Settings, parse
from longspec.shown import named_path

Row = dict[str, Any]
ONE_IN = 4  # one measured record in so many chooses; the report shows the others
Records = Mapping[str, list[int]]  # by dataset: line numbers in its held_out.jsonl from 0, as evaluations number records


def choose(options: argparse.Namespace) -> None:
    """Read all measurements, set records apart, and write the choice."""
    settings, manifests = parse(options.settings), dict(options.raw)
    settings.check_raw(manifests)
    measured = {path.stem: lines.read(path, settings) for path in options.evaluations}
    first, *others = measured.values()
    for other in others:
        lines.check_pairs(first, other)
    content = choice(measured, settings, set_apart(first, settings.data, manifests, settings.seed))
    write_json(options.out, content)
    figures = ", ".join(f"{stage} {figure['mean']:.3f}" for stage, figure in content["figures"].items())
    print(f"{options.out}: {content['stage']}: {content['why']} ({figures or 'not measured'})")


def set_apart(measured: Evaluation, tasks: Mapping[str, str], manifests: Mapping[str, Path], seed: int) -> Records:
    """Draw a quarter of each task's measured records by the hash of seed and text, and the same texts in all other tasks.

    tasks: task name -> its dataset, for tasks of held-out records; manifests: by dataset, each next to its held_out.jsonl. The
    record of a task's first prompt is never drawn, since the page shows that prompt's text.
    """
    by_task = {task: set(measured["record"][measured.of_task(task)].tolist()) for task in tasks}
    first = {task: measured["record"][measured.of_task(task) & (measured["prompt"] == 0)].tolist() for task in tasks}
    keys: dict[str, dict[int, str]] = {}
    for data in dict.fromkeys(tasks.values()):
        wanted = set[int]().union(*(by_task[task] for task in tasks if tasks[task] == data))
        held_out = enumerate(jsonl.read(checked_file(manifests[data], "held_out.jsonl")))
        keys[data] = {line: _key(record, seed) for line, record in held_out if line in wanted}
    shown_texts = {keys[data][line] for task, data in tasks.items() for line in first[task]}
    drawn: set[str] = set()
    for task, data in tasks.items():
        of_task = {keys[data][line] for line in by_task[task]}
        drawn.update(sorted(of_task - shown_texts)[: len(of_task) // ONE_IN])
    return {data: sorted(line for line, key in found.items() if key in drawn) for data, found in keys.items()}


def _key(record: Row, seed: int) -> str:
    """Return a hash of the seed and a record's text or messages."""
    document = to_messages_or_text(record, unanswered=True)
    content = document.text if isinstance(document, Text) else document.messages
    return sha256_json([seed, content])


def choice(measured: Mapping[str, Evaluation], settings: Settings, records: Records) -> Row:
    """Return the content of final_stage.json. If too few records could be set apart: the last stage, and no records.

    measured: by stage, in order of training; records: those set apart, by dataset.
    """
    tasks, first = settings.data, next(iter(measured.values()))
    chosen_P = np.zeros(len(first["task"]), bool)
    for task, data in tasks.items():
        chosen_P |= first.of_task(task) & np.isin(first["record"], records[data])
    *_, last = measured
    found = {stage: acceptance(one, chosen_P) for stage, one in measured.items() if drafted(chosen_P, one).any()}
    if len(found) < len(measured) or any(figure["documents"] < FEWEST for figure in found.values()):
        counted = sum(len(numbers) for numbers in records.values())
        why = (
            f"the last stage: fewer than {FEWEST} records of {', '.join(tasks)} could be set apart to choose by ({counted}); "
            "raise evaluation.prompts, or held_out of their data"
        )
        return {"stage": last, "why": why, "figures": {}, "against_last": None, "prompts": {}, "records": {}}
    against_last = {stage: difference(one, measured[last], chosen_P) for stage, one in measured.items() if stage != last}
    best, why = best_of(found, against_last)
    return {
        "stage": best,
        "why": why,
        "figures": found,
        "against_last": against_last.get(best),
        "prompts": {task: int((first.of_task(task) & chosen_P).sum()) for task in tasks},
        "records": dict(records),
    }


def best_of(found: Mapping[str, Row], against_last: Mapping[str, Row]) -> tuple[str, str]:
    """Return the stage to publish and why. found: figure by stage; against_last: its difference to the last, for the others.

    Later stages train longer on the data that the draft is for, so a chance difference must not undo them: an earlier stage is
    published only if the whole interval of its difference to the last one lies above 0.
    """
    *_, last = found
    better = [stage for stage, row in against_last.items() if row["improved"]]
    if better:
        best = max(reversed(better), key=lambda stage: float(found[stage]["mean"]))
        return best, f"better than the last stage, {last}: the whole 95 % interval of the difference lies above 0"
    if not against_last:
        return last, "the only stage"
    nearest = max(against_last, key=lambda stage: float(found[stage]["mean"]))
    told = "{difference:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}".format(**against_last[nearest])
    return last, f"the last stage: no earlier one is surely better ({nearest} less {last}: {told})"


def main(arguments: list[str]) -> None:
    """Choose the stage; report a user's mistake in one line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.measure choose", description=__doc__)
    parser.add_argument("--settings", required=True, type=json.loads, help="the evaluation section as JSON")
    raw = "NAME=MANIFEST of the held-out records that prompts were drawn from"
    parser.add_argument("--raw", required=True, nargs="+", type=named_path, help=raw)
    measured = "a file of each stage, named after it, in the order of training"
    parser.add_argument("--evaluations", required=True, nargs="+", type=Path, help=measured)
    parser.add_argument("--out", required=True, type=Path, help="the choice as JSON")
    options = parser.parse_args(arguments)
    with shown.ending_for_mistakes():
        choose(options)
