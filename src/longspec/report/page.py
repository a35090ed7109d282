"""Render the page: numbers, figures and tables through one template; everything is escaped except our own figures."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from longspec import methods, shown
from longspec.chain_length import shape_name
from longspec.config.names import UNTRAINED
from longspec.data.layout_tally import answer_reasons, cut_warning, unlike_served_warning
from longspec.measure.estimates import FEWEST
from longspec.measure.tasks import Settings
from longspec.report import plots, tables
from longspec.report.answer import verdict
from longspec.report.inputs import Variant
from longspec.report.style import STAGES

Manifest = dict[str, Any]


def environment() -> Environment:
    """Set up Jinja2: autoescape on, undefined names are errors, and invisible characters are made visible."""
    made = Environment(
        loader=PackageLoader("longspec", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: shown.lines(value) if type(value) is str else value,  # names may hold invisible characters
    )
    made.filters.update(
        {
            "count": lambda value: f"{value:,}",
            "two": lambda value: f"{value:.2f}",
            "signed": lambda value: f"{value:+.3f}".replace("-", "−") if round(value, 3) else "0.000",
            "percent": lambda value: f"{100 * value:.1f} %".replace("-", "−"),
            "maybe": lambda value, form=".2f": "—" if value is None else format(value, form),
            "shape": shape_name,
            "proposal": lambda shape: f"{shape} tokens" if isinstance(shape, int) else f"a {shape_name(shape)} of tokens",
            "drafter": plots.drafter_name,
            "verdict": verdict,
            "reasons": answer_reasons,
            "cut_warning": cut_warning,
            "served_warning": unlike_served_warning,
            "visible": lambda text: text.replace("\t", "⇥").replace("\n", "↵\n"),  # a line end still ends the line
            "position": lambda names, name: names.index(name) % STAGES + 1,
            "data_of": lambda variant, drafter: next((s.datasets for s in variant.stages if s.name == drafter), []),
        }
    )
    return made


def samples_of(variant: Variant) -> dict[str, list[dict[str, Any]]]:
    """Return, by drafter, the lines of the main setting that hold a sample text; drafters without one are left out."""
    found = {name: [line for line in one.main_lines if "sample" in line] for name, one in variant.evaluations.items()}
    return {name: lines for name, lines in found.items() if lines}


def render(
    variants: list[Variant],
    numbers: dict[str, Any],
    settings: Settings,
    target: dict[str, Any],
    raw: list[Manifest],
    packed: list[Manifest],
    answered: list[Manifest],
) -> str:
    """Return the whole page as HTML text. answered: manifests of datasets with answers by the target."""
    first, left_out = (numbers[part][variants[0].name] for part in ("variants", "left_out"))  # the same for all variants
    measured = {task: found["prompts"] + left_out.get(task, 0) for task, found in first[UNTRAINED].items()}
    trained = [stage.recipe for variant in variants for stage in variant.stages]
    page = environment().get_template("report/pages/page.html.j2")
    return page.render(
        run=numbers["run"],
        variants=variants,
        numbers=numbers,
        settings=settings,
        target=target,
        longest_bar=max(0.001, *(f["mean"] - 1 for found in numbers["overall"].values() for f in found.values())),
        context={v.name: plots.by_context(v, numbers["by_context"][v.name], settings) for v in variants},
        losses={v.name: plots.losses(v) for v in variants},
        samples={v.name: samples_of(v) for v in variants},
        short_of_prompts=[f"{task}: {n} of {settings.prompts}" for task, n in measured.items() if n < settings.prompts],
        left_out=[f"{task}: {count} prompts" for task, count in left_out.items()],
        fewest=FEWEST,
        labels={methods.soft_labels(recipe) for recipe in trained if methods.loss_weight(recipe) is not None},
        weighted=sorted({round(weight, 3) for recipe in trained if (weight := methods.loss_weight(recipe)) not in (None, 1)}),
        unlike_nats=any(methods.loss_weight(recipe) is None for recipe in trained),
        partial=any(methods.vocabulary_size(recipe) for recipe in trained),
        raw=raw,
        packed=packed,
        answered=answered,
        recipes={v.name: tables.recipe_table(v) for v in variants},
        provenance={v.name: tables.provenance_table(v, target) for v in variants},
    )
