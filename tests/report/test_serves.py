"""The page of one draft in several engines: figures worked out by hand, the gate, engines that were not measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl, shown
from longspec.measure import gates
from longspec.measure.estimates import estimate
from longspec.report import serves
from tests.refusals import refused
from tests.report.synthetic_run import SETTINGS, line, write_variant
from tests.report.test_page import Resources, read_page

SECTION = SETTINGS | {"shapes": [2], "tasks": {"short": {"data": "stdlib", "context": [1, 9]}}}
WHY = "is not installed: `make .venv-serve/openvino/.stamp`, then <b>more</b>"
# Drafted tokens kept in each round of ten prompts, each of a record of its own.
OURS = 2 * [[2, 2, 0], [1, 2], [0, 2, 1], [2], [2, 1, 1]]
TORN = [[min(kept, 1) for kept in rounds] for rounds in OURS]  # an engine that reads a wrong second token
STEP, SHARES = 100, [0.75, 0.5, 0.25]


def write_lines(path: Path, kept: list[list[int]], task: str = "short", **more: Any) -> None:
    rows = [line("final", task, prompt, rounds, 2) | {"tokens": [5, 6]} | more for prompt, rounds in enumerate(kept)]
    jsonl.write(path, rows)


def standing(**changes: Any) -> dict[str, Any]:
    return {"section": SECTION, "why": "", "left_out": {}} | changes


def write_variant_of(path: Path) -> dict[str, Any]:
    """A variant whose last stage made an estimate, measured by us and in two engines; how its engines stand."""
    write_variant(path, "base", SETTINGS)
    rows = list(jsonl.read(path / "longcot/metrics.jsonl"))
    rows[-1]["held_out"] = {f"acceptance_{place}": share for place, share in enumerate(SHARES, 1)} | {
        "expected_tokens": 2.21875
    }
    jsonl.write(path / "longcot/metrics.jsonl", rows)
    write_lines(path / "serves/longspec.jsonl", OURS)
    write_lines(path / "serves/vllm.jsonl", OURS, engine="vllm", seconds_draft=None, seconds_target=None, seconds_plain=3.0)
    write_lines(path / "serves/llama.cpp.jsonl", TORN, engine="llama.cpp", tokens=[5, 7])
    by = {name: standing(section=SECTION | {"engine": name}) for name in ("vllm", "llama.cpp")}
    return {"longspec": standing(), **by, "openvino": standing(section=None, why=WHY)}


def page_of(place: Path, standings: dict[str, Any]) -> tuple[dict[str, Any], Resources, str]:
    """Make the page of the variant `base` in a folder: its numbers, and what stands on it."""
    out = place / "serves.html"
    words = ["--run", "demo", "--variant", f"base={place / 'base'}", "--standings", json.dumps({"base": standings})]
    serves.main([*words, "--out", str(out)])
    parser, _, text = read_page(place, out.name)
    return json.loads(out.with_suffix(".json").read_text()), parser, text


def test_figures_are_shares_of_rounds_that_came_so_far_with_their_interval(tmp_path: Path) -> None:
    numbers, _, _ = page_of(tmp_path, write_variant_of(tmp_path / "base"))
    held = numbers["variants"]["base"]
    (group,) = held["groups"]
    ours, vllm, torn = group["rows"]
    assert [row["engine"] for row in group["rows"]] == ["longspec", "vllm", "llama.cpp"]
    for place, found in enumerate(ours["positions"], 1):
        kept = [sum(n >= place for n in rounds) for rounds in OURS]
        reached = [sum(n >= place - 1 for n in rounds) for rounds in OURS]
        assert {name: found[name] for name in ("mean", "low", "high")} == estimate((kept, reached))
    assert ours["positions"] == vllm["positions"]
    assert torn["positions"][1]["mean"] == 0.0
    assert (ours["rounds"], ours["tokens"]["mean"]) == (24, (32 + 24) / 24)
    assert (vllm["speed_up"]["mean"], vllm["tokens_per_second_plain"]) == (3.0, 56 / 30)
    assert (vllm["same_texts"], torn["same_texts"]) == (10, 0)
    assert held["training"]["step"] == STEP
    assert held["training"]["positions"] == SHARES[:2]  # of as many positions as are decoded


def test_the_gate_fails_an_engine_that_is_clearly_below_and_says_where(tmp_path: Path, capsys: Any) -> None:
    numbers, _, text = page_of(tmp_path, write_variant_of(tmp_path / "base"))
    verdicts = {(row["gate"], row["what"]): row["passed"] for row in numbers["gates"]["base"]}
    vllm = dict.fromkeys([("vLLM", "token 1"), ("vLLM", "token 2"), ("vLLM", "tokens a round")], True)
    torn = {("llama.cpp", "token 1"): True, ("llama.cpp", "token 2"): False, ("llama.cpp", "tokens a round"): False}
    assert verdicts == vllm | torn
    assert "vLLM is not clearly below our loop : 2.33 tokens a round, ours 2.33" in text.replace("loop:", "loop :")
    assert "llama.cpp keeps clearly less than our loop (token 2, tokens a round)" in text
    with refused("2 of 6 comparisons", tmp_path / "serves.html", kind=shown.ManyLinesError):
        gates.check(tmp_path / "serves.json", tmp_path / "gates.json")
    assert not (tmp_path / "gates.json").exists()
    assert "base: llama.cpp: token 2: acceptance 0.600 -> 0.000, 100.0% lost of 2.0% allowed" in capsys.readouterr().out


def test_a_small_loss_and_one_within_its_interval_hold(tmp_path: Path) -> None:
    """One round of one record keeps one token less, of 24 rounds: the difference may as well be none."""
    standings = write_variant_of(tmp_path / "base")
    write_lines(tmp_path / "base/serves/llama.cpp.jsonl", [[2, 1, 0], *OURS[1:]], engine="llama.cpp")
    numbers, _, _ = page_of(tmp_path, standings)
    rows = [row for row in numbers["gates"]["base"] if row["gate"] == "llama.cpp"]
    assert [row["lost"] > 0.02 for row in rows] == [False, True, False]
    assert [row["passed"] for row in rows] == [True, True, True]
    gates.check(tmp_path / "serves.json", tmp_path / "gates.json")
    assert (tmp_path / "gates.json").exists()


def test_an_engine_without_a_task_stands_in_a_group_of_its_own_beside_ours_on_the_same_tasks(tmp_path: Path) -> None:
    standings = write_variant_of(tmp_path / "base")
    section = SECTION | {"tasks": SECTION["tasks"] | {"cot": {"data": "puzzles", "context": [1, 9]}}}
    for name in ("longspec", "vllm"):
        path, more = tmp_path / f"base/serves/{name}.jsonl", {} if name == "longspec" else {"engine": name}
        rows = list(jsonl.read(path))
        write_lines(path, [[0]] * 10, "cot", **more)
        jsonl.write(path, [*rows, *jsonl.read(path)])
        standings[name] = standing(section=section | more)
    standings["llama.cpp"]["left_out"] = {"cot": "recipe.method.sliding_window: 512"}
    numbers, _, text = page_of(tmp_path, standings)
    groups = {tuple(group["tasks"]): group["rows"] for group in numbers["variants"]["base"]["groups"]}
    assert [row["engine"] for row in groups["short", "cot"]] == ["longspec", "vllm"]
    assert [row["engine"] for row in groups["short",]] == ["longspec", "llama.cpp"]
    assert (groups["short", "cot"][0]["rounds"], groups["short",][0]["rounds"]) == (34, 24)
    assert "llama.cpp was not asked about cot: recipe.method.sliding_window: 512" in text


def test_engines_that_were_not_measured_stand_there_with_the_reason_and_the_page_is_whole(tmp_path: Path) -> None:
    standings = write_variant_of(tmp_path / "base")
    _, parser, text = page_of(tmp_path, standings)
    assert "OpenVINO is not installed: make .venv-serve/openvino/.stamp , then <b>more</b>" in text
    assert ("code", {}) in parser.elements
    assert (parser.faults, parser.open) == ([], [])
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    alone = {"longspec": standing(), "openvino": standing(section=None, why=WHY)}
    jsonl.write(tmp_path / "base/longcot/metrics.jsonl", jsonl.read(tmp_path / "base/base/metrics.jsonl"))
    _, _, text = page_of(tmp_path, alone)
    assert "No engine was measured; our own loop keeps 2.33 tokens a round." in text
    assert "Training made no estimate: set runtime.held_out_every in the stage." in text


@pytest.mark.parametrize(("failed", "passed"), [(False, None), (True, False)])
def test_an_engines_own_fault_stands_in_its_row_and_leaves_the_others_figures(
    tmp_path: Path, capsys: Any, failed: bool, passed: bool | None
) -> None:
    """A refusal is not judged; text that is wrong fails."""
    standings = write_variant_of(tmp_path / "base")
    jsonl.write(tmp_path / "base/serves/llama.cpp.jsonl", [{"fault": "aborts: a <b> is null", "failed": failed}])
    numbers, parser, text = page_of(tmp_path, standings)
    assert [row["engine"] for row in numbers["variants"]["base"]["groups"][0]["rows"]] == ["longspec", "vllm"]
    assert [row["passed"] for row in numbers["gates"]["base"]] == [True, True, True, passed]
    assert text.count("aborts: a <b> is null") == 2
    assert (parser.faults, parser.open) == ([], [])
    if failed:
        with refused("1 of 4 comparisons", kind=shown.ManyLinesError):
            gates.check(tmp_path / "serves.json", tmp_path / "gates.json")
    else:
        gates.check(tmp_path / "serves.json", tmp_path / "gates.json")
    what = "failed" if failed else "not judged"
    assert f"base: llama.cpp: measurement: {what}, aborts: a <b> is null" in capsys.readouterr().out
