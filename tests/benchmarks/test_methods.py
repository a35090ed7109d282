"""What the comparison of the methods computes of lines, and that its cells are made once."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from benchmarks import methods
from benchmarks.cells import Cell, fill, over_seeds
from longspec.config.run_file import read_run
from longspec.decode.texts import Row

DEPTH = 4


def line(task: str, accepted: list[int], shape: Any = DEPTH) -> dict[str, Any]:
    """An evaluation's line of a prompt whose rounds kept so many drafted tokens."""
    row = Row(ids=[0] * (1 + sum(accepted) + len(accepted)), accepted=accepted)
    counts = {"new_tokens": row.new_tokens, "rounds": row.rounds, "mismatches": 0, "near_ties": 0}
    return {"task": task, "shape": shape, "positions": row.position_acceptance(DEPTH), **counts}


def cell(method: str, seed: int, lines: list[dict[str, Any]], seconds: float = 1.0) -> Cell:
    """A cell with these measurements."""
    steps = [{"seconds": seconds, "tokens": 8, "labels": 7, "peak_rss_bytes": 2**30}] * 3
    return {
        "size": "demo",
        "method": method,
        "seed": seed,
        "training": {"base": methods.trained(steps), "longcot": methods.trained(steps)},
        "bytes_a_token": {"whole": 10, "top_64": 5},
        "acceptance": methods.measured(lines),
    }


def test_figures_are_those_of_all_rounds_put_together() -> None:
    rounds = {"1k": [[4, 0, 2], [1, 4]], "4k": [[0, 0, 3]], "cot": [[2]]}
    lines = [line(task, accepted) for task, held in rounds.items() for accepted in held]
    found = methods.figures(cell(methods.GLIDE, 0, lines, seconds=0.5))
    of_task = {task: [kept for accepted in held for kept in accepted] for task, held in rounds.items()}
    every = [kept for held in of_task.values() for kept in held]
    for task, held in [*of_task.items(), ("all", every)]:
        assert found[task] == pytest.approx(1 + sum(held) / len(held))  # the target's own token, and those that were kept
    assert found["flat"] == pytest.approx(found["4k"] / found["1k"])
    kept = Counter(every)
    for place in range(1, DEPTH + 1):
        reached = sum(count for number, count in kept.items() if number >= place - 1)
        assert found[f"position {place}"] == pytest.approx(sum(n for number, n in kept.items() if number >= place) / reached)
    assert (found["seconds"], found["seconds a step"], found["tokens trained"]) == (3.0, 0.5, 48)


def test_trees_are_kept_and_chains_told() -> None:
    lines = [line("1k", [1]), line("4k", [1]), line("1k", [4], [2, 1, 1, 1]), line("4k", [4], [2, 1, 1, 1])]
    assert len(methods.measured(lines)) == 4
    assert methods.figures(cell(methods.GLIDE, 0, lines))["all"] == 2.0


def test_differences_pair_the_seeds_that_both_have() -> None:
    def lines(kept: int) -> list[dict[str, Any]]:
        return [line(task, [kept]) for task in ("1k", "4k")]

    glide = [cell(methods.GLIDE, seed, lines(kept)) for seed, kept in ((1, 1), (2, 2), (3, 2), (4, 4))]
    other = [cell(methods.WINDOW, seed, lines(kept)) for seed, kept in ((3, 1), (2, 0), (1, 1))]
    told = methods.table([*glide, *other])["demo"]
    assert told[methods.GLIDE]["all"]["mean"] == pytest.approx(3.25)
    assert "to GLIDE" not in told[methods.GLIDE]["all"]
    difference = told[methods.WINDOW]["all"]["to GLIDE"]
    assert sorted(difference["each"]) == [-2, -1, 0]
    assert methods.EAGLE3 not in told


@pytest.mark.parametrize(
    "values", [[3.0, 3.5], [1.0, 2.0, 4.0], [1, 2, 5, 3], [1, 2, 5, 3, 2], [0.1, 0.2, 0.15, 0.3, 0.25, 0.22]]
)
def test_an_interval_holds_95_of_100_of_student_s_distribution(values: list[float]) -> None:
    told, degrees = over_seeds(values), len(values) - 1
    low, high = told["interval"]
    assert (low + high) / 2 == pytest.approx(np.mean(values)) == told["mean"]
    t = (high - told["mean"]) / (np.std(values, ddof=1) / np.sqrt(len(values)))
    at = np.linspace(-t, t, 100_001)
    constant = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    assert np.trapezoid(constant * (1 + at**2 / degrees) ** (-(degrees + 1) / 2), at) == pytest.approx(0.95, abs=1e-4)


def test_cells_are_made_once_and_a_torn_one_again(tmp_path: Path) -> None:
    path, made = tmp_path / "cells.jsonl", []

    def make(which: Cell) -> Cell:
        made.append(which["seed"])
        return {"found": which["seed"] ** 2}

    first = fill(path, [{"seed": 1}, {"seed": 2}], make)
    with path.open("a") as file:
        file.write('{"seed": 3, "fou')  # killed while it wrote
    found = fill(path, [{"seed": 3}, {"seed": 2}], make)
    assert made == [1, 2, 3]
    assert found == [{"seed": 3, "found": 9}, first[1]]
    assert [json.loads(text) for text in path.read_text().splitlines()] == [*first, found[0]]


@pytest.mark.parametrize("size", methods.SIZES)
def test_all_methods_meet_the_same_data(size: str) -> None:
    run, variants = methods.SIZES[size].run, methods.SIZES[size].variants
    stages = methods.stages_of(run, methods.EXPERIMENTS)
    longest = []
    for stage in stages:
        recipes = [methods.compose_stage(run, variant, stage, methods.EXPERIMENTS).recipe for variant in variants.values()]
        names = ("data", "optimizer", "global_batch", "epochs", "steps", "seed", "states", "model.name", "model.source")
        for name in names:
            assert len({str(OmegaConf.select(recipe, name)) for recipe in recipes}) == 1, name
        glide, full, window = recipes
        assert (glide.method.name, full.method.name, window.method.name) == ("glide", "eagle3", "eagle3")
        assert (full.method.sliding_window, window.method.sliding_window) == (None, glide.draft.window)
        assert full.draft == window.draft
        longest.append(glide.data.sequence_length)
    tasks = read_run(run, [methods.EXPERIMENTS]).says.evaluation["tasks"]
    short, long = (tasks[name] for name in methods.SIZES[size].ends)
    assert short["data"] == long["data"]
    assert long["context"][1] >= 4 * max(longest) - 1 >= long["context"][0]
    identities = [methods.identity(size, method, 42)["decided_by"] for method in variants]
    assert len(set(identities)) == len(variants)
