"""Two runs in one figure: the first solid with round points, the second dashed with square ones."""

from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from longspec.compare.pairs import Pair
from longspec.report.growth_plot import Series, draw
from longspec.report.inputs import Settings, Stage
from longspec.report.loss_plot import curves, smooth, thinned
from longspec.report.plots import draw_point, interval_limits, position_limits, size_name
from longspec.report.style import COLOUR, panels, quiet, spread, to_svg

COLOURS = COLOUR["stage-3"], COLOUR["stage-4"]
LINES = "-", (0, (4, 2))
MARKERS = "o", "s"


def _bare(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


def _labels(axes: Axes, ends: list[tuple[str, float, str]], height: float) -> None:
    """Texts right of a panel, at the heights where their series end, moved apart where they would overlap."""
    for (text, _, colour), at in zip(ends, spread([end for _, end, _ in ends], height), strict=True):
        axes.annotate(
            text, (1, at), (5, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            color=colour, va="center", fontsize=8.5,
        )  # fmt: skip


def by_context(pair: Pair, numbers: dict[str, Any], settings: Settings, drafter: str) -> Markup:
    """Acceptance length by bucket of context length, a panel per task."""
    found = [numbers["by_context"][run.name][_own(pair, number, drafter)] for number, run in enumerate(pair.runs)]
    low, high = interval_limits([bucket for held in found for bucket in held])
    buckets = {task: [b for b in found[0] if b["task"] == task] for task in settings.tasks}
    with quiet():
        figure, row = panels([max(len(held), 1.4) for held in buckets.values()], 2.7)
        for axes, (task, held) in zip(row, buckets.items(), strict=True):
            _bare(axes)
            for number, values in enumerate(found):
                means = [bucket for bucket in values if bucket["task"] == task]
                at = [place + 0.16 * (number - 0.5) for place in range(len(means))]
                axes.plot(at, [b["mean"] for b in means], color=COLOURS[number], linestyle=LINES[number], linewidth=1.1)
                for place, value in zip(at, means, strict=True):
                    draw_point(axes, value, place, COLOURS[number], MARKERS[number])
            names = [f"{size_name(b['from'])}–{size_name(b['to'])}\nn = {b['prompts']}" for b in held]
            axes.set_xticks(range(len(held)), names)
            axes.set(xlim=(-0.55, len(held) - 0.45), ylim=(low, high), title=task)
        row[0].set_ylabel("acceptance length")
        ends = [(run.name, found[number][-1]["mean"], COLOURS[number]) for number, run in enumerate(pair.runs)]
        _labels(row[-1], ends, 0.075 * (high - low))
        return to_svg(figure, f"context-{pair.variant}-{drafter}", f"Acceptance length by context length, {drafter}")


def by_position(pair: Pair, numbers: dict[str, Any], settings: Settings, drafter: str) -> Markup:
    """Share of rounds in which drafted token 1, 2, ... was kept, a panel per task."""
    found = [numbers["by_position"][run.name][_own(pair, number, drafter)] for number, run in enumerate(pair.runs)]
    limits = position_limits({"by_position": {str(n): {drafter: shares} for n, shares in enumerate(found)}})
    places = list(range(1, settings.draft_tokens + 1))
    with quiet():
        figure, row = panels([1.0] * len(settings.tasks), 2.4)
        for axes, task in zip(row, settings.tasks, strict=True):
            _bare(axes)
            for number, shares in enumerate(found):
                (line,) = axes.plot(places, shares[task], color=COLOURS[number], linestyle=LINES[number], linewidth=1.4)
                line.set(marker=MARKERS[number], markersize=4.5, clip_on=False)
            axes.set(xlim=(0.8, len(places) + 0.2), ylim=limits, xticks=places, title=task)
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        row[0].set_ylabel("rounds in which it was kept")
        ends = [(run.name, found[number][task][-1], COLOURS[number]) for number, run in enumerate(pair.runs)]
        _labels(row[-1], ends, 0.075 * (limits[1] - limits[0]))
        return to_svg(figure, f"position-{pair.variant}-{drafter}", f"Acceptance by position in the round, {drafter}")


def _own(pair: Pair, number: int, drafter: str) -> str:
    """The drafter's name in one of the runs."""
    return pair.runs[number].final if drafter == pair.finals else drafter


def growth(pair: Pair) -> Markup:
    """The trainer's estimates of acceptance, a panel per stage of both runs; empty without any."""
    columns = [
        [
            Series(stage, run.name, COLOURS[number], LINES[number], MARKERS[number])
            for number, run in enumerate(pair.runs)
            for stage in run.stages
            if stage.name == name
        ]
        for name in pair.stages
    ]
    return draw(f"growth-{pair.variant}", f"Expected tokens per round on held-out text in training, {pair.variant}", columns)


def losses(pair: Pair) -> Markup:
    """A panel per stage of both runs: smoothed losses, and the target's own on the same tokens, thin and grey."""
    stages = [[next(s for s in run.stages if s.name == name) for run in pair.runs] for name in pair.stages]
    with quiet():
        figure, row = panels([1.0] * len(stages), 2.9, common=False)
        for axes, both in zip(row, stages, strict=True):
            _bare(axes)
            data = dict.fromkeys(stage.data for stage in both)
            axes.set(title=f"{both[0].name}  ·  {' / '.join(data)}", xlabel="optimizer step")
            ends = [end for number, stage in enumerate(both) for end in _curve(axes, number, stage)]
            low, high = axes.get_ylim()
            _labels(axes, ends, 0.07 * (high - low))
        row[0].set_ylabel("loss, nats per token")
        return to_svg(figure, f"loss-{pair.variant}", f"Loss of each stage in both runs, {pair.variant}")


def _curve(axes: Axes, number: int, stage: Stage) -> list[tuple[str, float, str]]:
    """One run's curves; returns the labels of their ends."""
    step_T, loss_T, target_T = curves(stage)
    known_T, ends = np.isfinite(target_T), []
    for value_T, at_T, colour, width in (
        (loss_T, step_T, COLOURS[number], 1.9),
        (target_T[known_T], step_T[known_T], COLOUR["muted"], 0.8),
    ):
        if len(value_T):
            thin, smoothed_T = thinned(at_T), smooth(value_T)
            axes.plot(at_T[thin], smoothed_T[thin], color=colour, linestyle=LINES[number], linewidth=width)
            ends.append((f"{smoothed_T[-1]:.2f}", float(smoothed_T[-1]), colour))
    return ends
