"""How acceptance on held-out text grew while a stage trained: the estimates that the trainer logged."""

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from longspec.report.inputs import Stage, Variant
from longspec.report.style import COLOUR, drafter_colour, panels, quiet, spread, to_svg


@dataclass(frozen=True)
class Series:
    """One stage's estimates and their look; `label` stands before the last value."""

    stage: Stage
    label: str
    colour: str
    line: Any = "-"
    marker: str = "o"


def estimates(stage: Stage) -> list[dict[str, Any]]:
    """Each logged estimate with its step: acceptance_k by lag, expected_tokens a round, loss in nats a label, seconds."""
    logged = [{"step": row["step"]} | row["held_out"] for row in stage.metrics if "held_out" in row]
    return [row for row in logged if row["expected_tokens"] is not None]  # null: it was not finite


def growth(variant: Variant) -> Markup:
    """A panel per stage; empty when no stage logged an estimate."""
    names = [stage.name for stage in variant.stages]
    columns = [[Series(stage, "", drafter_colour(stage.name, names))] for stage in variant.stages]
    return draw(f"growth-{variant.name}", f"Expected tokens per round on held-out text in training, {variant.name}", columns)


def draw(name: str, told: str, columns: list[list[Series]]) -> Markup:
    """A panel for each stage with an estimate, its series one over the other; all panels on one scale."""
    columns = [held for series in columns if (held := [one for one in series if estimates(one.stage)])]
    if not columns:
        return Markup()
    values = [row["expected_tokens"] for series in columns for one in series for row in estimates(one.stage)]
    low, high = 1 - 0.04 * (max(values) - 1), max(values) + 0.12 * (max(values) - 1) + 0.02
    with quiet():
        figure, row = panels([1.0] * len(columns), 2.5)
        for axes, series in zip(row, columns, strict=True):
            axes.grid(axis="y")
            axes.spines["left"].set_visible(False)
            axes.axhline(1, color=COLOUR["muted"], linewidth=0.8)
            ends = []
            for one in series:
                found = estimates(one.stage)
                steps, tokens = [at["step"] for at in found], [at["expected_tokens"] for at in found]
                axes.plot(steps, tokens, color=one.colour, linestyle=one.line, marker=one.marker, markersize=4.5, linewidth=1.5)
                ends.append((f"{one.label} {tokens[-1]:.2f}".strip(), tokens[-1], one.colour))
            for (text, _, colour), at in zip(ends, spread([end for _, end, _ in ends], 0.08 * (high - low)), strict=True):
                axes.annotate(
                    text, (1, at), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                    color=colour, va="center", fontsize=8.5,
                )  # fmt: skip
            axes.set(xlim=(0, None), ylim=(low, high), title=f"{series[0].stage.name}  ·  {series[0].stage.data}")
            axes.set_xlabel("optimizer step")
        row[0].set_ylabel("expected tokens per round")
        return to_svg(figure, name, told)
