"""Two runs compared: one variant as both trained it, or one of each; second run minus first, paired on the prompts both
decoded. Suffix: P prompts.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from longspec import methods
from longspec.config import plain
from longspec.config.names import BASELINES
from longspec.evaluate.tasks import Settings
from longspec.report.estimates import acceptance, difference
from longspec.report.evaluations import Evaluation, check_pairs
from longspec.report.inputs import Stage, Variant, read_variant, records_that_chose
from longspec.report.numbers import by_part, figures_of
from longspec.report.tables import flatten
from longspec.report.training_curves import curves, smooth

FINAL = "final draft"


@dataclass(frozen=True)
class Pair:
    """Variants of the first and the second run, mostly of one name; in `runs` each is named after its run."""

    variants: tuple[str, str]
    runs: tuple[Variant, Variant]

    @property
    def variant(self) -> str:
        """The pair's name."""
        return "-and-".join(dict.fromkeys(self.variants))

    @property
    def mixed(self) -> str:
        """A sentence for a pair of two names; empty for one."""
        if len(set(self.variants)) == 1:
            return ""
        one, other = (f"{variant} of {run.name}" for variant, run in zip(self.variants, self.runs, strict=True))
        return f"{one} is compared with {other}: the runs share no variant of these names."

    @property
    def drafters(self) -> dict[str, tuple[Evaluation, Evaluation]]:
        """Evaluations to compare, by name: the final drafts, then the other drafters that both runs have, baselines last."""
        first, second = self.runs
        found = {self.finals: (first.evaluations[first.final], second.evaluations[second.final])}
        return found | {name: (first.evaluations[name], second.evaluations[name]) for name in (*self.stages, *BASELINES)}

    @property
    def finals(self) -> str:
        """The name under which the final drafts are compared: their stage's, or another where these differ."""
        first, second = self.runs
        return first.final if first.final == second.final else FINAL

    @property
    def stages(self) -> dict[str, tuple[Stage, Stage]]:
        """The stages that both runs have, by name."""
        first, second = ({stage.name: stage for stage in run.stages} for run in self.runs)
        return {name: (stage, second[name]) for name, stage in first.items() if name in second}


def read_pair(variants: tuple[str, str], runs: list[tuple[str, Path]], settings: Settings) -> Pair:
    """Both runs' files. Raises ValueError when these are not two runs, one is not there, or they met different prompts."""
    names = [name for name, _ in runs]
    if len(runs) != 2 or len(set(names)) != 2:
        raise ValueError(f"--run: {', '.join(names)}: give two different runs, --run a=results/a --run b=results/b")
    for name, folder in runs:
        if not folder.is_dir():
            raise ValueError(
                f"--run {name}: there is no folder {folder}; correct the name, or train the run: "
                f"snakemake final_draft --config 'runs=[{name}]'"
            )
    folders = [folder / variant for variant, (_, folder) in zip(variants, runs, strict=True)]
    records = records_that_chose(folders)
    first, second = (
        replace(read_variant(folder.name, folder, settings, records=records), name=name)
        for name, folder in zip(names, folders, strict=True)
    )
    pair = Pair(variants, (first, second))
    for one, other in pair.drafters.values():
        check_pairs(one, other)
    return pair


Row = dict[str, Any]
# Settings: which draft's loss it is, on which text, and how much of it in a step; the method names those of its own.
DECIDE_LOSS = ("method.name", "data", "global_batch")
HIDDEN = ("stages.",)  # what provenance says of each stage stands in the recipes


def acceptances(pair: Pair, settings: Settings) -> list[Row]:
    """For each drafter and task, and all tasks (task None): both acceptance lengths and the paired difference."""
    rows = []
    for name, (first, second) in pair.drafters.items():
        for task in (*settings.tasks, None):
            chosen_P = first.of_task(task)
            both = {key: acceptance(one, chosen_P, settings.seed) for key, one in (("first", first), ("second", second))}
            found = difference(second, first, chosen_P, settings.seed)
            rows.append({"drafter": name, "task": task} | both | {key: found[key] for key in ("difference", "low", "high")})
    return rows


def recipe_differences(pair: Pair) -> list[Row]:
    """The settings in which a stage's recipe differs between the runs; a stage of one run alone is a row without key."""
    first, second = ({stage.name: stage for stage in run.stages} for run in pair.runs)
    rows: list[Row] = []
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            rows.append({"stage": name, "key": None, "first": name in first, "second": name in second})
        else:
            rows += [{"stage": name} | row for row in differing(plain(first[name].recipe), plain(second[name].recipe))]
    return rows


def differing(first: Any, second: Any) -> list[Row]:
    """Dotted key and both values wherever two nested mappings differ; None for a key that one has not."""
    one, other = flatten(first), flatten(second)
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    return [{"key": key, "first": one.get(key), "second": other.get(key)} for key in keys]


def training(pair: Pair) -> list[Row]:
    """Data of each stage of both runs, and losses in nats a token: means over the first and the last twelfth of its steps."""
    return [{"run": run.name, "stage": stage.name} | _trained(stage) for run in pair.runs for stage in run.stages]


def _trained(stage: Stage) -> Row:
    def mean(name: str, rows: list[Row]) -> float | None:
        finite = [row[name] for row in rows if np.isfinite(row[name])]
        return float(np.mean(finite)) if finite else None

    part = max(1, len(stage.metrics) // 12)
    first, last = stage.metrics[:part], stage.metrics[-part:]
    ends = {"first_loss": mean("loss", first), "loss": mean("loss", last), "llm_loss": mean("llm_loss", last)}
    return {"steps": len(stage.metrics)} | {name: stage.total(name) for name in ("tokens", "labels", "seconds")} | ends


def sooner(pair: Pair) -> list[Row]:
    """For each stage of both runs: the loss at which the higher one ends, and the step from which on the other is as low.

    Of the smoothed losses that the page draws. `times`: the higher one's steps over that step. All None beside the stage where
    a run has no finite loss, and where the recipes' losses ask different things or come from other steps.
    """
    rows = []
    for name, stages in pair.stages.items():
        row: Row = {"stage": name} | dict.fromkeys(("loss", "higher", "steps", "lower", "step", "times"))
        found = {run.name: curves(stage)[:2] for run, stage in zip(pair.runs, stages, strict=True)}
        asked = [_decides_loss(stage.recipe) for stage in stages]
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
    first, second = pair.runs
    return [row for row in differing(first.provenance, second.provenance) if not row["key"].startswith(HIDDEN)]


def compare_numbers(pairs: list[Pair], settings: Settings) -> Row:
    """All numbers that the page shows, which are the content of its JSON file. Figures of one run stand by its name."""
    compared = {
        pair.variant: by_part({run.name: figures_of(run, settings) for run in pair.runs})
        | {
            "acceptance": acceptances(pair, settings),
            "finals": pair.finals,
            "training": training(pair),
            "sooner": sooner(pair),
            "recipe_differences": recipe_differences(pair),
            "provenance_differences": provenance_differences(pair),
        }
        for pair in pairs
    }
    return {"runs": [run.name for run in pairs[0].runs], "variants": compared}
