"""The choice among stages: each one's acceptance length on the records that are set apart, and the highest of these."""

from collections.abc import Mapping
from typing import Any

from longspec.choose.set_apart import chosen_by
from longspec.evaluate.tasks import Settings
from longspec.report.estimates import FEWEST, acceptance, difference, drafted
from longspec.report.evaluations import Array, Evaluation

Row = dict[str, Any]


def figures(measured: Mapping[str, Evaluation], chosen_P: Array, seed: int) -> dict[str, Row]:
    """By stage its acceptance length over the chosen prompts, [P], with a 95 % interval over records.

    Empty where some stage has fewer than FEWEST records with a round: they say too little to choose by.
    """
    found = {stage: acceptance(lines, chosen_P, seed) for stage, lines in measured.items() if drafted(chosen_P, lines).any()}
    enough = [figure["documents"] >= FEWEST for figure in found.values()]
    return found if enough.count(True) == len(measured) else {}


def best_of(found: Mapping[str, Row]) -> str:
    """The stage with the highest mean, of equal ones the later; found: by stage, in the order of training."""
    return max(reversed(list(found)), key=lambda stage: float(found[stage]["mean"]))


def choice(measured: Mapping[str, Evaluation], settings: Settings, records: Mapping[str, list[int]]) -> Row:
    """The content of final_stage.json; the last stage, and all records to be told, where too few could be set apart.

    measured: of each stage in order; records: set apart, by dataset.
    """
    tasks, first = settings.data, next(iter(measured.values()))
    chosen_P = chosen_by(first, tasks, records)
    *_, last = measured
    found = figures(measured, chosen_P, settings.seed)
    if not found:
        counted = sum(len(lines) for lines in records.values())
        why = (
            f"the last stage: fewer than {FEWEST} records of {', '.join(tasks)} could be set apart to choose by ({counted}); "
            "raise evaluation.prompts, or held_out of their data"
        )
        return {"stage": last, "why": why, "figures": {}, "against_last": None, "prompts": {}, "records": {}}
    best = best_of(found)
    return {
        "stage": best,
        "why": "the highest acceptance length on records set apart; of equal ones the later stage's",
        "figures": found,
        "against_last": None if best == last else difference(measured[best], measured[last], chosen_P, settings.seed),
        "prompts": {task: int((first.of_task(task) & chosen_P).sum()) for task in tasks},
        "records": dict(records),
    }
