"""The page's numbers: what each drafter's measurements say, and the drafters against each other. Suffix: P prompts."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from longspec.config import plain
from longspec.config.names import FINAL, LOOKUP, WITH_LOOKUP
from longspec.measure import gates as gate
from longspec.measure.estimates import acceptance, difference, ratio_of
from longspec.measure.lines import Evaluation, check_pairs, summarize
from longspec.measure.tasks import Settings
from longspec.report.chain_lengths import expected_speeds
from longspec.report.inputs import Stage, Target, Variant
from longspec.report.prediction import predictions
from longspec.report.tables import flatten

Row = dict[str, Any]


def bucket_edges(longest: int) -> list[int]:
    """Return 0, 256, 512, 1024, ... up to the first edge above the longest context, in tokens."""
    edges = [0, 256]
    while edges[-1] <= longest:
        edges.append(edges[-1] * 2)
    return edges


def by_context(found: Evaluation, settings: Settings) -> list[Row]:
    """Return the acceptance by task and bucket of context length (low <= tokens < high); filled buckets only."""
    rows = []
    for task in settings.tasks:
        for low, high in pairwise(bucket_edges(int(found["context_tokens"].max()))):
            chosen_P = found.of_task(task) & (found["context_tokens"] >= low) & (found["context_tokens"] < high)
            if found["rounds"][chosen_P].sum():
                rows.append({"task": task, "from": low, "to": high, **acceptance(found, chosen_P)})
    return rows


def by_position(found: Evaluation, settings: Settings) -> dict[str, list[float]]:
    """Return by task the share of rounds in which the first, second, ... drafted token was accepted."""
    shares = {}
    for task in settings.tasks:
        accepted = np.array([count for line in found.main_lines if line["task"] == task for count in line["accepted"]])
        shares[task] = [float(np.mean(accepted >= place)) for place in range(1, settings.draft_tokens + 1)]
    return shares


def speed(found: Evaluation, settings: Settings) -> Row:
    """Return the measured speed-up with interval, shares of the speculative time, cost of a draft step and of a verification.

    Both costs are in plain steps; a draft step is a token of a chain or a level of a tree. Shares and costs are None where the
    engine does not tell the seconds of draft and target apart.
    """
    plain, speculative = float(found["seconds_plain"].sum()), float(found["seconds_speculative"].sum())
    draft, target = (float(found[name].sum()) for name in ("seconds_draft", "seconds_target"))
    step_draft = draft / (found["rounds"].sum() * settings.draft_tokens)
    step_plain = plain / found["new_tokens"].sum()
    parts = {
        "draft_share": draft / speculative,
        "target_share": target / speculative,
        "other_share": 1 - (draft + target) / speculative,
        "measured_cost_ratio": float(step_draft / step_plain),
        "verification_cost_ratio": float(target / found["rounds"].sum() / step_plain),
    }
    return {
        "speed_up": ratio_of(found.of_task(None), (found, "seconds_plain", "seconds_speculative")),
        "seconds_plain": plain,
        "seconds_speculative": speculative,
        **{name: None if np.isnan(value) else value for name, value in parts.items()},
    }


def of_drafter(found: Evaluation, settings: Settings) -> Row:
    """Return what a report tells of every drafter, by its name there."""
    seconds, inside = (found, "seconds_plain", "seconds_speculative"), {task: found.of_task(task) for task in settings.tasks}
    return {
        "variants": {task: acceptance(found, chosen_P) for task, chosen_P in inside.items()},
        "overall": acceptance(found, found.of_task(None)),
        "by_context": by_context(found, settings),
        "by_position": by_position(found, settings),
        "speed": speed(found, settings),
        "speed_by_task": {task: ratio_of(chosen_P, seconds) for task, chosen_P in inside.items()},
    }


def improvements(variant: Variant, settings: Settings) -> list[dict[str, Any]]:
    """Compare each stage with the one before (the first: with the draft it begins with) on the tasks of its own data."""
    rows = []
    for before, stage in zip([variant.beginning, *variant.stage_names], variant.stages, strict=False):
        new, old = variant.evaluations[stage.name], variant.evaluations[before]
        unmeasured: dict[str, Any] = dict.fromkeys(("difference", "low", "high", "improved"))
        own: list[str | None] = [name for name, task in settings.tasks.items() if task.origin == stage.data]
        for task in own or [None]:
            found = difference(new, old, new.of_task(task)) if task else unmeasured
            rows.append({"stage": stage.name, "before": before, "data": stage.data, "task": task} | found)
    return rows


def against_baselines(variant: Variant, settings: Settings) -> list[dict[str, Any]]:
    """Compare the final draft with each baseline, over all tasks."""
    final = variant.evaluations[variant.final]
    all_P = final.of_task(None)
    return [
        {"stage": variant.final, "before": name} | difference(final, variant.evaluations[name], all_P)
        for name in variant.baselines
    ]


def with_lookup(variant: Variant, settings: Settings) -> dict[str, Any] | None:
    """Compare the final draft with prompt lookup beside it with it alone, over all tasks; None if not measured."""
    if (both := variant.evaluations.get(WITH_LOOKUP)) is None:
        return None
    return difference(both, variant.evaluations[variant.final], both.of_task(None))


@dataclass(frozen=True)
class Sample:
    """One text; a token is {text, depth}, its depth that in the draft of its round, 0: the target's own."""

    task: str
    context_tokens: int
    before: str
    tokens: list[Row]

    @property
    def counts(self) -> dict[str, int]:
        """Count the tokens, and the drafted ones that were kept."""
        return {"tokens": len(self.tokens), "kept": sum(token["depth"] > 0 for token in self.tokens)}


def all_samples(variant: Variant) -> dict[str, list[Sample]]:
    """Return by drafter the texts after each task's first prompt, at the main setting; a drafter without one is left out."""
    found = {
        drafter: [Sample(line["task"], line["context_tokens"], **line["sample"]) for line in one.main_lines if "sample" in line]
        for drafter, one in variant.evaluations.items()
    }
    return {drafter: samples for drafter, samples in found.items() if samples}


def lossless(variant: Variant) -> dict[str, Any]:
    """Sum tokens compared with plain greedy decoding over all drafters and shapes, mismatches, and those proven near-ties.

    largest_margin: of all mismatches the widest gap of the target's two logits, as a share of what a near-tie may have.
    """
    names = ("tokens_compared", "mismatches", "near_ties")
    lines = [line for found in variant.evaluations.values() for line in found.lines]
    sums = {name: sum(line[name] for line in lines) for name in names}
    gaps = [(line["margin"], line["margin_allowed"]) for line in lines if line.get("margin") is not None]
    largest = max((margin / allowed if margin else 0.0 for margin, allowed in gaps), default=None)
    unexplained = sums["mismatches"] - sums["near_ties"]
    return sums | {"unexplained": unexplained, "largest_margin": largest, "drafters": len(variant.evaluations)}


def vocabulary(variant: Variant) -> dict[str, Any] | None:
    """Return how many of the target's tokens the draft can propose, and the share of the trained tokens that are among them."""
    held = variant.vocabulary
    return None if held is None else {"size": len(held.ids), "of": held.size, "coverage": held.coverage}


def paired(variants: list[Variant]) -> list[tuple[Variant, Variant]]:
    """Return pairs of each further variant behind what it is compared with: the other run's of its name, else the first."""
    own = [variant.name.rpartition("/")[2] for variant in variants]
    before = [own.index(name) if name in own[:number] else 0 for number, name in enumerate(own)]
    return [(variants[at], variant) for at, variant in list(zip(before, variants, strict=True))[1:]]


def between_variants(variants: list[Variant], settings: Settings) -> list[dict[str, Any]]:
    """Return the difference of the final drafts, and of the drafts of one name, of paired variants, by task and over all."""
    rows = []
    for before, other in paired(variants):
        same = {name: (name, name) for name in before.evaluations if name in other.evaluations and name != LOOKUP}
        for drafter, names in {"final draft": (before.final, other.final), **same}.items():
            old, new = (variant.evaluations[name] for variant, name in zip((before, other), names, strict=True))
            check_pairs(old, new)
            for task in (*settings.tasks, None):
                row = difference(new, old, new.of_task(task))
                rows.append({"variant": other.name, "before": before.name, "drafter": drafter, "task": task} | row)
    return rows


def told_differently(variants: list[Variant]) -> list[dict[str, Any]]:
    """Return the keys in which the recipes of common stages, or the final drafts' provenance, differ in paired variants.

    Not what provenance says of stages, files and the choice: recipes, weights and figures, which the page tells by themselves.
    """
    rows = []
    for before, other in paired(variants):
        both = set(before.stage_names) & set(other.stage_names)
        one, new = (
            flatten({stage.name: plain(stage.recipe) for stage in variant.stages if stage.name in both})
            | flatten({key: value for key, value in variant.provenance.items() if key not in ("stages", "files", FINAL)})
            for variant in (before, other)
        )
        keys = [key for key in sorted(one | new) if one.get(key) != new.get(key)]
        names = {"variant": other.name, "before": before.name}
        rows += [names | {"key": key, "old": one.get(key), "new": new.get(key)} for key in keys]
    return rows


def estimates(stage: Stage) -> list[dict[str, Any]]:
    """Return each logged estimate with its step: acceptance_k by lag, expected_tokens a round, loss in nats, seconds."""
    logged = [{"step": row["step"]} | row["held_out"] for row in stage.metrics if "held_out" in row]
    return [row for row in logged if row["expected_tokens"] is not None]  # null: it was not finite


def figures_of(variant: Variant, settings: Settings) -> dict[str, Any]:
    """Return what a variant's drafters did, each by its name, and how they were trained."""
    drafters = {drafter: of_drafter(found, settings) for drafter, found in variant.evaluations.items()}
    parts = next(iter(drafters.values()))
    figures = {part: {drafter: each[part] for drafter, each in drafters.items()} for part in parts}
    estimated = {stage.name: estimates(stage) for stage in variant.stages}
    return figures | {"lossless": lossless(variant), "training_estimates": estimated}


def report_numbers(
    run: str, variants: list[Variant], target: Target, settings: Settings, gates: dict[str, float | None]
) -> dict[str, Any]:
    """Return all measured numbers that the page shows, which are the content of report.json."""
    found = {}
    for variant in variants:
        stages = {stage.name: stage.data for stage in variant.stages}
        shared, judged = figures_of(variant, settings), gate.judge(stages, variant.final, variant.evaluations, settings, gates)
        held = variant.vocabulary
        head_share = 1.0 if held is None else len(held.ids) / held.size
        samples, tau = all_samples(variant), shared["overall"][variant.final]["mean"]
        found[variant.name] = shared | {
            "improvements": improvements(variant, settings),
            "against_baselines": against_baselines(variant, settings),
            "with_lookup": with_lookup(variant, settings),
            "chain_lengths": expected_speeds(variant, settings),
            "samples": {drafter: {each.task: each.counts for each in texts} for drafter, texts in samples.items()},
            "measured": {drafter: summarize(lines.lines) for drafter, lines in variant.evaluations.items()},
            "gates": judged,
            "gate_counts": gate.count(judged),
            "vocabulary": vocabulary(variant),
            "final": variant.provenance.get(FINAL, {"stage": variant.final}),
            "left_out": variant.evaluations[variant.final].left_out,
            "predicted": predictions(target.shape, tau, settings.draft_tokens, variant.stages[-1].recipe.method, head_share),
        }
    between = {"between_variants": between_variants(variants, settings), "told_differently": told_differently(variants)}
    by_part = {part: {name: numbers[part] for name, numbers in found.items()} for part in found[variants[0].name]}
    return {"run": run, **between, **by_part}
