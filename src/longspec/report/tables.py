"""Make rows for the page's tables of data, recipes and provenance."""

from collections import Counter
from operator import ne
from typing import Any

from longspec import methods
from longspec.config import plain
from longspec.report.inputs import Stage, Variant

# The recipe's main keys with the page's titles. The method's keys follow, then other keys that differ between stages, under
# their own names.
RECIPE_ROWS = {
    "data.name": "data",
    "data.sequence_length": "row length, tokens",
    "data.collation": "collation",
    "optimizer.lr": "learning rate",
    "global_batch": "global batch, rows",
}
HIDDEN = ("stage", "init")


def flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries and lists of dictionaries as one level of dotted keys; other lists become text."""
    if isinstance(content, list) and any(isinstance(item, dict) for item in content):
        content = {str(number): item for number, item in enumerate(content, 1)}
    if isinstance(content, dict):
        return {
            name: value
            for key, inner in content.items()
            for name, value in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: ", ".join(map(str, content)) if isinstance(content, list) else content}


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def recipe_table(variant: Variant) -> dict[str, Any]:
    """Return stages as columns, settings as rows; each cell is (text, whether it differs from the stage before)."""
    contents = [(stage.data, plain(stage.recipe)) for stage in variant.stages]
    recipes = [flatten(recipe | {"data": recipe["data"] | {"name": told}}) for told, recipe in contents]
    method = methods.settings_of(variant.stages[0].recipe.method.name)
    own = list(zip(*(method.told(stage.recipe) for stage in variant.stages), strict=True))  # by row: the cells of all stages
    covered = {*RECIPE_ROWS, *HIDDEN, "steps"} | {key for row in own for key in row[0][0]}
    differing = [key for key in sorted(set().union(*recipes)) if len({str(recipe.get(key)) for recipe in recipes}) > 1]
    rows = [(title, [_shown(recipe.get(key)) for recipe in recipes]) for key, title in RECIPE_ROWS.items()]
    if variant.stages[0].recipe.init is not None:
        rows.append(("begins with", [variant.stages[0].recipe.init, *("the stage before" for _ in variant.stages[1:])]))
    rows += [(row[0][1], [text for _, _, text in row]) for row in own]
    rows += [(key, [_shown(recipe.get(key)) for recipe in recipes]) for key in differing if key not in covered]
    counts = {"tokens": "tokens trained on", "labels": "labels", **method.COUNTS}
    measured = [
        ("optimizer steps", [f"{len(stage.metrics):,}" for stage in variant.stages]),
        *((title, [f"{stage.total(name):,}" for stage in variant.stages]) for name, title in counts.items()),
        *_counted(variant.stages, "labels of the mix", "mixed_labels"),
        *_counted(variant.stages, "labels replayed", "replayed_labels"),
        ("training seconds", [f"{stage.total('seconds'):,.0f}" for stage in variant.stages]),
        ("steps skipped", [f"{stage.metrics[-1]['skipped']:,}" for stage in variant.stages]),
    ]
    return {
        "stages": [stage.name for stage in variant.stages],
        "settings": [(name, list(zip(cells, map(ne, cells, [cells[0], *cells]), strict=True))) for name, cells in rows],
        "measured": measured,
    }


def _counted(stages: list[Stage], title: str, name: str) -> list[tuple[str, list[str]]]:
    """Return the shares of the trained tokens by source, as counted step by step; no row if nothing was counted."""
    cells = []
    for stage in stages:
        counts = Counter[str]()
        for row in stage.metrics:
            counts.update(row.get(name, {}))
        shares = (f"{source} {count / stage.total('labels'):.1%}" for source, count in sorted(counts.items()))
        cells.append(", ".join(shares) or "none")
    return [(title, cells)] if set(cells) != {"none"} else []


def provenance_table(variant: Variant, target: dict[str, Any]) -> list[tuple[str, str]]:
    """Return all of the final draft's provenance, and the target manifest's hash."""
    rows = [(key, "none" if value is None else str(value)) for key, value in flatten(variant.provenance).items()]
    return [*rows, ("target_manifest.json, SHA-256", target["manifest_hash"])]
