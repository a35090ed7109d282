"""The comparison as one page, in the look of the report: the first run solid with round points, the second dashed, square."""

from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from longspec.compare.numbers import Pair
from longspec.evaluate.tasks import Settings
from longspec.report import plots, training_curves
from longspec.report.page import environment, left_out
from longspec.report.style import COLOUR, DASHED, Series

LOOKS: tuple[dict[str, Any], ...] = (
    {"colour": COLOUR["stage-3"]},
    {"colour": COLOUR["stage-4"], "line": DASHED, "marker": "s"},
)


def figures(pair: Pair, numbers: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """All SVG elements of a variant; those of one drafter by its name."""

    def both(values: Iterable[Any]) -> list[Series]:
        return [Series(value, run.name, **look) for value, run, look in zip(values, pair.runs, LOOKS, strict=True)]

    def draw(figure: Any, part: str) -> dict[str, Markup]:
        drawn: dict[str, Markup] = {}
        for name in dict.fromkeys([*pair.stages, pair.finals]):
            found = both(numbers[part][run.name][run.final if name == pair.finals else name] for run in pair.runs)
            drawn |= figure({name: found}, settings, f"{pair.variant}-")
        return drawn

    stages = [both(held) for held in pair.stages.values()]
    runs = list(pair.runs)
    return {kind: plots.by_drafter(kind, runs, numbers, settings, f"-{pair.variant}") for kind in plots.BY_DRAFTER} | {
        "context": draw(plots.by_context, "by_context"),
        "position": draw(plots.by_position, "by_position"),
        "growth": training_curves.growth(pair.variant, stages),
        "loss": training_curves.losses({pair.variant: stages})[pair.variant] if stages else Markup(),
    }


def render(pairs: list[Pair], numbers: dict[str, Any], settings: Settings) -> str:
    """The whole page as HTML text."""
    shown = [(pair, numbers["variants"][pair.variant]) for pair in pairs]
    page = environment().get_template("compare/compare.html.j2")
    return page.render(
        first=numbers["runs"][0],
        second=numbers["runs"][1],
        pairs=shown,
        settings=settings,
        figures={pair.variant: figures(pair, found, settings) for pair, found in shown},
        several=len(pairs) > 1,
        left_out=left_out(pairs[0].runs[0]),
    )
