"""The page: numbers, figures and tables through one template, everything escaped unless it is a figure of ours."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from longspec import methods, shown
from longspec.config.names import UNTRAINED
from longspec.measure.estimates import FEWEST
from longspec.measure.tasks import Settings, shape_name
from longspec.report import plots, tables
from longspec.report.inputs import Target, Variant
from longspec.report.numbers import all_samples
from longspec.report.style import STAGES, Series, drafter_colour


def compact(count: float) -> str:
    """Shorten such as 720,896 to 0.7 M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.1 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def visible(text: str) -> str:
    """Show line ends, tabs and control characters as signs; a line end still ends the line."""
    return shown.lines(text.replace("\t", "⇥").replace("\n", "↵\n"))


def environment() -> Environment:
    """Set up Jinja2 with autoescape on, undefined names an error, and characters that nobody sees as signs."""
    made = Environment(
        loader=PackageLoader("longspec", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: shown.lines(value) if type(value) is str else value,  # names may hold what no reader sees
    )
    made.filters.update(
        {
            "count": lambda value: f"{value:,}",
            "two": lambda value: f"{value:.2f}",
            "signed": lambda value: f"{value:+.3f}".replace("-", "−"),
            "percent": lambda value: f"{100 * value:.1f} %".replace("-", "−"),
            "compact": compact,
            "maybe": lambda value, form=".2f": "—" if value is None else format(value, form),
            "shape": shape_name,
            "proposal": lambda shape: f"{shape} tokens" if isinstance(shape, int) else f"a {shape_name(shape)} of tokens",
            "drafter": plots.drafter_name,
            "visible": visible,
            "position": lambda names, name: names.index(name) % STAGES + 1,
            "data_of": lambda variant, drafter: next((s.data for s in variant.stages if s.name == drafter), None),
        }
    )
    return made


def figures(variants: list[Variant], numbers: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return all SVG elements; those of one variant by its name."""

    def drafters(part: str, v: Variant) -> list[Series]:
        found = numbers[part][v.name].items()
        return [Series(values, plots.drafter_name(name), drafter_colour(name, v.stage_names)) for name, values in found]

    def stages(v: Variant) -> list[Series]:
        return [Series(stage, "draft", drafter_colour(stage.name, v.stage_names)) for stage in v.stages]

    return {kind: plots.by_drafter(kind, variants, numbers, settings) for kind in plots.BY_DRAFTER} | {
        "context": plots.by_context({v.name: drafters("by_context", v) for v in variants}, settings),
        "position": plots.by_position({v.name: drafters("by_position", v) for v in variants}, settings),
        "loss": plots.losses({v.name: stages(v) for v in variants}),
    }


def render(
    variants: list[Variant],
    numbers: dict[str, Any],
    settings: Settings,
    target: Target,
    raw: list[tables.Manifest],
    packed: list[tables.Manifest],
    answered: list[tables.Manifest],
) -> str:
    """Return the whole page as HTML text. answered: of the datasets whose questions the target has answered."""
    stages = [(v.name, stage) for v in variants for stage in v.stages]
    not_finite = [(name, stage.name, len(stage.metrics) - len(plots.curves(stage)[0])) for name, stage in stages]
    first, left_out = (numbers[part][variants[0].name] for part in ("variants", "left_out"))  # alike for all variants
    measured = {task: found["prompts"] + left_out.get(task, 0) for task, found in first[UNTRAINED].items()}
    page = environment().get_template("report/page.html.j2")
    return page.render(
        run=numbers["run"],
        variants=variants,
        numbers=numbers,
        settings=settings,
        target=target,
        longest_bar=max(0.001, *(f["mean"] - 1 for found in numbers["overall"].values() for f in found.values())),
        figures=figures(variants, numbers, settings),
        samples={v.name: all_samples(v) for v in variants},
        unfinished=[f"{variant}, {stage}: {count:,}" for variant, stage, count in not_finite if count],
        short_of_prompts=[f"{task}: {n} of {settings.prompts}" for task, n in measured.items() if n < settings.prompts],
        left_out=[f"{task}: {count} prompts" for task, count in left_out.items()],
        fewest=FEWEST,
        soft=any(methods.soft_labels(stage.recipe) for _, stage in stages),
        raw=tables.raw_table(raw, variants, settings.tasks),
        faults=tables.faults_table(raw),
        packed=tables.packed_table(packed, variants),
        answered=tables.answers_table(answered),
        recipes={v.name: tables.recipe_table(v) for v in variants},
        provenance={v.name: tables.provenance_table(v, target) for v in variants},
    )
