"""Plan what is made of trained drafts: their evaluations, the report, final drafts, a comparison of two runs.

Which stage is published, and how it is chosen, says `final` of a run's file.
"""

import json
from pathlib import Path
from typing import Any

from longspec.config import differences
from longspec.config.names import BASELINES, IMPORTED, WITH_LOOKUP
from longspec.engines import OURS
from longspec.measure.prompt_files import manifest_of
from longspec.measure.tasks import Benchmark
from longspec.workflow import paths
from longspec.workflow.choices import Choices
from longspec.workflow.settings.datasets import prompt_files

BEST, LAST = "best", "last"


class MeasuringPlan(Choices):
    """Hold the choices, with an answer to each question of a rule that comes after the training."""

    measured = "evaluation"  # the folder of measurements

    def evaluation_settings(self, run: str, drafter: str | None = None) -> str:
        """Return a run's evaluation section as canonical JSON, less `bench` and the draft vocabulary, whose file a job has.

        drafter: the one that is measured by it; `with_lookup` is told to WITH_LOOKUP alone, so that the others' figures hold
        whatever it is. So that what was measured before there was a choice holds, this project's own engine is not told.
        """
        section = self.evaluation_of[run].section
        left_out = {"draft_vocabulary", "bench"}
        left_out |= {"engine", "serve_python"} if section.get("engine", OURS) == OURS else set()
        left_out |= set() if drafter == WITH_LOOKUP else {"with_lookup"}
        return json.dumps({key: value for key, value in section.items() if key not in left_out}, sort_keys=True)

    def report_settings(self, run: str) -> str:
        """Return the whole section, by which a report is made."""
        return self.evaluation_settings(run, WITH_LOOKUP)

    def gates(self, run: str) -> str:
        """Return the gates of config/workflow.yaml, with those that a run's file has in their place, as canonical JSON."""
        return json.dumps(self.settings["gates"] | self.files[run].says.gates, sort_keys=True)

    def task_files(self, run: str) -> list[Any]:
        """Return the files of a run's tasks whose prompts are no held-out records; of the hub the fetched files' manifests."""
        tasks = self.evaluation_of[run].tasks
        found: set[Any] = set()
        for name, task in tasks.items():
            if isinstance(task, Benchmark):
                manifest = manifest_of(task)
                found |= set(prompt_files(name, task)) if manifest is None else {manifest}
        return sorted(found)

    @property
    def hub_prompts(self) -> dict[str, Benchmark]:
        """Return the tasks whose prompts are fetched from the hub, by the names of their folders in data/hub/."""
        tasks = [task for each in self.evaluation_of.values() for task in each.tasks.values() if isinstance(task, Benchmark)]
        return {manifest.parent.name: task for task in tasks if (manifest := manifest_of(task)) is not None}

    def drafter_recipe(self, run: str, variant: str, drafter: str = IMPORTED) -> str:
        """Return the recipe that shapes a drafter: its own stage's, or the first stage's for those of no stage.

        The published draft has settings of its own beside its weights.
        """
        stages = self.stages[run]
        return f"{paths.stage_folder(run, variant, drafter if drafter in stages else stages[0])}/recipe.yaml"

    def drafter_weights(self, run: str, variant: str, drafter: str) -> list[str]:
        """Return the files of a drafter; none for the baselines."""
        if drafter in BASELINES:
            return []
        folder = f"{paths.stage_folder(run, variant, drafter)}/draft"
        if drafter == WITH_LOOKUP:
            folder = paths.FINAL_DRAFT.format(run=run, variant=variant)
        return [f"{folder}/{name}" for name in ("model.safetensors", "config.json")]

    def drafter_options(self, drafter: str, draft: list[str]) -> list[Any]:
        """Return the evaluation's options that name the drafter. draft: its files, none for a baseline."""
        told = ["--drafter", drafter]
        return [*told, "--draft", Path(draft[0]).parent] if draft else told

    def evaluations(self, run: str) -> list[str]:
        """Return the measurements a report compares, for every variant: baselines, the draft that is begun with, every stage,
        and the published draft with prompt lookup.
        """
        beside = [WITH_LOOKUP] if self.evaluation_of[run].section.get("with_lookup") is not None else []
        return [
            paths.MEASURED.format(run=run, variant=variant, measured=self.measured, drafter=drafter)
            for variant in self.variants[run]
            for drafter in [*BASELINES, *self.begun_with(run, variant), *self.stages[run], *beside]
        ]

    def report_records(self, run: str) -> list[str]:
        """Return the raw records a report tells of: trained on or evaluated on."""
        names = self.trained_on_by(run).union(self.evaluation_data(run))
        return [paths.RAW.format(dataset=name) for name in sorted(names)]

    def report_variants(self, run: str) -> list[str]:
        """Return the folders a report reads, by variant."""
        return [f"--variant {variant}=results/{run}/{variant}" for variant in self.variants[run]]

    def final_drafts(self, run: str) -> list[str]:
        """Return the final draft of every variant of a run."""
        folders = [paths.FINAL_DRAFT.format(run=run, variant=variant) for variant in self.variants[run]]
        return [f"{folder}/provenance.json" for folder in folders]

    def all_final_drafts(self) -> list[str]:
        """List the declared files of every final draft of the chosen runs."""
        folders = [Path(path).parent for run in self.runs for path in self.final_drafts(run)]
        return [str(folder / name) for folder in folders for name in paths.FINAL_FILES]

    def compared_page(self) -> str:
        """Return the page of the two chosen runs. Raises ValueError when they are not two, for two targets, and for keys in
        which they are measured otherwise.
        """
        if len(self.runs) != 2:
            raise ValueError(
                f"runs: {', '.join(self.runs)}: two runs can be compared; choose them: snakemake compare --config 'runs=[a,b]'"
            )
        first, second = self.runs
        if (one_target := self.model_of(first)) != (other_target := self.model_of(second)):
            raise ValueError(
                f"runs: {first}, {second}: draft for {one_target} and for {other_target}; give two runs of one target"
            )
        engine = {"engine": OURS, "serve_python": None}  # evaluation_settings leaves out what it need not say
        one, other = (engine | json.loads(self.evaluation_settings(run)) for run in self.runs)
        if changed := differences(one, other, "evaluation."):
            keys = [key for key in one | other if one.get(key) != other.get(key)]
            files = dict.fromkeys(self.evaluation_of[run].file_of(key) for key in keys for run in self.runs)
            raise ValueError(
                f"runs: {first}, {second}: are measured in two ways ({first} -> {second}): {'; '.join(changed)}; they say so "
                f"in {' and '.join(files)}: give both the same"
            )
        return f"{paths.COMPARED}.html".format(first=first, second=second)

    # The stage that is published.

    def choice(self, run: str, variant: str) -> list[str]:
        """Return the file that says which stage was chosen; none where the last one is taken."""
        return [paths.FINAL_STAGE.format(run=run, variant=variant)] if _chooses(self, run) else []

    def choosing_evaluations(self, run: str, variant: str) -> list[str]:
        """Return the measurements that the stage is chosen by: those of all stages, in order."""
        each = {"run": run, "variant": variant, "measured": self.measured}
        return [paths.MEASURED.format(**each, drafter=stage) for stage in self.stages[run]]

    def candidates(self, run: str, variant: str) -> list[str]:
        """Return the files of the drafts one of which is published: of all stages, or of the last one."""
        stages = self.stages[run] if _chooses(self, run) else self.stages[run][-1:]
        folders = [paths.stage_folder(run, variant, stage) for stage in stages]
        return [f"{folder}/draft/{name}" for folder in folders for name in paths.DRAFT_FILES]

    def published_option(self, choice: list[str], draft: list[str]) -> list[str | Path]:
        """Return the option of `draft final` that names the draft, or the choice among the stages'."""
        return ["--choice", *choice] if choice else ["--draft", Path(draft[0]).parent]


def check_finals(choices: Choices) -> None:
    """Raise ValueError, with the key, for a `final` that nothing can be chosen by."""
    for run in choices.runs:
        if _chooses(choices, run) and not choices.evaluation_data(run):
            evaluation = choices.evaluation_of[run]
            raise ValueError(
                f"{choices.files[run].file}: final: {BEST}: a stage is chosen by held-out records, and no task is of such: set "
                f"it to {LAST}, or add one to evaluation.tasks in {evaluation.file_of('tasks')}, such as own: "
                f"{{data: {min(choices.trained_on_by(run))}, context: [64, 448]}}"
            )


def _chooses(choices: Choices, run: str) -> bool:
    """Tell whether there are several stages, one of which is chosen."""
    return choices.files[run].says.final == BEST and len(choices.stages[run]) > 1
