"""How each chosen run is measured: `evaluation` of config/workflow.yaml, or in its place what the run's own file says."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from longspec.config.faults import faults_in
from longspec.config.run_file import Run
from longspec.data import presets
from longspec.measure import tasks
from longspec.measure.section import AUTO, Evaluation
from longspec.workflow.settings import datasets
from longspec.workflow.settings.workflow_file import check_values

SHORTEST = 16  # tokens of a prompt of a task that no file names


@dataclass(frozen=True)
class RunEvaluation:
    """run: its file; section: the whole one, presets laid out; own: the keys that the run's file has; tasks: by name."""

    run: Run
    section: dict[str, Any]
    own: frozenset[str]
    tasks: dict[str, tasks.Task]

    def file_of(self, key: str) -> str:
        """The file in which a key of the section stands."""
        return _file_of(self.run, self.own, key)


def of_run(run: Run, settings: dict[str, Any], configs: Mapping[Any, Any]) -> RunEvaluation:
    """The evaluation of a run: each key that its file has takes the place of that of config/workflow.yaml.

    A run without tasks is measured on held-out records of the data that it trains on. settings: of config/workflow.yaml,
    presets laid out; configs: of all stages, by (run, variant, stage). Raises ValueError with the file and the key at fault.
    """
    own = copy.deepcopy(run.says.evaluation)
    if "tasks" not in own and (run.says.data or "tasks" not in settings["evaluation"]):
        own["tasks"] = tasks_of(run, configs)
    section = settings["evaluation"] | own
    if own:
        _lay_out(section, run.file)
    return _parsed(run, section, frozenset(own))


def tasks_of(run: Run, configs: Mapping[Any, Any]) -> dict[str, Any]:
    """A task for each data set that a run trains on: held-out records, up to three quarters of a row; questions asked whole."""
    rows = {
        config.recipe.data.name: config.recipe.data.sequence_length for key, config in configs.items() if key[0] == run.name
    }
    return {
        name: {"data": name, "context": [SHORTEST, max(SHORTEST, length * 3 // 4)], "whole_questions": AUTO}
        for name, length in rows.items()
    }


def apart(evaluation: RunEvaluation) -> RunEvaluation:
    """What a run measures apart: its evaluation, with each key of `bench` in place of its own. Raises ValueError as of_run."""
    bench = evaluation.section["bench"]
    section = {key: value for key, value in evaluation.section.items() if key != "bench"} | bench
    _lay_out(section, f"{evaluation.file_of('bench')}: bench")
    return _parsed(evaluation.run, section, evaluation.own | frozenset(bench))


def _lay_out(section: dict[str, Any], place: str) -> None:
    """Put presets of tasks in their place, and hold the section against its types."""
    with faults_in(place):
        if "tasks" in section:
            section["tasks"] = presets.expand_all(section["tasks"], presets.TASK)
        check_values(section, Evaluation, "evaluation")


def _parsed(run: Run, section: dict[str, Any], own: frozenset[str]) -> RunEvaluation:
    try:
        parsed = tasks.parse(section).tasks
    except ValueError as error:
        files = dict.fromkeys(_file_of(run, own, key) for key in section if f"evaluation.{key}" in str(error))
        raise ValueError(f"{', '.join(files) or datasets.FILE}: {error}") from None
    found = RunEvaluation(run, section, own, parsed)
    for name, task in parsed.items():
        if isinstance(task, tasks.Benchmark):
            datasets.prompt_files(name, task, found.file_of("tasks"))
    return found


def _file_of(run: Run, own: Collection[str], key: str) -> str:
    return run.file if key in own else datasets.FILE
