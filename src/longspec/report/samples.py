"""The text after each task's first prompt, token by token: what was drafted and kept."""

from dataclasses import dataclass
from typing import Any

from longspec import shown
from longspec.evaluate.tasks import Settings
from longspec.report.evaluations import Evaluation


def visible(text: str) -> str:
    """Line ends, tabs and control characters as signs that a reader sees; a line end still ends the line."""
    return shown.lines(text.replace("\t", "⇥").replace("\n", "↵\n"))


@dataclass(frozen=True)
class Sample:
    """One text; a token is {text, depth}, its depth that in the draft of its round, 0: the target's own."""

    task: str
    context_tokens: int
    before: str
    tokens: list[dict[str, Any]]

    @property
    def counts(self) -> dict[str, int]:
        """Tokens in all, and drafted ones that were kept."""
        return {"tokens": len(self.tokens), "kept": sum(token["depth"] > 0 for token in self.tokens)}


def all_samples(evaluations: dict[str, Evaluation], settings: Settings) -> dict[str, list[Sample]]:
    """drafter -> its samples of the main setting, in the order of the tasks; a task or a drafter without one is left out.

    Raises ValueError with file, task and field for one of another form.
    """
    found: dict[str, list[Sample]] = {}
    for drafter, one in evaluations.items():
        deepest = max(settings.draft_tokens, settings.copied_by(drafter))
        for row in one.lines[: len(one["task"])]:  # those of the main setting are first
            if "sample" in row:
                place = f"{one.path}: task {row['task']}, prompt {row['prompt']}: sample"
                sample = Sample(row["task"], row["context_tokens"], *_checked(place, row["sample"], deepest))
                found.setdefault(drafter, []).append(sample)
    return found


def _checked(place: str, sample: Any, deepest: int) -> tuple[str, list[dict[str, Any]]]:
    fix = "evaluate this drafter again (rule evaluate)"
    if not isinstance(sample, dict) or not isinstance(sample.get("before"), str) or not isinstance(sample.get("tokens"), list):
        raise ValueError(f"{place}: must hold a text `before` and a list `tokens`; {fix}")
    for number, token in enumerate(sample["tokens"], 1):
        good = isinstance(token, dict) and isinstance(token.get("text"), str) and token.get("depth") in range(deepest + 1)
        if not good:
            raise ValueError(f"{place}: token {number}: must have a text and a depth of 0..{deepest}; {fix}")
    return sample["before"], sample["tokens"]
