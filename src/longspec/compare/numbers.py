"""The comparison's numbers: second run minus first, paired on the prompts both decoded. Suffix: P prompts."""

from typing import Any

import numpy as np
from omegaconf import OmegaConf

from longspec import methods
from longspec.compare.pairs import Pair
from longspec.config import plain
from longspec.report.estimates import acceptance, difference
from longspec.report.growth_plot import estimates
from longspec.report.inputs import Settings, Stage, Variant
from longspec.report.loss_plot import curves, smooth
from longspec.report.numbers import by_context, by_position, by_task, lossless, overall, speed, speed_by_task
from longspec.report.tables import flatten

Row = dict[str, Any]
# Settings: which draft's loss it is, on which text, and how much of it in a step; the method names those of its own.
DECIDE_LOSS = ("method.name", "data", "global_batch")
HIDDEN = ("stages.",)  # what provenance says of each stage stands in the recipes


def acceptances(pair: Pair, settings: Settings) -> list[Row]:
    """For each drafter and task, and all tasks (task None): both acceptance lengths and the paired difference."""
    rows = []
    for name, (first, second) in pair.drafters.items():
        for task in (*settings.tasks, None):
            chosen_P = np.ones(len(first["task"]), bool) if task is None else first.of_task(task)
            both = {
                "first": acceptance(first, chosen_P, settings.seed),
                "second": acceptance(second, chosen_P, settings.seed),
            }
            found = difference(second, first, chosen_P, settings.seed)
            rows.append({"drafter": name, "task": task} | both | {key: found[key] for key in ("difference", "low", "high")})
    return rows


def recipe_differences(pair: Pair) -> list[Row]:
    """The settings in which a stage's recipe differs between the runs; a stage of one run alone is a row without key."""
    first, second = ({stage.name: stage for stage in run.stages} for run in pair.runs)
    rows = []
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            rows.append({"stage": name, "key": None, "first": name in first, "second": name in second})
            continue
        for key, one, other in differing(_recipe(first[name]), _recipe(second[name])):
            rows.append({"stage": name, "key": key, "first": one, "second": other})
    return rows


def _recipe(stage: Stage) -> Row:
    return flatten(plain(stage.recipe))


def differing(first: Row, second: Row) -> list[tuple[str, Any, Any]]:
    """Key and both values wherever they differ; None for a key that one has not."""
    keys = dict.fromkeys([*first, *second])
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def training(pair: Pair) -> list[Row]:
    """Data of each stage of both runs, and losses in nats a token: means over the first and the last twelfth of its steps."""
    return [{"run": run.name, "stage": stage.name} | _trained(stage) for run in pair.runs for stage in run.stages]


def _trained(stage: Stage) -> Row:
    part, ends = max(1, len(stage.metrics) // 12), {}
    for key, name, rows in (
        ("first_loss", "loss", stage.metrics[:part]),
        ("loss", "loss", stage.metrics[-part:]),
        ("llm_loss", "llm_loss", stage.metrics[-part:]),
    ):
        finite = [row[name] for row in rows if np.isfinite(row[name])]
        ends[key] = float(np.mean(finite)) if finite else None
    sums = {name: sum(row[name] for row in stage.metrics) for name in ("tokens", "labels")}
    return {"steps": len(stage.metrics), **sums, "seconds": stage.seconds, **ends}


def sooner(pair: Pair) -> list[Row]:
    """For each stage of both runs: the loss at which the higher one ends, and the step from which on the other is as low.

    Of the smoothed losses that the page draws. `times`: the higher one's steps over that step. All None beside the stage where
    a run has no finite loss, and where the recipes' losses ask different things or come from other steps.
    """
    rows = []
    for name in pair.stages:
        stages = {run.name: next(s for s in run.stages if s.name == name) for run in pair.runs}
        found = {run: curves(stage)[:2] for run, stage in stages.items()}
        row: Row = {"stage": name} | dict.fromkeys(("loss", "higher", "steps", "lower", "step", "times"))
        asked = [_decides_loss(stage.recipe) for stage in stages.values()]
        if asked[0] == asked[1] and all(len(loss_T) for _, loss_T in found.values()):
            smoothed = {run: smooth(loss_T) for run, (_, loss_T) in found.items()}
            lower, higher = sorted(smoothed, key=lambda run: float(smoothed[run][-1]))
            loss, steps = float(smoothed[higher][-1]), int(found[higher][0][-1])
            above = np.flatnonzero(smoothed[lower] > loss)
            step = int(found[lower][0][above[-1] + 1 if len(above) else 0])
            row |= {"loss": loss, "higher": higher, "steps": steps, "lower": lower, "step": step, "times": steps / step}
        rows.append(row)
    return rows


def _decides_loss(recipe: Any) -> list[Any]:
    """The values without which two losses cannot be compared."""
    own = methods.settings_of(recipe.method.name).DECIDE_LOSS
    return [OmegaConf.select(recipe, key) for key in (*DECIDE_LOSS, *own)]


def provenance_differences(pair: Pair) -> list[Row]:
    """Keys whose values differ between the final drafts' provenance, without those of the stages."""
    rows = differing(*(flatten(run.provenance) for run in pair.runs))
    return [{"key": key, "first": one, "second": other} for key, one, other in rows if not key.startswith(HIDDEN)]


def _by_run(run: Variant, settings: Settings) -> Row:
    return {
        "variants": by_task(run, settings),
        "overall": overall(run, settings),
        "by_context": by_context(run, settings),
        "by_position": by_position(run, settings),
        "speed": speed(run, settings),
        "speed_by_task": speed_by_task(run, settings),
        "lossless": lossless(run),
    }


def compare_numbers(pairs: list[Pair], settings: Settings) -> Row:
    """All numbers that the page shows, which are the content of its JSON file. Figures of one run stand by its name."""
    compared = {}
    for pair in pairs:
        parts: Row = {}
        for run in pair.runs:
            for key, value in _by_run(run, settings).items():
                parts.setdefault(key, {})[run.name] = value
        parts |= {"acceptance": acceptances(pair, settings), "finals": pair.finals}
        parts |= {"training": training(pair), "sooner": sooner(pair)}
        parts["training_estimates"] = {run.name: {stage.name: estimates(stage) for stage in run.stages} for run in pair.runs}
        parts |= {"recipe_differences": recipe_differences(pair), "provenance_differences": provenance_differences(pair)}
        compared[pair.variant] = parts
    return {"runs": [run.name for run in pairs[0].runs], "variants": compared}
