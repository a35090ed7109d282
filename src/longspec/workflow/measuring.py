"""Plan what is made of trained drafts: their evaluations, the report, final drafts, a comparison of two runs.

`final` in a run's file says which stage is published, and how it is chosen.
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
    """Answer the questions of the rules that come after training, from the choices."""

    measured = "evaluation"  # name of the measurements' folder

    def evaluation_settings(self, run: str, drafter: str | None = None) -> str:
        """Return a run's evaluation section as canonical JSON, without `bench` and the draft vocabulary (a job has its file).

        drafter: measured with it. Only WITH_LOOKUP gets `with_lookup`, so that a change of it keeps other drafters' figures.
        This project's own engine is left out, so that measurements from before there was a choice stay valid.
        """
        section = self.evaluation_of[run].section
        left_out = {"draft_vocabulary", "bench"}
        left_out |= {"engine", "serve_python"} if section.get("engine", OURS) == OURS else set()
        left_out |= set() if drafter == WITH_LOOKUP else {"with_lookup"}
        return json.dumps({key: value for key, value in section.items() if key not in left_out}, sort_keys=True)

    def report_settings(self, run: str) -> str:
        """Return the whole section, for a report."""
        return self.evaluation_settings(run, WITH_LOOKUP)

    def gates(self, run: str) -> str:
        """Return the gates as canonical JSON: a run's file overrides config/workflow.yaml."""
        return json.dumps(self.settings["gates"] | self.files[run].says.gates, sort_keys=True)

    def task_files(self, run: str) -> list[Any]:
        """Return the files of a run's tasks without held-out records; for the hub, the manifests of fetched files."""
        tasks = self.evaluation_of[run].tasks
        found: set[Any] = set()
        for name, task in tasks.items():
            if isinstance(task, Benchmark):
                manifest = manifest_of(task)
                found |= set(prompt_files(name, task)) if manifest is None else {manifest}
        return sorted(found)

    @property
    def hub_prompts(self) -> dict[str, Benchmark]:
        """Return folder name in data/hub/ -> task, for tasks whose prompts are fetched from the hub."""
        tasks = [task for each in self.evaluation_of.values() for task in each.tasks.values() if isinstance(task, Benchmark)]
        return {manifest.parent.name: task for task in tasks if (manifest := manifest_of(task)) is not None}

    def drafter_recipe(self, run: str, variant: str, drafter: str = IMPORTED) -> str:
        """Return the recipe that shapes a drafter: its stage's, or the first stage's for a drafter without a stage.

        The published draft has its own settings, next to its weights.
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
        """Return the evaluation's options that name the drafter. draft: its files, [] for a baseline."""
        told = ["--drafter", drafter]
        return [*told, "--draft", Path(draft[0]).parent] if draft else told

    def evaluations(self, run: str) -> list[str]:
        """Return the measurements a report compares, for every variant: baselines, the draft it begins with, every stage, and
        the published draft with prompt lookup.
        """
        beside = [WITH_LOOKUP] if self.evaluation_of[run].section.get("with_lookup") is not None else []
        return [
            paths.MEASURED.format(run=run, variant=variant, measured=self.measured, drafter=drafter)
            for variant in self.variants[run]
            for drafter in [*BASELINES, *self.begun_with(run, variant), *self.stages[run], *beside]
        ]

    def report_records(self, run: str) -> list[str]:
        """Return the raw records a report describes: those trained on and those evaluated on."""
        return [paths.RAW.format(dataset=name) for name in sorted(self.trained_on_by(run).union(self.evaluation_data(run)))]

    def report_variants(self, run: str) -> list[str]:
        """Return the report's options with the folder of each variant."""
        return [f"--variant {variant}=results/{run}/{variant}" for variant in self.variants[run]]

    def final_drafts(self, run: str) -> list[str]:
        """Return the provenance.json of the final draft of every variant of a run."""
        return [f"{paths.FINAL_DRAFT}/provenance.json".format(run=run, variant=variant) for variant in self.variants[run]]

    def all_final_drafts(self) -> list[str]:
        """Return the declared output files of every final draft of the chosen runs."""
        folders = [Path(path).parent for run in self.runs for path in self.final_drafts(run)]
        return [str(folder / name) for folder in folders for name in paths.FINAL_FILES]

    def compared_page(self) -> str:
        """Return the page that compares the two chosen runs. Raises ValueError unless there are two, with one target, measured
        in the same way.
        """
        if len(self.runs) != 2:
            raise ValueError(
                f"runs: {', '.join(self.runs)}: two runs can be compared; choose them: snakemake compare --config 'runs=[a,b]'"
            )
        first, second = self.runs
        if (one_target := self.model_of(first)) != (other_target := self.model_of(second)):
            raise ValueError(f"runs: {first}, {second}: draft for {one_target} and for {other_target}; give runs of one target")
        engine = {"engine": OURS, "serve_python": None}  # evaluation_settings may leave these out
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
        """Return the file with the choice of the stage; [] if the last stage is published."""
        return [paths.FINAL_STAGE.format(run=run, variant=variant)] if _chooses(self, run) else []

    def choosing_evaluations(self, run: str, variant: str) -> list[str]:
        """Return the measurements that choose the stage: those of all stages, in order."""
        each = {"run": run, "variant": variant, "measured": self.measured}
        return [paths.MEASURED.format(**each, drafter=stage) for stage in self.stages[run]]

    def candidates(self, run: str, variant: str) -> list[str]:
        """Return the files of the drafts that may be published: of all stages, or of the last one."""
        stages = self.stages[run] if _chooses(self, run) else self.stages[run][-1:]
        return [f"{paths.stage_folder(run, variant, stage)}/draft/{name}" for stage in stages for name in paths.DRAFT_FILES]

    def published_option(self, choice: list[str], draft: list[str]) -> list[str | Path]:
        """Return `draft final`'s option: the draft, or the file with the choice."""
        return ["--choice", *choice] if choice else ["--draft", Path(draft[0]).parent]


def check_finals(choices: Choices) -> None:
    """Raise ValueError, with the key, if `final` needs held-out records to choose by and no task has any."""
    for run in choices.runs:
        if _chooses(choices, run) and not choices.evaluation_data(run):
            evaluation = choices.evaluation_of[run]
            raise ValueError(
                f"{choices.files[run].file}: final: {BEST}: a stage is chosen by held-out records, and no task is of such: set "
                f"it to {LAST}, or add one to evaluation.tasks in {evaluation.file_of('tasks')}, such as own: "
                f"{{data: {min(choices.trained_on_by(run))}, context: [64, 448]}}"
            )


def _chooses(choices: Choices, run: str) -> bool:
    """Tell whether a run's published stage is chosen among several."""
    return choices.files[run].says.final == BEST and len(choices.stages[run]) > 1
