"""The figures: acceptance by drafter, context length and position, speed-up by drafter, loss by step.

A legend names the series. Suffix: T optimizer steps.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longspec.config.names import IMPORTED, LOOKUP, UNTRAINED, WITH_LOOKUP
from longspec.measure.tasks import Settings
from longspec.report.inputs import Stage, Variant
from longspec.report.style import COLOUR, DASHED, MARKERS, Series, bare, drafter_colour, panels, quiet, to_svg

FloatArray = npt.NDArray[np.float64]
POINTS = 800  # drawn per curve at most: more than a panel has pixels
NAMES = {
    UNTRAINED: "untrained draft",
    LOOKUP: "prompt lookup",
    IMPORTED: "draft it began with",
    WITH_LOOKUP: "draft and lookup",
}


def drafter_name(drafter: str) -> str:
    """Return how the page calls a drafter."""
    return NAMES.get(drafter, drafter)


def draw_point(axes: Axes, found: dict[str, Any], at: float, colour: str, marker: str, upright: bool = True) -> None:
    """Draw a point with its interval; hollow when there are too few records for one."""
    if found["low"] is not None:
        ends, across = [found["low"], found["high"]], [at, at]
        axes.plot(*((across, ends) if upright else (ends, across)), color=colour, linewidth=1.6, zorder=3)
    at, end = (at, found["mean"]) if upright else (found["mean"], at)
    fill = COLOUR["paper"] if found["low"] is None else colour
    axes.plot(at, end, marker=marker, color=colour, markerfacecolor=fill, markersize=5.5, zorder=4)


def interval_limits(values: list[dict[str, Any]]) -> tuple[float, float]:
    """Return axis limits: just below 1 (no draft accepted, no speed-up) or the lowest end, and just above the highest."""
    low = min(1.0, *(found["mean"] if found["low"] is None else found["low"] for found in values))
    high = max(1.0, *(found["mean"] if found["high"] is None else found["high"] for found in values))
    return low - 0.04 * (high - low) - 0.01, high + 0.1 * (high - low) + 0.02


BY_DRAFTER = {  # by figure: the part of the numbers, the label of its axis, its description
    "acceptance": ("variants", "acceptance length, tokens per round", "Acceptance length"),
    "speed": ("speed_by_task", "speed-up, times plain decoding", "Measured speed-up"),
}


def by_drafter(kind: str, variants: list[Variant], numbers: dict[str, Any], settings: Settings) -> Markup:
    """Draw a figure of BY_DRAFTER: a panel per task, a row per drafter, a marker per variant; equal scales."""
    part, label, told = BY_DRAFTER[kind]
    found = numbers[part]
    drafters = list(dict.fromkeys(name for variant in variants for name in variant.evaluations))
    low, high = interval_limits([found[v.name][d][t] for v in variants for d in v.evaluations for t in settings.tasks])
    with quiet():
        figure, row = panels([1.0] * len(settings.tasks), 0.75 + 0.32 * len(drafters) * max(1.0, len(variants) * 0.7))
        for axes, task in zip(row, settings.tasks, strict=True):
            _drafters_panel(axes, task, variants, found, drafters)
            axes.set(xlim=(low, high + 0.14 * (high - low)), title=f"{task}  ·  {settings.tasks[task].origin}")
            axes.set_xlabel(label)
        row[0].set_ylim(len(drafters) - 0.45, -0.55)
        row[0].set_yticks(range(len(drafters)), [drafter_name(drafter) for drafter in drafters])
        row[0].tick_params(axis="y", labelcolor=COLOUR["ink"])
        return to_svg(figure, kind, f"{told} of each drafter on each task, with 95 % intervals")


def _drafters_panel(axes: Axes, task: str, variants: list[Variant], found: Any, drafters: list[str]) -> None:
    bare(axes, "x")
    axes.axvline(1, color=COLOUR["muted"], linewidth=0.8)
    for number, variant in enumerate(variants):
        dodge = 0.0 if len(variants) == 1 else 0.5 * (number / (len(variants) - 1) - 0.5)
        for drafter in variant.evaluations:
            value, at = found[variant.name][drafter][task], drafters.index(drafter) + dodge
            colour = drafter_colour(drafter, variant.stage_names)
            draw_point(axes, value, at, colour, MARKERS[number % len(MARKERS)], upright=False)
            end = value["mean"] if value["high"] is None else value["high"]
            text = axes.annotate(f"{value['mean']:.2f}", (end, at), (5, 0), textcoords="offset points", va="center")
            text.set_bbox({"facecolor": COLOUR["paper"], "edgecolor": "none", "pad": 0.6})  # lines do not cross the figure


def by_context(found: dict[str, list[Series]], settings: Settings) -> dict[str, Markup]:
    """Draw a figure by name: a panel per task, a group of points per bucket, a line per series; all on one scale.

    Values of a series: its buckets of context length.
    """
    limits = interval_limits([bucket for series in found.values() for one in series for bucket in one.values])
    drawn = {}
    for name, series in found.items():
        buckets = {task: [b for b in series[0].values if b["task"] == task] for task in settings.tasks}
        with quiet():
            figure, row = panels([max(len(held), 1.4) for held in buckets.values()], 3.1)
            for axes, (task, held) in zip(row, buckets.items(), strict=True):
                bare(axes)
                for number, one in enumerate(series):
                    values = [bucket for bucket in one.values if bucket["task"] == task]
                    at = [place + 0.13 * (number - (len(series) - 1) / 2) for place in range(len(values))]
                    means = [value["mean"] for value in values]
                    axes.plot(at, means, color=one.colour, linewidth=1.0, alpha=0.55, label=one.label)
                    for place, value in zip(at, values, strict=True):
                        draw_point(axes, value, place, one.colour, "o")
                ends = [[f"{b[end] // 1024}k" if b[end] >= 1024 else b[end] for end in ("from", "to")] for b in held]
                names = [f"{low}–{high}\nn = {b['prompts']}" for (low, high), b in zip(ends, held, strict=True)]
                axes.set_xticks(range(len(held)), names)
                axes.set(xlim=(-0.55, len(held) - 0.45), ylim=limits, title=task)
            words = ("acceptance length", "context length, tokens")
            drawn[name] = _named(figure, row, *words, f"context-{name}", f"Acceptance length by context length, {name}")
    return drawn


def by_position(found: dict[str, list[Series]], settings: Settings) -> dict[str, Markup]:
    """Draw a figure by name: a panel per task, a line per series; all on one scale.

    Values of a series: by task the shares of rounds that kept token 1, 2, ...
    """
    highest = max(max(shares) for series in found.values() for one in series for shares in one.values.values())
    places, drawn = list(range(1, settings.draft_tokens + 1)), {}
    for name, series in found.items():
        with quiet():
            figure, row = panels([1.0] * len(settings.tasks), 2.9)
            for axes, task in zip(row, settings.tasks, strict=True):
                bare(axes)
                for one in series:
                    look: dict[str, Any] = {"color": one.colour, "marker": "o", "markersize": 4.5}
                    axes.plot(places, one.values[task], linewidth=1.5, clip_on=False, label=one.label, **look)
                limits = (-0.02, min(1.02, highest * 1.08 + 0.02))
                axes.set(xlim=(0.8, len(places) + 0.2), ylim=limits, xticks=places, title=task)
                axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
            words = ("rounds in which it was accepted", "place of the drafted token in its round")
            drawn[name] = _named(figure, row, *words, f"position-{name}", f"Acceptance by position in the round, {name}")
    return drawn


def _named(figure: Figure, row: list[Axes], up: str, across: str, name: str, description: str) -> Markup:
    """Name the axes and the series."""
    row[0].set_ylabel(up)
    figure.supxlabel(across, color=COLOUR["muted"], fontsize=9)
    row[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return to_svg(figure, name, description)


def smooth(values_T: FloatArray) -> FloatArray:
    """Return the centred moving mean over a twelfth of the steps; shorter at both ends, never padded."""
    if not len(values_T):
        return values_T
    window = 2 * (len(values_T) // 24) + 1
    ones_W = np.ones(window)
    return np.asarray(np.convolve(values_T, ones_W, "same") / np.convolve(np.ones(len(values_T)), ones_W, "same"), dtype=float)


def curves(stage: Stage) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return steps and draft loss [T] of steps with a finite loss; the target's loss there, nan where it was not measured."""
    columns = np.array([[row["step"], row["loss"], row["llm_loss"]] for row in stage.metrics], dtype=float)
    step_T, loss_T, target_T = columns[np.isfinite(columns[:, 1])].T
    return step_T, loss_T, target_T


def losses(found: dict[str, list[Series]]) -> dict[str, Markup]:
    """Draw a figure by name; a panel per stage, each with its own y axis, for stages train on different kinds of text.

    Each step's loss is faint, the smoothed one on top, the target's own loss dashed.
    """
    scales, drawn = _scales([one.values for series in found.values() for one in series]), {}
    for name, series in found.items():
        with quiet():
            figure, row = panels([1.0] * len(series), 2.9, common=False)
            for axes, one in zip(row, series, strict=True):
                bare(axes)
                axes.set(title=f"{one.values.name}  ·  {one.values.data}", xlabel="optimizer step")
                if one.values.name in scales:  # else no step has a finite loss; the page says so
                    axes.set_ylim(scales[one.values.name])
                    _curves_of(axes, one)
                    axes.legend()
            row[0].set_ylabel("loss, nats per token")
            drawn[name] = to_svg(figure, f"loss-{name}", f"Loss of each stage beside the target's own, {name}")
    return drawn


def _scales(stages: list[Stage]) -> dict[str, tuple[float, float]]:
    """Return by stage's name one scale for all figures: from below the lowest smoothed loss to the first steps' losses."""
    scales: dict[str, tuple[float, float]] = {}
    for stage in stages:
        _, loss_T, target_T = curves(stage)
        if len(loss_T):
            floor_T = target_T[np.isfinite(target_T)]
            low, high = min([*smooth(loss_T), *smooth(floor_T)]), float(np.quantile(loss_T, 0.995))
            seen = scales.get(stage.name, (low, high))
            scales[stage.name] = (min(low, seen[0]), max(high, seen[1]))
    return {name: (low - 0.08 * (high - low), high + 0.05 * (high - low)) for name, (low, high) in scales.items()}


def _curves_of(axes: Axes, one: Series) -> None:
    """Draw a stage's loss and the target's, of at most about POINTS points each."""
    step_T, loss_T, target_T = curves(one.values)
    known_T = np.isfinite(target_T)
    thin = slice(None, None, -(-len(step_T) // POINTS))
    axes.plot(step_T[thin], loss_T[thin], color=one.colour, alpha=0.3, linewidth=0.8)
    own, floor = (one.label, one.colour, "-", 1.9), ("target", COLOUR["muted"], DASHED, 1.4)
    for at_T, value_T, (label, colour, line, width) in ((step_T, loss_T, own), (step_T[known_T], target_T[known_T], floor)):
        if len(value_T):
            smoothed_T = smooth(value_T)
            look: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": width}
            axes.plot(at_T[thin], smoothed_T[thin], label=f"{label} {smoothed_T[-1]:.2f}", **look)
