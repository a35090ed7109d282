"""Compute the page's numbers: each drafter's measurements, and comparisons of drafters. Suffix: P prompts."""

from itertools import pairwise
from typing import Any

import numpy as np

from longspec.config.names import FINAL, IMPORTED, LOOKUP, UNTRAINED, WITH_LOOKUP
from longspec.measure.estimates import acceptance, difference, ratio_of
from longspec.measure.gates import judge
from longspec.measure.lines import SUMS, Evaluation, check_pairs, summarize
from longspec.measure.tasks import Settings
from longspec.report.answer import answers
from longspec.report.inputs import Variant

Row = dict[str, Any]
UNMEASURED = dict.fromkeys(("difference", "low", "high", "improved"))


def by_context(found: Evaluation, settings: Settings) -> list[Row]:
    """Return the acceptance by task and bucket of context length (low <= tokens < high); filled buckets only.

    The buckets begin at 0, 256, 512, 1024, ... tokens.
    """
    rows, edges = [], [0, 256]
    while edges[-1] <= int(found["context_tokens"].max()):
        edges.append(edges[-1] * 2)
    for task in settings.tasks:
        for low, high in pairwise(edges):
            chosen_P = found.of_task(task) & (found["context_tokens"] >= low) & (found["context_tokens"] < high)
            if found["rounds"][chosen_P].sum():
                rows.append({"task": task, "from": low, "to": high, **acceptance(found, chosen_P)})
    return rows


def speed(found: Evaluation, settings: Settings) -> Row:
    """Return the measured speed-up with interval, shares of the speculative time, and costs of a draft step and a verification.

    Both costs are in plain steps. A draft step is a token of a chain or a level of a tree; None for trees with a budget, whose
    number of levels varies. Shares and costs are None if the engine does not report draft and target apart.
    """
    plain, speculative = float(found["seconds_plain"].sum()), float(found["seconds_speculative"].sum())
    draft, target = (float(found[name].sum()) for name in ("seconds_draft", "seconds_target"))
    levels = settings.draft_tokens if isinstance(settings.settings[0].shape, int | tuple) else np.nan
    step_draft = draft / (found["rounds"].sum() * levels)
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


def improvements(variant: Variant, settings: Settings) -> list[Row]:
    """Compare each stage with the one before (the first: with the draft it begins with) on the tasks of its own data."""
    rows = []
    begun_with = IMPORTED if IMPORTED in variant.baselines else UNTRAINED
    for before, stage in zip([begun_with, *variant.stage_names], variant.stages, strict=False):
        new, old = variant.evaluations[stage.name], variant.evaluations[before]
        own: list[str | None] = [name for name, task in settings.tasks.items() if task.origin in stage.datasets]
        for task in own or [None]:
            found = difference(new, old, new.of_task(task)) if task else UNMEASURED
            data = settings.tasks[task].origin if task else stage.data
            rows.append({"stage": stage.name, "before": before, "data": data, "task": task} | found)
    return rows


def lossless(variant: Variant) -> Row:
    """Sum tokens compared with plain greedy decoding, mismatches and proven near-ties, over all drafters and shapes.

    largest_margin: the largest gap of the target's two logits among all mismatches, divided by the near-tie's limit.
    """
    lines = [line for found in variant.evaluations.values() for line in found.lines]
    sums = {name: sum(line[name] for line in lines) for name in SUMS[2:]}
    gaps = [(line["margin"], line["margin_allowed"]) for line in lines if line.get("margin") is not None]
    largest = max((margin / allowed if margin else 0.0 for margin, allowed in gaps), default=None)
    unexplained = sums["mismatches"] - sums["near_ties"]
    return sums | {"unexplained": unexplained, "largest_margin": largest, "drafters": len(variant.evaluations)}


def paired(variants: list[Variant]) -> list[tuple[Variant, Variant]]:
    """Return pairs (compared with, variant) for all but the first: the earlier variant of the same name, else the first."""
    own = [variant.name.rpartition("/")[2] for variant in variants]
    before = [own.index(name) if name in own[:number] else 0 for number, name in enumerate(own)]
    return [(variants[at], variant) for at, variant in list(zip(before, variants, strict=True))[1:]]


def between_variants(variants: list[Variant], settings: Settings) -> list[Row]:
    """Return, for paired variants, differences of the final drafts and of drafters of one name, by task and over all."""
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


def figures_of(variant: Variant, settings: Settings, gates: dict[str, float | None]) -> Row:
    """Return a report's figures of a variant, by their names there; most of them by drafter."""
    drafters, held = variant.evaluations, variant.vocabulary
    final = drafters[variant.final]
    all_P = final.of_task(None)
    by_task = {name: {task: acceptance(one, one.of_task(task)) for task in settings.tasks} for name, one in drafters.items()}
    both = drafters.get(WITH_LOOKUP)
    return {
        "variants": by_task,
        "overall": {name: acceptance(one, all_P) for name, one in drafters.items()},
        "by_context": {name: by_context(one, settings) for name, one in drafters.items()},
        "speed": {name: speed(one, settings) for name, one in drafters.items()},
        "lossless": lossless(variant),
        "improvements": improvements(variant, settings),
        "against_baselines": [
            {"stage": variant.final, "before": name} | difference(final, drafters[name], all_P) for name in variant.baselines
        ],
        "with_lookup": None if both is None else difference(both, final, all_P),
        "measured": {name: summarize(one.lines) for name, one in drafters.items()},
        "gates": judge({stage.name: stage.datasets for stage in variant.stages}, variant.final, drafters, settings, gates),
        "vocabulary": None if held is None else {"size": len(held.ids), "of": held.size, "coverage": held.coverage},
        "final": variant.provenance.get(FINAL, {"stage": variant.final}),
        "left_out": final.left_out,
    }


def report_numbers(run: str, variants: list[Variant], settings: Settings, gates: dict[str, float | None]) -> Row:
    """Return all measured numbers that the page shows: the content of report.json."""
    found = {variant.name: figures_of(variant, settings, gates) for variant in variants}
    between = between_variants(variants, settings)
    by_part = {part: {name: numbers[part] for name, numbers in found.items()} for part in found[variants[0].name]}
    return {"run": run, "between_variants": between, "answers": answers(paired(variants), between), **by_part}
