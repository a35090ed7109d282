"""Draw the figures: acceptance by context length, loss by step.

A legend names the series. Suffix: T optimizer steps.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes

from longspec import methods
from longspec.config.names import IMPORTED, LOOKUP, UNTRAINED, WITH_LOOKUP
from longspec.measure.tasks import Settings
from longspec.report.inputs import Stage, Variant
from longspec.report.style import COLOUR, DASHED, drafter_colour, panels, quiet, to_svg

FloatArray = npt.NDArray[np.float64]
POINTS = 800  # points drawn per curve at most: more than a panel has pixels
NAMES = {
    UNTRAINED: "untrained draft",
    LOOKUP: "prompt lookup",
    IMPORTED: "draft it began with",
    WITH_LOOKUP: "draft and lookup",
}


def drafter_name(drafter: str) -> str:
    """Return the page's name of a drafter."""
    return NAMES.get(drafter, drafter)


def draw_line(axes: Axes, values: list[Any], offset: float, colour: str, label: str) -> None:
    """Draw a line of figures with their intervals, at whole numbers plus `offset`.

    A point is hollow if it has too few records for an interval.
    """
    places = [place + offset for place in range(len(values))]
    axes.plot(places, [value["mean"] for value in values], color=colour, linewidth=1.0, alpha=0.55, label=label)
    for at, value in zip(places, values, strict=True):
        if value["low"] is not None:
            axes.plot([at, at], [value["low"], value["high"]], color=colour, linewidth=1.6, zorder=3)
        fill = COLOUR["paper"] if value["low"] is None else colour
        axes.plot(at, value["mean"], "o", color=colour, markerfacecolor=fill, markersize=5.5, zorder=4)


def by_context(variant: Variant, found: dict[str, list[dict[str, Any]]], settings: Settings) -> Markup:
    """Draw the acceptance length by context length: a panel per task, a group of points per bucket, a line per drafter.

    found: the buckets of each drafter.
    """
    ends = [1.0]  # no draft accepted
    for bucket in (bucket for buckets in found.values() for bucket in buckets):
        ends += [bucket["mean"]] if bucket["low"] is None else [bucket["low"], bucket["high"]]
    low, high = min(ends), max(ends)
    limits = (low - 0.04 * (high - low) - 0.01, high + 0.1 * (high - low) + 0.02)
    shown = {task: [bucket for bucket in found[variant.final] if bucket["task"] == task] for task in settings.tasks}
    with quiet():
        figure, row = panels([max(len(held), 1.4) for held in shown.values()], 3.1)
        for axes, (task, held) in zip(row, shown.items(), strict=True):
            for number, (drafter, buckets) in enumerate(found.items()):
                values = [each for each in buckets if each["task"] == task]
                offset, colour = 0.13 * (number - (len(found) - 1) / 2), drafter_colour(drafter, variant.stage_names)
                draw_line(axes, values, offset, colour, drafter_name(drafter))
            axes.set_xticks(range(len(held)), [_bucket_name(bucket) for bucket in held])
            axes.set(xlim=(-0.55, len(held) - 0.45), ylim=limits, title=task)
        row[0].set_ylabel("acceptance length")
        figure.supxlabel("context length, tokens", color=COLOUR["muted"], fontsize=9)
        row[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
        return to_svg(figure, f"context-{variant.name}", f"Acceptance length by context length, {variant.name}")


def _bucket_name(bucket: dict[str, Any]) -> str:
    low, high = (f"{end // 1024}k" if end >= 1024 else str(end) for end in (bucket["from"], bucket["to"]))
    return f"{low}–{high}\nn = {bucket['prompts']}"


def smooth(values_T: FloatArray) -> FloatArray:
    """Return the centred moving mean over a twelfth of the steps; shorter at both ends, never padded."""
    if not len(values_T):
        return values_T
    window = 2 * (len(values_T) // 24) + 1
    ones_W = np.ones(window)
    return np.asarray(np.convolve(values_T, ones_W, "same") / np.convolve(np.ones(len(values_T)), ones_W, "same"), dtype=float)


def curves(stage: Stage) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return steps and draft loss [T] of the steps with a finite loss, and the target's loss there.

    Both are in nats per token: metrics.jsonl has the draft's with its steps' weights, and the target's without them. The
    target's is nan if it was not measured, or if the draft's loss is not in nats.
    """
    weight = methods.loss_weight(stage.recipe)
    columns = np.array([[row["step"], row["loss"], row["llm_loss"]] for row in stage.metrics], dtype=float)
    step_T, loss_T, target_T = columns[np.isfinite(columns[:, 1])].T
    return (step_T, loss_T, np.full_like(loss_T, np.nan)) if weight is None else (step_T, loss_T / weight, target_T)


def loss_unit(stage: Stage) -> str:
    """Return the unit of a stage's loss."""
    return "weighted loss" if methods.loss_weight(stage.recipe) is None else "loss, nats per token"


def losses(variant: Variant) -> Markup:
    """Draw a panel per stage, each with its own y axis, since stages train on different kinds of text.

    Each step's loss is faint, the smoothed one is on top, the target's own loss is dashed.
    """
    with quiet():
        figure, row = panels([1.0] * len(variant.stages), 2.9, common=False)
        units = ["", *map(loss_unit, variant.stages)]
        for axes, stage, before, unit in zip(row, variant.stages, units, units[1:], strict=False):
            told = "" if unit == before else unit
            axes.set(title=f"{stage.name}  ·  {stage.data}", xlabel="optimizer step", ylabel=told)
            _loss_panel(axes, stage, drafter_colour(stage.name, variant.stage_names))
        return to_svg(figure, f"loss-{variant.name}", f"Loss of each stage beside the target's own, {variant.name}")


def _loss_panel(axes: Axes, stage: Stage, colour: str) -> None:
    """Draw a stage's loss and the target's, at most about POINTS points each, with room below and above."""
    step_T, loss_T, target_T = curves(stage)
    if not len(loss_T):
        return
    known_T = np.isfinite(target_T)
    thin = slice(None, None, -(-len(step_T) // POINTS))
    smoothed_T, own_T = smooth(loss_T), smooth(target_T[known_T])
    low, high = min([*smoothed_T, *own_T]), max([float(np.quantile(loss_T, 0.995)), *own_T])
    axes.set_ylim(low - 0.08 * (high - low), high + 0.05 * (high - low))
    axes.plot(step_T[thin], loss_T[thin], color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(step_T[thin], smoothed_T[thin], color=colour, linewidth=1.9, label=f"draft {smoothed_T[-1]:.2f}")
    if len(own_T):
        look: dict[str, Any] = {"color": COLOUR["muted"], "linestyle": DASHED, "linewidth": 1.4}
        axes.plot(step_T[known_T][thin], own_T[thin], label=f"target {own_T[-1]:.2f}", **look)
    axes.legend()
