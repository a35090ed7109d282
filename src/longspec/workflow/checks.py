"""From the settings of config/workflow.yaml to a checked plan.

Errors are found here, before there is a graph: an error inside a function that Snakemake calls for a job's input goes unseen
if the job's output already exists. Each message names the key and the fix.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.config import CONFIG_DIR, faults
from longspec.config.run_file import Run, name_of, target_of
from longspec.data import presets
from longspec.engines import ENGINES, OURS, VLLM
from longspec.measure import tasks
from longspec.workflow import paths
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.choices import Choices
from longspec.workflow.measuring import check_finals
from longspec.workflow.plan import Plan
from longspec.workflow.settings import datasets, evaluations, runs, targets
from longspec.workflow.settings.workflow_file import Dataset, Gates, WorkflowFile


def checked_plan(settings: dict[str, Any], config_dir: Path = CONFIG_DIR) -> Plan:
    """Return a plan with all choices of the settings, composed. Raises ValueError for the first error."""
    shared = _checked_settings(settings)
    for name in shared["variants"]:
        runs.check_choice("variants", name, "variant", config_dir)
    files, variants, configs = runs.with_lenders(shared["runs"], shared["variants"], config_dir)
    settings = _checked_settings(data_of_runs(settings, files.values()))
    settings["runs"] = [name_of(run) for run in settings["runs"]]
    runs.check_models(configs)
    for run in settings["runs"]:
        with faults.faults_in(files[run].file):
            faults.check(Gates, settings["gates"] | files[run].says.gates, "gates")
    of_first = {run: config for (run, _, _), config in reversed(configs.items())}
    measured: dict[str, evaluations.RunEvaluation] = {}
    for run in settings["runs"]:
        (layers, _, positions), (facts, _) = targets.sizes_of(of_first[run]), target_of(files[run], [config_dir])
        positions = facts.positions if layers is None and facts is not None else positions  # else the target is there
        measured[run] = evaluations.of_run(files[run], settings, configs, positions)
    plan = Plan(settings, files, variants, configs, measured)
    runs.check_own_data(plan)
    runs.check_replays(plan)
    check_finals(plan)
    targets.check_beginnings(plan)
    runs.check_lenders(plan)
    _check_measured(plan)
    return plan


def _check_measured(plan: Plan) -> None:
    """Check targets, data, answers and prompts, and how the plan's runs are measured. Raises ValueError."""
    _check_engines(plan)
    runs.check_targets(plan.configs, plan.evaluation_of)
    datasets.check_data(plan.datasets_in_use(), plan.data, plan.files.values())
    files = [datasets.FILE, *(run.file for run in plan.files.values() if run.says.data)]
    with faults.faults_in(" or ".join(files)):
        AnswersPlan(plan)
    _check_answered(plan)
    for each in plan.evaluation_of.values():
        datasets.check_task_files(each.tasks, plan.datasets_trained_on(), plan.data, each.file_of("tasks"))


def check_prompts(plan: Plan) -> None:
    """Raise ValueError if a task's prompts lack a field that its template asks for. This opens the files."""
    for each in plan.evaluation_of.values():
        datasets.check_prompts(each.tasks, each.file_of("tasks"))


def data_of_runs(settings: dict[str, Any], known: Iterable[Run]) -> dict[str, Any]:
    """Return the settings with the data sets of the known runs' own files added to those of config/workflow.yaml.

    Raises ValueError, with the run's file, for a wrong key and for two data sets with one name.
    """
    data = dict(settings["data"])
    for run in known:
        with faults.faults_in(run.file):
            for dataset, entry in datasets.entries_of(run.says.data).items():
                faults.check(Dataset, presets.expand(dataset, entry), f"data.{dataset}")
                if data.setdefault(dataset, entry) != entry:
                    raise ValueError(
                        f"data.{dataset}: another data set has this name, in {datasets.FILE} or another run; rename it, in a "
                        "run that is not trained yet"
                    )
    return settings | {"data": data}


def _checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with presets expanded. Raises ValueError for keys that do not fit their types."""
    laid_out = {key: value for key, value in settings.items() if key != "run"}
    laid_out |= {"runs": [settings["run"]]} if "run" in settings else {}
    with faults.faults_in(datasets.FILE):
        if "data" in settings:
            laid_out["data"] = presets.expand_all(settings["data"], presets.DATA)
        evaluation = settings.get("evaluation")
        if isinstance(evaluation, dict) and "tasks" in evaluation:
            laid_out["evaluation"] = evaluation | {"tasks": presets.expand_all(evaluation["tasks"], presets.TASK)}
        faults.check(WorkflowFile, laid_out)
    return laid_out


def _check_engines(plan: Plan) -> None:
    """Raise ValueError for drafts that the chosen engine does not load, and for a missing interpreter."""
    for run, measured in plan.evaluation_of.items():
        section = measured.section
        if section.get("engine", OURS) == OURS:
            if "engine" not in measured.own and section.get("serve_python") is not None:
                raise ValueError(
                    f"{measured.file_of('serve_python')}: evaluation.serve_python: {section['serve_python']}: is of no engine; "
                    f"set evaluation.engine to the one that it has, such as {VLLM}, or give null"
                )
            continue
        engine = ENGINES[section["engine"]]
        chain = max((shape for shape in section["shapes"] if isinstance(shape, int)), default=0)
        # Only the evaluation reads the files, so tasks without a limit are not counted.
        limited = [task for task in measured.tasks.values() if isinstance(task, tasks.HeldOut) or task.longest]
        longest = max((task.most_tokens + chain for task in limited), default=0)
        if section.get("draft_vocabulary") is not None:
            raise ValueError(
                f"{measured.file_of('draft_vocabulary')}: evaluation.draft_vocabulary: {section['draft_vocabulary']}: "
                f"{engine.title} drafts over the tokens that a draft was trained with; give null, or evaluation.engine: {OURS}"
            )
        for variant in plan.variants[run]:
            recipe = plan.first_recipe(run, variant)
            try:
                served = methods.served(recipe.method.name, engine.name)
                with faults.faults_in(f"evaluation.engine: {engine.name}"):
                    engine.check_beside(recipe.model.family)
                    methods.check_layout(recipe.method.name, recipe.method, served.layout, longest)
                    methods.check_chain(recipe, chain)
            except ValueError as error:
                raise ValueError(f"{measured.file_of('engine')}: {error} (run '{run}', variant '{variant}')") from None
        with faults.faults_in(measured.file_of("serve_python")):
            tasks.check_interpreter(section.get("serve_python") or engine.python, engine)


def _check_answered(plan: Choices) -> None:
    """Raise ValueError if anything but whole questions is wanted of a dataset without answers."""
    without = [name for name, entry in plan.data.items() if entry["source"] == "questions" and entry.get("regenerate") is None]
    for name in sorted(plan.datasets_trained_on().intersection(without)):
        raise ValueError(
            f"{plan.datasets_in_use()[name]}: {name} has questions alone, and no answers to learn; have the target "
            f"answer them: data.{name}.regenerate: {{new_tokens: 256, temperature: 0, engine: transformers}}"
        )
    for evaluation in plan.evaluation_of.values():
        for task, settings in evaluation.tasks.items():
            if isinstance(settings, tasks.HeldOut) and settings.data in without and not settings.whole_questions:
                raise ValueError(
                    f"{evaluation.file_of('tasks')}: evaluation.tasks.{task}: data.{settings.data} has questions alone, and no"
                    " text to go on with; add whole_questions: true"
                )


class Bench(Plan):
    """Answer the rules' questions about what is measured apart; `evaluation_of` holds only runs with such measurements."""

    measured = "bench"

    def report_variants(self, run: str) -> list[str]:
        """Return the report's options: the folder of each variant, and which of its evaluations to read."""
        return [*super().report_variants(run), "--evaluations bench"]

    def pages(self) -> list[str]:
        """Return the page of each of these runs. Raises ValueError if no chosen run measures anything apart."""
        if not self.evaluation_of:
            raise ValueError(
                f"runs: {', '.join(self.runs)}: none has evaluation.bench, what is measured apart; add it to "
                f"{self.files[self.runs[0]].file}, such as evaluation: {{bench: {{prompts: 8, tasks: {{...}}}}}}"
            )
        return [paths.PAGE.format(run=run, measured=self.measured) for run in self.evaluation_of]


def bench_of(plan: Plan) -> Bench:
    """Return the bench of a checked plan. Raises ValueError with the wrong key."""
    apart = {run: evaluations.apart(each) for run, each in plan.evaluation_of.items() if each.section.get("bench")}
    bench = Bench(plan.settings, plan.files, plan.variants, plan.configs, apart)
    _check_measured(bench)
    return bench
