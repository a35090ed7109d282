"""Loss curves: what each step measured (faint), smoothed, and the target's own loss on the same tokens as the floor.

Suffixes: T optimizer steps.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes

from longspec.report.inputs import Stage, Variant
from longspec.report.style import COLOUR, drafter_colour, panels, quiet, spread, to_svg

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


def limits(variants: list[Variant]) -> dict[str, tuple[float, float]]:
    """A scale per stage, the same for all variants: from below the lowest smoothed loss to the first steps' losses."""
    scales: dict[str, tuple[float, float]] = {}
    for stage in (stage for variant in variants for stage in variant.stages):
        _, loss_T, target_T = curves(stage)
        if len(loss_T):
            floor_T = target_T[np.isfinite(target_T)]
            low, high = min([smooth(loss_T).min(), *smooth(floor_T)]), float(np.quantile(loss_T, 0.995))
            seen = scales.get(stage.name, (low, high))
            scales[stage.name] = (min(low, seen[0]), max(high, seen[1]))
    return {name: (low - 0.08 * (high - low), high + 0.05 * (high - low)) for name, (low, high) in scales.items()}


def _panel(axes: Axes, stage: Stage, colour: str, scale: tuple[float, float] | None) -> None:
    step_T, loss_T, target_T = curves(stage)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.set(title=f"{stage.name}  ·  {stage.data}", xlabel="optimizer step")
    if scale is None:  # no step has a finite loss; the page says so
        return
    axes.set_ylim(scale)
    _draw(axes, step_T, loss_T, colour, 0.3, linewidth=0.8)
    ends = {"draft": _draw(axes, step_T, smooth(loss_T), colour, 1.0, linewidth=1.9)}
    known_T = np.isfinite(target_T)
    if known_T.any():
        floor_T = smooth(target_T[known_T])
        ends["target"] = _draw(axes, step_T[known_T], floor_T, COLOUR["muted"], 1.0, linewidth=1.4, dashes=(4, 2))
    for (text, value), height in zip(ends.items(), spread(list(ends.values()), 0.07 * (scale[1] - scale[0])), strict=True):
        axes.annotate(
            f"{text} {value:.2f}", (1, height), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            color=colour if text == "draft" else COLOUR["muted"], va="center", fontsize=8.5,
        )  # fmt: skip


def thinned(step_T: FloatArray) -> slice:
    """Which of a curve's points to draw: about POINTS of them."""
    return slice(None, None, -(-len(step_T) // POINTS))


def _draw(axes: Axes, step_T: FloatArray, value_T: FloatArray, colour: str, alpha: float, **line: Any) -> float:
    """A curve of at most about POINTS points; returns where it ends."""
    thin = thinned(step_T)
    axes.plot(step_T[thin], value_T[thin], color=colour, alpha=alpha, **line)
    return float(value_T[-1])


def losses(variant: Variant, scales: dict[str, tuple[float, float]]) -> Markup:
    """A panel per stage, each with its own y axis: stages train on different kinds of text."""
    with quiet():
        figure, row = panels([1.0] * len(variant.stages), 2.9, common=False)
        names = [stage.name for stage in variant.stages]
        for axes, stage in zip(row, variant.stages, strict=True):
            _panel(axes, stage, drafter_colour(stage.name, names), scales.get(stage.name))
        row[0].set_ylabel("loss, nats per token")
        return to_svg(figure, f"loss-{variant.name}", f"Loss of each stage beside the target's own, {variant.name}")
