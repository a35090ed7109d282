"""The page of draft methods at equal cost, and its numbers: out of the cells of methods.py.

An interval is over records: what a record brings from several seeds, and in several tasks, is one observation. What seeds make
differ, each seed's own figures show.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine
from benchmarks.cells import Cell
from longspec.atomic_files import write_text
from longspec.measure.estimates import FEWEST, estimate
from longspec.report.page import environment
from longspec.report.plots import draw_line
from longspec.report.serves import TITLES
from longspec.report.style import COLOUR, panels, quiet, to_svg

Row = dict[str, Any]
Counts = dict[tuple[str, str, int], tuple[float, float]]  # by task, data set and record: new tokens, rounds
ALL = "all"


def counts_of(cells: Sequence[Cell], shape: Any, task: str = ALL) -> Counts:
    """Return each record's sums over its prompts and over the cells, of one shape, of one task or of all."""
    sums: Counts = {}
    for row in (row for cell in cells for row in cell["acceptance"] if row["shape"] == shape and task in (row["task"], ALL)):
        for record, new, rounds in row["prompts"]:
            key = (row["task"], row["data"], record)
            before = sums.get(key, (0, 0))
            sums[key] = (before[0] + new, before[1] + rounds)
    return {key: (new, rounds) for key, (new, rounds) in sums.items() if rounds}


def tokens_a_round(counts: Counts, less: Counts | None = None) -> dict[str, Any]:
    """Return tokens a round over the records; of two methods their difference over the records that both have.

    Below FEWEST records there is no interval.
    """
    keys = sorted(counts if less is None else counts.keys() & less.keys())
    ratios = [tuple(zip(*(held[key] for key in keys), strict=True)) for held in (counts, less) if held is not None]
    texts = list(dict.fromkeys(key[1:] for key in keys))
    found: Row = estimate(*ratios, strata_N=[key[0] for key in keys], texts_N=[texts.index(key[1:]) for key in keys])
    return found if len(texts) >= FEWEST else found | {"low": None, "high": None}


def method_row(cells: Sequence[Cell], first: Sequence[Cell], times: Mapping[str, Row] | None) -> Row:
    """Return what the page tells of a method's cells, one a seed; first: those of the method that it is compared with.

    times: of each stage, what a step took while nothing else ran; None: not measured.
    """
    seeds = {cell["seed"] for cell in cells} & {cell["seed"] for cell in first}
    own, other = ([cell for cell in held if cell["seed"] in seeds] for held in (cells, first))
    rows = cells[0]["acceptance"]
    shapes = [json.loads(text) for text in dict.fromkeys(json.dumps(row["shape"]) for row in rows)]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    stages = [list(cell["training"].values()) for cell in cells]
    seconds = (
        [times[name]["seconds_a_step"] * stage["steps"] for name, stage in cells[0]["training"].items()] if times else None
    )
    lengths = [
        {
            "shape": shape,
            "tasks": {task: tokens_a_round(counts_of(cells, shape, task)) for task in (ALL, *tasks)},
            "each": [tokens_a_round(counts_of([cell], shape))["mean"] for cell in cells],
            "differences": None
            if own == other
            else {task: tokens_a_round(counts_of(own, shape, task), counts_of(other, shape, task)) for task in (ALL, *tasks)},
        }
        for shape in shapes
    ]
    return {
        "seeds": [cell["seed"] for cell in cells],
        "lengths": lengths,
        "minutes": None if seconds is None else sum(seconds) / 60,
        "steps": mean(sum(stage["steps"] for stage in held) for held in stages),
        "peak_gib": max(stage["peak_bytes"] for held in stages for stage in held) / 2**30,
        "bytes_a_token": cells[0]["bytes_a_token"],
        "near_ties": sum(row["near_ties"] for cell in cells for row in cell["acceptance"]),
        "unexplained": sum(row["mismatches"] - row["near_ties"] for cell in cells for row in cell["acceptance"]),
    }


def served_row(held: Row) -> Row:
    """Return each engine's speed and acceptance on the tasks that it can do, behind ours on the same tasks, or why it has none.

    held: a variant of serves.json.
    """
    rows = [row | {"tasks": group["tasks"]} for group in held["groups"] for row in group["rows"]]
    why = dict(held["unmeasured"]) | {name: fault["fault"] for name, fault in held["faults"].items()}
    for engine, tasks in held["left_out"].items():
        told = f"was not asked about {', '.join(tasks)}: {next(iter(tasks.values()))}"
        why[engine] = "; ".join(filter(None, [why.get(engine), told]))
    return {"rows": rows, "why": why, "chain": held["chain"]}


def numbers_of(cells: Sequence[Cell], times: Sequence[Cell]) -> Row:
    """Return the numbers of one size; the first method is the one that the others are compared with.

    times: cells of a few steps each, beside which nothing ran.
    """
    trained = [cell for cell in cells if "training" in cell]
    methods = {
        name: [cell for cell in trained if cell["method"] == name] for name in dict.fromkeys(c["method"] for c in trained)
    }
    first = next(iter(methods.values()))
    alone = {cell["method"]: cell["training"] for cell in times}
    served = next((cell["served"] for cell in cells if "served" in cell), {})
    return {
        "first": first[0]["method"],
        "methods": {name: method_row(held, first, alone.get(name)) for name, held in methods.items()},
        "served": {name: served_row(held) for name, held in served.items()},
    }


def figure(name: str, numbers: Row) -> Markup:
    """Draw tokens a round by task: a group of points a task, one for each method; a panel a shape."""
    rows = numbers["methods"]
    shapes = range(len(next(iter(rows.values()))["lengths"]))
    with quiet():
        drawn, axes = panels([1.0] * len(shapes), 3.2)
        for panel, place in zip(axes, shapes, strict=True):
            for number, (method, row) in enumerate(rows.items()):
                tasks = {task: found for task, found in row["lengths"][place]["tasks"].items() if task != ALL}
                offset = 1 + 0.13 * (number - (len(rows) - 1) / 2)
                draw_line(panel, list(tasks.values()), offset, COLOUR[f"stage-{number + 1}"], method)
                panel.set_xticks(range(1, len(tasks) + 1), list(tasks))
            panel.set_title(shape_title(next(iter(rows.values()))["lengths"][place]["shape"]))
        axes[0].set_ylabel("tokens a round")
        axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
        return to_svg(drawn, f"methods-{name}", f"Tokens a round of each method by task, {name}")


def shape_title(shape: Any) -> str:
    """Return what a shape drafts."""
    if isinstance(shape, int):
        return f"chains of {shape}"
    return f"trees by a budget of {shape['nodes']}" if isinstance(shape, dict) else f"trees of {sum(shape)}"


def write_page(folder: Path, sizes: Mapping[str, tuple[str, str | None]], cells: Sequence[Cell]) -> None:
    """Write methods.json and methods.html; sizes: by name their titles, and the sizes that say what a step takes."""
    of_size = {name: [cell for cell in cells if cell["size"] == name] for name in {cell["size"] for cell in cells}}
    numbers = {
        name: numbers_of(of_size[name], of_size.get(times or "", [])) for name, (_, times) in sizes.items() if name in of_size
    }
    made_on = machine.describe(("torch", "transformers", "deepspeed"))
    machine.write("methods", {"machine": made_on, "sizes": numbers})
    made = environment()
    made.filters["shape_title"] = shape_title
    made.loader = ChoiceLoader([made.loader, FileSystemLoader(Path(__file__).parent)])
    text = made.get_template("methods.html.j2").render(
        sizes=numbers,
        titles={name: title for name, (title, _) in sizes.items()},
        machine=made_on,
        engines=TITLES,
        figures={name: figure(name, held) for name, held in numbers.items()},
    )
    write_text(folder / "methods.html", text)
