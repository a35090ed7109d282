"""Loss curves of a training beside the target's own loss, and the trainer's estimates of acceptance.

A figure has a panel per stage, which is the values of its series. Suffix: T optimizer steps.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes

from longspec.report.inputs import Stage
from longspec.report.style import COLOUR, DASHED, Series, bare, panels, quiet, to_svg

FloatArray = npt.NDArray[np.float64]
POINTS = 800  # drawn per curve at most: more than a panel has pixels


def smooth(values_T: FloatArray) -> FloatArray:
    """Centred moving mean over a twelfth of the steps; shorter at both ends, never padded."""
    if not len(values_T):
        return values_T
    window = 2 * (len(values_T) // 24) + 1
    ones_W = np.ones(window)
    return np.asarray(np.convolve(values_T, ones_W, "same") / np.convolve(np.ones(len(values_T)), ones_W, "same"), dtype=float)


def curves(stage: Stage) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Steps and draft loss [T] of the steps with a finite loss; the target's loss there, nan where it was not measured."""
    columns = np.array([[row["step"], row["loss"], row["llm_loss"]] for row in stage.metrics], dtype=float)
    step_T, loss_T, target_T = columns[np.isfinite(columns[:, 1])].T
    return step_T, loss_T, target_T


def losses(found: dict[str, list[Series]]) -> dict[str, Markup]:
    """A figure by name; a panel per stage, each with its own y axis, for stages train on different kinds of text.

    Each step's loss is faint, the smoothed one on top, the target's own loss dashed.
    """
    scales = _scales([one.values for series in found.values() for one in series])
    return {name: _losses(name, series, scales) for name, series in found.items()}


def _scales(stages: list[Stage]) -> dict[str, tuple[float, float]]:
    """By stage's name one scale for all figures: from below the lowest smoothed loss to the first steps' losses."""
    scales: dict[str, tuple[float, float]] = {}
    for stage in stages:
        _, loss_T, target_T = curves(stage)
        if len(loss_T):
            floor_T = target_T[np.isfinite(target_T)]
            low, high = min([smooth(loss_T).min(), *smooth(floor_T)]), float(np.quantile(loss_T, 0.995))
            seen = scales.get(stage.name, (low, high))
            scales[stage.name] = (min(low, seen[0]), max(high, seen[1]))
    return {name: (low - 0.08 * (high - low), high + 0.05 * (high - low)) for name, (low, high) in scales.items()}


def _losses(name: str, series: list[Series], scales: dict[str, tuple[float, float]]) -> Markup:
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
        return to_svg(figure, f"loss-{name}", f"Loss of each stage beside the target's own, {name}")


def _curves_of(axes: Axes, one: Series) -> None:
    """Draw a stage's loss and the target's."""
    step_T, loss_T, target_T = curves(one.values)
    known_T = np.isfinite(target_T)
    _draw(axes, step_T, loss_T, color=one.colour, alpha=0.3, linewidth=0.8)
    floor, own = ("target", COLOUR["muted"], DASHED, 1.4), (one.label, one.colour, "-", 1.9)
    for at_T, value_T, (label, colour, line, width) in ((step_T, loss_T, own), (step_T[known_T], target_T[known_T], floor)):
        if len(value_T):
            smoothed_T = smooth(value_T)
            named = f"{label} {smoothed_T[-1]:.2f}"
            _draw(axes, at_T, smoothed_T, color=colour, linestyle=line, linewidth=width, label=named)


def _draw(axes: Axes, step_T: FloatArray, value_T: FloatArray, **look: Any) -> None:
    """A curve of at most about POINTS points."""
    thin = slice(None, None, -(-len(step_T) // POINTS))
    axes.plot(step_T[thin], value_T[thin], **look)


def estimates(stage: Stage) -> list[dict[str, Any]]:
    """Each logged estimate with its step: acceptance_k by lag, expected_tokens a round, loss in nats a label, seconds."""
    logged = [{"step": row["step"]} | row["held_out"] for row in stage.metrics if "held_out" in row]
    return [row for row in logged if row["expected_tokens"] is not None]  # null: it was not finite
