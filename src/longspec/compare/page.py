"""The comparison as one page, in the look of the report."""

from typing import Any

from jinja2 import ChoiceLoader, PackageLoader
from markupsafe import Markup

from longspec.compare import paired_plots
from longspec.compare.pairs import Pair
from longspec.report import plots as report_plots
from longspec.report.inputs import Settings
from longspec.report.page import environment


def figures(pair: Pair, numbers: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """All SVG elements of a variant; those of one drafter by its name."""
    runs, compared = list(pair.runs), dict.fromkeys([*pair.stages, pair.finals])
    return {
        "acceptance": report_plots.acceptance(runs, numbers, settings, name=f"acceptance-{pair.variant}"),
        "speed": report_plots.speed(runs, numbers, settings, name=f"speed-{pair.variant}"),
        "context": {drafter: paired_plots.by_context(pair, numbers, settings, drafter) for drafter in compared},
        "position": {drafter: paired_plots.by_position(pair, numbers, settings, drafter) for drafter in compared},
        "growth": paired_plots.growth(pair),
        "loss": paired_plots.losses(pair) if pair.stages else Markup(),
    }


def render(pairs: list[Pair], numbers: dict[str, Any], settings: Settings) -> str:
    """The whole page as HTML text."""
    pages = environment()
    assert pages.loader is not None
    pages.loader = ChoiceLoader([PackageLoader("longspec.compare", "."), pages.loader])
    shown = [(pair, numbers["variants"][pair.variant]) for pair in pairs]
    return pages.get_template("compare.html.j2").render(
        first=numbers["runs"][0],
        second=numbers["runs"][1],
        pairs=shown,
        settings=settings,
        figures={pair.variant: figures(pair, found, settings) for pair, found in shown},
        several=len(pairs) > 1,
    )
