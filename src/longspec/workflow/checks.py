"""From the settings of config/workflow.yaml to a checked plan.

What can be wrong is found here, before there is a graph: an error inside a function that Snakemake asks for a job's input
goes unseen whenever the job's output already exists. Each message names the key and the fix.
"""

from pathlib import Path
from typing import Any

from longspec.config import CONFIG_DIR
from longspec.data import presets
from longspec.evaluate import tasks
from longspec.workflow import datasets, draft_vocabularies, runs
from longspec.workflow.plan import Plan
from longspec.workflow.settings import check_values


def checked_plan(settings: dict[str, Any], config_dir: Path = CONFIG_DIR) -> Plan:
    """All choices of the settings, composed. Raises ValueError for the first that is wrong."""
    settings = _checked_settings(settings)
    for name in settings["variants"]:
        runs.check_choice("variants", name, "variant", config_dir)
    stages, variants, configs = draft_vocabularies.with_lenders(settings["runs"], settings["variants"], config_dir)
    runs.check_models(configs)
    plan = Plan(settings, stages, variants, configs, _checked_tasks(settings["evaluation"]))
    draft_vocabularies.check_lenders(plan)
    runs.check_targets(configs, plan.tasks, settings["evaluation"])
    runs.check_mixtures(configs)
    datasets.check_data(plan.datasets_in_use(), settings["data"])
    datasets.check_task_files(plan.tasks, plan.datasets_trained_on(), settings["data"])
    return plan


def forgetting_warning(plan: Plan) -> str:
    """The datasets that gates.forgetting cannot judge, and what to do; empty when there is none."""
    if plan.settings["gates"]["forgetting"] is None:
        return ""
    unseen = datasets.forgotten_unseen(plan.datasets_in_order(), plan.evaluation_data)
    if not unseen:
        return ""
    return (
        f"gates.forgetting cannot judge what is forgotten of {', '.join(unseen)}: no task measures it. Add one for each "
        f"to evaluation.tasks in config/workflow.yaml, such as own: {{data: {unseen[0]}, context: [64, 448]}}, "
        "or set gates.forgetting to null"
    )


def unused_variants(plan: Plan) -> str:
    """The chosen variants in which no chosen run is trained, since all name their own; empty when there is none."""
    used = {variant for run in plan.runs for variant in plan.variants[run]}
    unused = [variant for variant in plan.settings["variants"] if variant not in used]
    if not unused:
        return ""
    named = "; ".join(f"{run} in {', '.join(plan.variants[run])}" for run in plan.runs)
    return (
        f"variants: {', '.join(unused)}: no chosen run is trained in {'it' if len(unused) == 1 else 'them'}: each names its "
        f"own in its file of config/run/: {named}"
    )


def _checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with their presets laid out, held against their schema."""
    try:
        laid_out = dict(settings)
        if "data" in settings:
            laid_out["data"] = _with_presets(settings["data"], presets.DATA)
        evaluation = settings.get("evaluation")
        if isinstance(evaluation, dict) and "tasks" in evaluation:
            laid_out["evaluation"] = evaluation | {"tasks": _with_presets(evaluation["tasks"], presets.TASK)}
        check_values(laid_out)
    except ValueError as error:
        raise ValueError(f"{datasets.FILE}: {error}") from None
    return laid_out


def _with_presets(entries: Any, kind: presets.Kind) -> Any:
    """Entries with their presets laid out; what is no mapping is left to the schema."""
    if not isinstance(entries, dict):
        return entries
    return {name: presets.expand(name, entry, kind) if isinstance(entry, dict) else entry for name, entry in entries.items()}


def _checked_tasks(section: dict[str, Any]) -> dict[str, tasks.Task]:
    """The tasks of the evaluation section, of which every file of prompts is there."""
    try:
        parsed = tasks.parse(section).tasks
    except ValueError as error:
        raise ValueError(f"{datasets.FILE}: {error}") from None
    for name, task in parsed.items():
        if isinstance(task, tasks.Benchmark):
            datasets.prompt_files(name, task)
    return parsed
