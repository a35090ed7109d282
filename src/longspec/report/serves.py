"""`python -m longspec.report.serves`: a page of one draft in several engines, position by position, and its numbers as JSON.

Side by side stand the estimate of training, our own loop and each engine that was measured. What decides which engines these
are: workflow/serves.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from longspec import shown
from longspec.atomic_files import write_json, write_text
from longspec.config.names import FINAL
from longspec.engines import ENGINES, OURS
from longspec.measure import positions
from longspec.measure.estimates import acceptance, ratio_of
from longspec.measure.lines import Evaluation, check_pairs, fault_in, figures, read
from longspec.measure.tasks import parse
from longspec.report.inputs import Stage, read_provenance, read_stage
from longspec.report.page import environment
from longspec.shown import named_path

Row = dict[str, Any]
TITLES = {OURS: f"{OURS}, our loop"} | {name: engine.title for name, engine in ENGINES.items()}


def training_row(stage: Stage, places: int) -> Row | None:
    """Return a stage's last estimate on held-out rows, of so many positions at most; None where none was made."""
    found = next((row for row in reversed(stage.metrics) if row.get("held_out")), None)
    if found is None:
        return None
    held = found["held_out"]
    shares = [held[f"acceptance_{place}"] for place in range(1, places + 1) if f"acceptance_{place}" in held]
    return {"step": found["step"], "positions": shares, "expected_tokens": held["expected_tokens"]}


def engine_row(name: str, found: Evaluation, ours: Evaluation) -> Row:
    """Return what the page shows of one engine."""
    all_P = found.of_task(None)
    return figures(found.main_lines) | {
        "engine": name,
        "positions": [positions.ratio(f"kept {place}", f"reached {place}", found) for place in range(positions.depth(found))],
        "tokens": acceptance(found, all_P),
        "speed_up": ratio_of(all_P, (found, "seconds_plain", "seconds_speculative")),
        "same_texts": positions.same_texts(ours, found),
    }


def groups(ours: Evaluation, served: dict[str, Evaluation]) -> list[Row]:
    """Return our own loop and the engines by the tasks that these were measured on: one group for each set of tasks."""
    by_tasks: dict[tuple[str, ...], list[str]] = {}
    for name, found in served.items():
        by_tasks.setdefault(tuple(dict.fromkeys(found["task"].tolist())), []).append(name)
    made = []
    for tasks, names in (by_tasks or {tuple(dict.fromkeys(ours["task"].tolist())): []}).items():
        own = positions.on_tasks(ours, tasks)
        for name in names:
            check_pairs(own, served[name])
        rows = [engine_row(OURS, own, own), *(engine_row(name, served[name], own) for name in names)]
        gates = [row for name in names for row in positions.judge(TITLES[name], own, served[name])]
        made.append({"tasks": list(tasks), "prompts": len(own["task"]), "rows": rows, "gates": gates})
    return made


def variant_numbers(folder: Path, standings: dict[str, Row]) -> Row:
    """Return the numbers of a variant; standings: of each engine, as workflow/serves.py says."""
    measured = {
        name: folder / "serves" / f"{name}.jsonl" for name, standing in standings.items() if standing["section"] is not None
    }
    faults = {name: fault for name, path in measured.items() if (fault := fault_in(path)) is not None}
    found = {name: read(path, parse(standings[name]["section"])) for name, path in measured.items() if name not in faults}
    ours = found.pop(OURS)
    provenance = read_provenance(folder)
    stage = read_stage(folder / provenance.get(FINAL, {"stage": provenance["order"][-1]})["stage"])
    return {
        "method": str(stage.recipe.method.name),
        "stage": stage.name,
        "chain": positions.depth(ours),
        "training": training_row(stage, positions.depth(ours)),
        "groups": groups(ours, found),
        "unmeasured": {name: standing["why"] for name, standing in standings.items() if standing["why"]},
        "faults": {name: fault | {"file": str(measured[name])} for name, fault in faults.items()},
        "left_out": {name: standing["left_out"] for name, standing in standings.items() if standing["left_out"]},
    }


def page_numbers(run: str, folders: list[tuple[str, Path]], standings: dict[str, dict[str, Row]]) -> Row:
    """Return all that the page shows, which is the content of serves.json; its gates as those of a report."""
    found = {variant: variant_numbers(folder, standings[variant]) for variant, folder in folders}
    gates = {
        variant: [row for group in held["groups"] for row in group["gates"]]
        + [positions.unmeasured(TITLES[name], fault) for name, fault in held["faults"].items()]
        for variant, held in found.items()
    }
    return {"run": run, "variants": found, "gates": gates}


def main(arguments: list[str] | None = None) -> None:
    """Read what was measured, and write the page and its numbers."""
    parser = argparse.ArgumentParser(prog="python -m longspec.report.serves", description=__doc__)
    parser.add_argument("--run", required=True, help="the run's name")
    parser.add_argument("--variant", required=True, action="append", type=named_path, help="NAME=FOLDER; repeat it")
    parser.add_argument("--standings", required=True, type=json.loads, help="how each engine stands, by variant, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="the page; the numbers go beside it as .json")
    options = parser.parse_args(arguments)
    with shown.ending_for_mistakes():
        numbers = page_numbers(options.run, options.variant, options.standings)
        write_json(options.out.with_suffix(".json"), numbers)
        page = environment().get_template("report/pages/serves.html.j2")
        write_text(options.out, page.render(**numbers, titles=TITLES, ours=OURS, less=positions.LESS))


if __name__ == "__main__":
    main()
