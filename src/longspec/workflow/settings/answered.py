"""Datasets of questions alone: only where nothing wants their answers, or where the target gives them."""

from longspec.evaluate.tasks import HeldOut
from longspec.workflow.choices import Choices
from longspec.workflow.settings.datasets import FILE


def check_answered(plan: Choices) -> None:
    """Raise ValueError where something but whole questions is wanted of a dataset that has no answers."""
    without = [name for name, entry in plan.data.items() if entry["source"] == "questions" and entry.get("regenerate") is None]
    for name in sorted(plan.datasets_trained_on().intersection(without)):
        raise ValueError(
            f"{plan.datasets_in_use()[name]}: {name} has questions alone, and no answers to learn; in {FILE} have the target"
            f" answer them: data.{name}.regenerate: {{new_tokens: 256, temperature: 0, engine: transformers}}"
        )
    for evaluation in plan.evaluation_of.values():
        for task, settings in evaluation.tasks.items():
            if isinstance(settings, HeldOut) and settings.data in without and not settings.whole_questions:
                raise ValueError(
                    f"{evaluation.file_of('tasks')}: evaluation.tasks.{task}: data.{settings.data} has questions alone, and no"
                    " text to go on with; add whole_questions: true"
                )


def check_apart(bench: Choices) -> None:
    """Raise ValueError for parts of answers that nobody gives: what is measured apart has the target answer nothing."""
    for run, evaluation in bench.evaluation_of.items():
        raw = {name for name, entry in bench.data.items() if entry.get("regenerate") is not None} - bench.trained_on_by(run)
        for task, settings in evaluation.tasks.items():
            if isinstance(settings, HeldOut) and settings.data in raw and not settings.whole_questions:
                raise ValueError(
                    f"{evaluation.file_of('bench')}: evaluation.bench.tasks.{task}: the target answers data.{settings.data} "
                    f"(regenerate) for runs that train on it, and {run} does not; add whole_questions: true"
                )
