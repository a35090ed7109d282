"""`python -m longspec.report.serves`: a page of one draft in several engines, position by position, and its numbers as JSON.

Side by side stand the estimate of training, our own loop and each engine that was measured. What decides which engines these
are: workflow/serves.py.
"""

import argparse
import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from longspec import shown
from longspec.atomic_files import write_json, write_text
from longspec.config.names import FINAL
from longspec.engines import ENGINES, OURS
from longspec.measure.estimates import acceptance, ratio_of, too_few
from longspec.measure.lines import FAULT, Evaluation, check_pairs, fault_in, figures, read
from longspec.measure.tasks import parse
from longspec.report.inputs import Stage, read_provenance, read_stage
from longspec.report.page import environment
from longspec.shown import named_path

Row = dict[str, Any]
TITLES = {OURS: f"{OURS}, our loop"} | {name: engine.title for name, engine in ENGINES.items()}
# A position's acceptance: of the rounds that kept all drafted tokens before it, the share that kept it too. Suffix: P prompts.
LESS = 0.02  # the share of our acceptance that an engine may lose
SHARE, LENGTH = "acceptance", "acceptance length"  # what a row of the gate compares


def on_tasks(found: Evaluation, tasks: Collection[str]) -> Evaluation:
    """Return the measurements of some tasks, in the main setting."""
    chosen_P = np.isin(found["task"], list(tasks))
    lines = [line for line in found.main_lines if line["task"] in tasks]
    columns = {name: column_P[chosen_P] for name, column_P in found.columns.items()}
    return Evaluation(found.path, columns, {next(iter(found.by_setting)): lines})


def depth(found: Evaluation) -> int:
    """Return the number of drafted tokens in a round."""
    return len(found.main_lines[0]["positions"])


def ratio(over: str, under: str, *found: Evaluation) -> Row | None:
    """Return a ratio of two columns over all prompts; for two measurements, first minus second. None without a round."""
    with suppress(ValueError):
        return ratio_of(found[0].of_task(None), *((one, over, under) for one in found))
    return None


def judge(title: str, ours: Evaluation, served: Evaluation) -> list[Row]:
    """Return a row for each position, and one for the tokens of a round: ours, the engine's, share lost, verdict.

    A row fails if the whole 95 % interval of the difference, record by record, lies below -LESS of ours. `passed` is None if
    too few records were measured; `why` gives the reason. The rows are like those of measure/gates.py.
    """
    asked = [(f"token {place + 1}", SHARE, f"kept {place}", f"reached {place}") for place in range(depth(ours))]
    rows = []
    for what, figure, over, under in [*asked, ("tokens a round", LENGTH, "new_tokens", "rounds")]:
        before, after, apart = (ratio(over, under, *found) for found in ([ours], [served], [served, ours]))
        row = _row(title, what, figure)
        if before is None or after is None or apart is None:
            rows.append(row | {"after": after, "why": f"no round of {'ours' if before is None else title} came so far"})
            continue
        lost, why = 1 - after["mean"] / before["mean"] if before["mean"] else 0.0, too_few(apart)
        passed = None if why else bool(apart["high"] >= -LESS * before["mean"])
        rows.append(row | {"before": before, "after": after, "lost": lost, "difference": apart, "passed": passed, "why": why})
    return rows


def _row(title: str, what: str, figure: str) -> Row:
    """Return a comparison without figures."""
    row: Row = {"gate": title, "task": None, "what": what, "figure": figure, "limit": LESS}
    return row | dict.fromkeys(("before", "after", "lost", "difference", "passed"))


def unmeasured(title: str, fault: Row) -> Row:
    """Return the row of an engine without measurements: not judged if it refuses, failed if its text is wrong."""
    passed = False if fault["failed"] else None
    return _row(title, "measurement", SHARE) | {"passed": passed, "why": fault[FAULT]}


def same_texts(ours: Evaluation, served: Evaluation) -> int:
    """Return how many prompts have the same text in both, up to the shorter; near-ties and rounding make texts differ."""
    pairs = zip(ours.main_lines, served.main_lines, strict=True)
    return sum(all(a == b for a, b in zip(one["tokens"], other["tokens"], strict=False)) for one, other in pairs)


def training_row(stage: Stage, places: int) -> Row | None:
    """Return a stage's last estimate on held-out rows, for at most `places` positions; None if none was made."""
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
        "positions": [ratio(f"kept {place}", f"reached {place}", found) for place in range(depth(found))],
        "tokens": acceptance(found, all_P),
        "speed_up": ratio_of(all_P, (found, "seconds_plain", "seconds_speculative")),
        "same_texts": same_texts(ours, found),
    }


def groups(ours: Evaluation, served: dict[str, Evaluation]) -> list[Row]:
    """Return our own loop with the engines measured on the same tasks: one group for each set of tasks."""
    by_tasks: dict[tuple[str, ...], list[str]] = {}
    for name, found in served.items():
        by_tasks.setdefault(tuple(dict.fromkeys(found["task"].tolist())), []).append(name)
    made = []
    for tasks, names in (by_tasks or {tuple(dict.fromkeys(ours["task"].tolist())): []}).items():
        own = on_tasks(ours, tasks)
        for name in names:
            check_pairs(own, served[name])
        rows = [engine_row(OURS, own, own), *(engine_row(name, served[name], own) for name in names)]
        gates = [row for name in names for row in judge(TITLES[name], own, served[name])]
        made.append({"tasks": list(tasks), "prompts": len(own["task"]), "rows": rows, "gates": gates})
    return made


def variant_numbers(folder: Path, standings: dict[str, Row]) -> Row:
    """Return the numbers of a variant. standings: of each engine, from workflow/serves.py."""
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
        "chain": depth(ours),
        "training": training_row(stage, depth(ours)),
        "groups": groups(ours, found),
        "unmeasured": {name: standing["why"] for name, standing in standings.items() if standing["why"]},
        "faults": {name: fault | {"file": str(measured[name])} for name, fault in faults.items()},
        "left_out": {name: standing["left_out"] for name, standing in standings.items() if standing["left_out"]},
    }


def page_numbers(run: str, folders: list[tuple[str, Path]], standings: dict[str, dict[str, Row]]) -> Row:
    """Return all that the page shows, the content of serves.json; its gates have the form of a report's."""
    found = {variant: variant_numbers(folder, standings[variant]) for variant, folder in folders}
    gates = {
        variant: [row for group in held["groups"] for row in group["gates"]]
        + [unmeasured(TITLES[name], fault) for name, fault in held["faults"].items()]
        for variant, held in found.items()
    }
    return {"run": run, "variants": found, "gates": gates}


def main(arguments: list[str] | None = None) -> None:
    """Read the measurements, and write the page and its numbers."""
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
        write_text(options.out, page.render(**numbers, titles=TITLES, ours=OURS, less=LESS))


if __name__ == "__main__":
    main()
