"""What the comparison of the methods computes of lines, that its cells are made once, and what its page tells."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from scipy.special import stdtrit

from benchmarks import methods, methods_page
from benchmarks.cells import Cell, fill
from longspec.config.run_file import read_run
from longspec.decode.texts import Row

DEPTH = 4
TREE = [2, 1, 1, 1]


def line(task: str, record: int, accepted: list[int], shape: Any = DEPTH) -> dict[str, Any]:
    """An evaluation's line of a prompt whose rounds kept so many drafted tokens."""
    row = Row(ids=[0] * (1 + sum(accepted) + len(accepted)), accepted=accepted)
    counts = {"record": record, "new_tokens": row.new_tokens, "rounds": row.rounds, "mismatches": 0, "near_ties": 0}
    return {"task": task, "shape": shape, "positions": row.position_acceptance(DEPTH), **counts}


def cell(method: str, seed: int, lines: list[dict[str, Any]], seconds: float = 1.0) -> Cell:
    """A cell with these measurements."""
    steps = [{"seconds": seconds, "tokens": 8, "labels": 7, "peak_rss_bytes": 2**30}] * 12
    return {
        "size": "demo",
        "method": method,
        "seed": seed,
        "training": {"base": methods.trained(steps), "longcot": methods.trained(steps)},
        "bytes_a_token": {"whole": 10, "top_64": 5},
        "acceptance": [row | {"data": "stdlib"} for row in methods.measured(lines)],
    }


def drawn(seed: int, kept: int) -> list[dict[str, Any]]:
    """Lines of 20 records of two tasks, whose rounds keep 0 to so many tokens, by chains and by trees."""
    numbers = random.Random(seed)
    return [
        line(task, record, [numbers.randint(0, kept) for _ in range(6)], shape)
        for shape in (DEPTH, TREE)
        for task in ("1k", "4k")
        for record in range(20)
    ]


def test_a_page_tells_lengths_and_paired_differences_of_all_seeds() -> None:
    lines = {(method, seed): drawn(seed, kept) for method, kept in ((methods.GLIDE, 2), (methods.DFLASH, 4)) for seed in (1, 2)}
    told = methods_page.numbers_of([cell(*key, held) for key, held in lines.items()], [cell(methods.GLIDE, 0, [], 0.5)])
    assert (told["first"], list(told["methods"])) == (methods.GLIDE, [methods.GLIDE, methods.DFLASH])
    for shape, place in ((DEPTH, 0), (TREE, 1)):
        means = {}
        for method, row in told["methods"].items():
            chosen = [one for (name, _), held in lines.items() if name == method for one in held if one["shape"] == shape]
            means[method] = sum(one["new_tokens"] for one in chosen) / sum(one["rounds"] for one in chosen)
            assert row["lengths"][place]["tasks"]["all"]["mean"] == pytest.approx(means[method])
            assert len(row["lengths"][place]["each"]) == 2
        difference = told["methods"][methods.DFLASH]["lengths"][place]["differences"]["all"]
        assert difference["mean"] == pytest.approx(means[methods.DFLASH] - means[methods.GLIDE])
    assert told["methods"][methods.GLIDE]["lengths"][0]["differences"] is None
    assert (told["methods"][methods.GLIDE]["steps"], told["methods"][methods.GLIDE]["minutes"]) == (24, pytest.approx(0.2))
    assert told["methods"][methods.DFLASH]["minutes"] is None
    cells = [cell(methods.GLIDE, seed, drawn(seed, kept)) for seed, kept in ((1, 2), (2, 4))]
    told = methods_page.numbers_of([*cells, cell(methods.WINDOW, 2, drawn(2, 4))], [])  # a difference is of the seeds of both
    assert told["methods"][methods.WINDOW]["lengths"][0]["differences"]["all"]["mean"] == 0


def test_a_text_in_two_tasks_counts_once_and_few_texts_have_no_interval() -> None:
    of_task = {record: (1.0 + record % 3, 1.0) for record in range(12)}

    def interval(data: tuple[str, str]) -> Any:
        counts = {(task, name, record): held for task, name in zip("ab", data, strict=True) for record, held in of_task.items()}
        return methods_page.tokens_a_round(counts)

    once, apart = interval(("one", "one")), interval(("one", "other"))
    # Twice the same: as wide as of one task. Apart the variance halves, and there are 22 degrees of freedom in place of 11.
    width = (apart["high"] - apart["low"]) * 2**0.5 * stdtrit(11, 0.975) / stdtrit(22, 0.975)
    assert (once["mean"], once["high"] - once["low"]) == (apart["mean"], pytest.approx(width))
    few = methods_page.tokens_a_round({("a", "one", record): (2.0, 1.0) for record in range(methods_page.FEWEST - 1)})
    assert few == {"mean": 2.0, "low": None, "high": None}


def test_an_engine_stands_behind_our_loop_on_its_own_tasks_with_all_that_it_lacks() -> None:
    groups = [
        {"tasks": [task], "rows": [{"engine": "longspec"}, {"engine": name}]}
        for task, name in zip(("1k", "2k"), "ab", strict=True)
    ]
    held = {"chain": 4, "groups": groups, "unmeasured": {"c": "no"}, "faults": {"a": {"fault": "bad"}}}
    found = methods_page.served_row(held | {"left_out": {"a": {"2k": "long", "4k": "longer"}}})
    assert [(row["engine"], row["tasks"]) for row in found["rows"]] == [
        ("longspec", ["1k"]), ("a", ["1k"]), ("longspec", ["2k"]), ("b", ["2k"]),
    ]  # fmt: skip
    assert found["why"] == {"c": "no", "a": "bad; was not asked about 2k, 4k: long"}


def test_equal_minutes_are_those_of_the_slowest_method() -> None:
    times = {name: cell(name, 0, [], seconds)["training"] for name, seconds in ((methods.GLIDE, 0.5), (methods.EAGLE3, 2.0))}
    assert methods.steps_of_equal_minutes(times, methods.GLIDE, "base", 12) == 48
    assert methods.steps_of_equal_minutes(times, methods.EAGLE3, "base", 12) == 12


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


@pytest.mark.parametrize(("size", "short", "long"), [("demo", "1k", "4k"), ("smollm2", "2k", "8k")])
def test_all_methods_meet_the_same_data(size: str, short: str, long: str) -> None:
    run, variants = methods.SIZES[size].run, methods.SIZES[size].variants
    stages = methods.stages_of(run, methods.EXPERIMENTS)
    longest = []
    for stage in stages:
        recipes = [methods.compose_stage(run, variant, stage, methods.EXPERIMENTS).recipe for variant in variants.values()]
        names = ("data", "optimizer.lr", "global_batch", "epochs", "steps", "seed", "states", "model.name", "model.source")
        for name in names:
            assert len({str(OmegaConf.select(recipe, name)) for recipe in recipes}) == 1, name
        glide, full, window, blocks = recipes
        assert [one.method.name for one in recipes] == ["glide", "eagle3", "eagle3", "dflash"]
        assert (full.method.sliding_window, window.method.sliding_window) == (None, glide.draft.window)
        assert full.draft == window.draft
        assert full.method.vocabulary == blocks.method.vocabulary
        longest.append(glide.data.sequence_length)
    tasks = read_run(run, [methods.EXPERIMENTS]).says.evaluation["tasks"]
    assert tasks[short]["data"] == tasks[long]["data"]
    assert tasks[long]["context"][1] >= 4 * max(longest) - 1 >= tasks[long]["context"][0]
    identities = [methods.identity(size, method, 42)["decided_by"] for method in variants]
    assert len(set(identities)) == len(variants)
