"""The plan of final drafts: which stage is published (`final` of a run's file), and how it is chosen."""

from pathlib import Path

from longspec.config.explain import did_you_mean
from longspec.workflow import paths
from longspec.workflow.choices import Choices
from longspec.workflow.measuring import MeasuringPlan

BEST, LAST = "best", "last"


class FinalsPlan(MeasuringPlan):
    """The choices, with an answer to each question about final drafts."""

    def choice(self, run: str, variant: str) -> list[str]:
        """The file that says which stage was chosen; none where the last one is taken."""
        return [paths.FINAL_STAGE.format(run=run, variant=variant)] if _chooses(self, run) else []

    def choosing_evaluations(self, run: str, variant: str) -> list[str]:
        """The measurements that the stage is chosen by: those of all stages, in order."""
        return [paths.EVALUATED.format(run=run, variant=variant, drafter=stage) for stage in self.stages[run]]

    def candidates(self, run: str, variant: str) -> list[str]:
        """The files of the drafts one of which is published: of all stages, or of the last one."""
        stages = self.stages[run] if _chooses(self, run) else self.stages[run][-1:]
        folders = [paths.stage_folder(run, variant, stage) for stage in stages]
        return [f"{folder}/draft/{name}" for folder in folders for name in paths.DRAFT_FILES]

    def published_option(self, choice: list[str], draft: list[str]) -> list[str | Path]:
        """The option of `draft final` that names the draft, or the choice among the stages'."""
        return ["--choice", *choice] if choice else ["--draft", self.draft_folder(draft)]

    def choice_lines(self) -> list[str]:
        """What a person is told before anything runs: of each choice that is still to be made."""
        return [
            f"{run}, {variant}: the draft of the best stage of {', '.join(self.stages[run])} is published, by the acceptance "
            f"on a quarter of the held-out records that are measured; config/run/{run}.yaml: final: {LAST} takes the last"
            for run in self.runs
            for variant in self.variants[run]
            if any(not Path(path).is_file() for path in self.choice(run, variant))
        ]


def check_finals(choices: Choices) -> None:
    """Raise ValueError, with the key, for a `final` that is none, that stages disagree on, or that nothing can be chosen by."""
    for (run, _, stage), config in choices.configs.items():
        key, first = f"config/run/{run}.yaml: final", _final(choices, run)
        if config.final not in (BEST, LAST):
            raise ValueError(f"{key}: {config.final!r} is unknown; {did_you_mean(config.final, [BEST, LAST])}")
        if config.final != first:
            raise ValueError(f"{key}: {first}, but {config.final} with stage '{stage}': a run has one; say it there alone")
    for run in choices.runs:
        if _chooses(choices, run) and not choices.evaluation_data(run):
            evaluation = choices.evaluation_of[run]
            raise ValueError(
                f"config/run/{run}.yaml: final: {BEST}: a stage is chosen by held-out records, and no task is of such: set it "
                f"to {LAST}, or add one to evaluation.tasks in {evaluation.file_of('tasks')}, such as own: "
                f"{{data: {choices.datasets_in_order(run)[0][0]}, context: [64, 448]}}"
            )


def _final(choices: Choices, run: str) -> str:
    """What a run's file says."""
    return str(choices.configs[run, choices.variants[run][0], choices.stages[run][0]].final)


def _chooses(choices: Choices, run: str) -> bool:
    """Whether there are several stages, one of which is chosen."""
    return _final(choices, run) == BEST and len(choices.stages[run]) > 1
