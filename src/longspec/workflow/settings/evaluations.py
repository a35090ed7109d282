"""Decide how each chosen run is measured: by `evaluation` of config/workflow.yaml, with the run's own keys instead."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longspec.config.faults import check, faults_in
from longspec.config.run_file import Run
from longspec.config.schema import mix_of
from longspec.data import presets
from longspec.measure import tasks
from longspec.measure.section import AUTO, Evaluation
from longspec.workflow.settings import datasets

SHORTEST = 16  # tokens of the shortest prompt, in tasks that no file defines


@dataclass(frozen=True)
class RunEvaluation:
    """Hold a run's evaluation. section: all keys, presets expanded; own: the keys in the run's file; tasks: by name."""

    run: Run
    section: dict[str, Any]
    own: frozenset[str]
    tasks: dict[str, tasks.Task]

    def file_of(self, key: str) -> str:
        """Return the file that sets a key of the section."""
        return self.run.file if key in self.own else datasets.FILE


def of_run(run: Run, settings: dict[str, Any], configs: Mapping[Any, Any], positions: int | None = None) -> RunEvaluation:
    """Return the evaluation of a run: keys in its file override those of config/workflow.yaml.

    A run without tasks is measured on held-out records of its training data. settings: of config/workflow.yaml, presets
    expanded; configs: of all stages, by (run, variant, stage); positions: of the target, None if unknown; they limit these
    prompts, so that the answer fits. Raises ValueError with the file and the key at fault.
    """
    own = dict(run.says.evaluation)
    if "tasks" not in own and (run.says.data or "tasks" not in settings["evaluation"]):
        recipes = [config.recipe for key, config in configs.items() if key[0] == run.name]
        rows = {name: recipe.data.sequence_length for recipe in recipes for name in mix_of(recipe.data.name)}
        asked = own.get("new_tokens", settings["evaluation"].get("new_tokens"))
        room = positions - asked - tasks.ROOM if positions and isinstance(asked, int) else None
        most = {name: max(SHORTEST, min(length * 3 // 4, length if room is None else room)) for name, length in rows.items()}
        own["tasks"] = {name: {"data": name, "context": [SHORTEST, end], "whole_questions": AUTO} for name, end in most.items()}
    return _checked(run, settings["evaluation"] | own, frozenset(own), run.file)


def apart(evaluation: RunEvaluation) -> RunEvaluation:
    """Return what a run measures apart: its evaluation, with the keys of `bench` overriding it. Raises ValueError."""
    bench = evaluation.section["bench"]
    section = {key: value for key, value in evaluation.section.items() if key != "bench"} | bench
    return _checked(evaluation.run, section, evaluation.own | bench.keys(), f"{evaluation.file_of('bench')}: bench")


def _checked(run: Run, section: dict[str, Any], own: frozenset[str], place: str) -> RunEvaluation:
    """Expand presets of tasks, and check the section's types and that its keys go together. Raises ValueError."""
    with faults_in(place):
        if "tasks" in section:
            section["tasks"] = presets.expand_all(section["tasks"], presets.TASK)
        check(Evaluation, section, "evaluation")
    found = RunEvaluation(run, section, own, {})
    try:
        found = replace(found, tasks=tasks.parse(section).tasks)
    except ValueError as error:
        files = dict.fromkeys(found.file_of(key) for key in section if f"evaluation.{key}" in str(error))
        raise ValueError(f"{', '.join(files) or datasets.FILE}: {error}") from None
    for name, task in found.tasks.items():
        if isinstance(task, tasks.Benchmark):
            datasets.prompt_files(name, task, found.file_of("tasks"))
    return found
