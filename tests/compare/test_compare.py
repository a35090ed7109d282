"""Two runs made by hand: every figure of the comparison, its page, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json, write_json
from longspec.compare.__main__ import make_comparison, parse_arguments
from tests.report.synthetic_run import make_eagle3, positions
from tests.report.test_numbers import TINY, write_tiny
from tests.report.test_page import read_page

# Drafted tokens kept in each round of the second run's final draft: 11 rounds, 8 kept, 19 tokens as in the first run.
KEPT = [[1, 1, 0], [1, 0], [0], [1, 0], [2, 1, 1]]


def write_runs(folder: Path, second: str = "b", seconds: float = 4.0) -> list[str]:
    """Runs a and b of the variant base; b's final draft keeps KEPT. The comparison's command line."""
    for name in ("a", second):
        write_tiny(folder / "made" / name)
        (folder / "made" / name / "results").rename(folder / name)
    path = folder / second / "base/evaluation/longcot.jsonl"
    rows = []
    for row, kept in zip(sorted(jsonl.read(path), key=lambda row: row["prompt"]), KEPT, strict=True):
        row |= {"accepted": kept, "rounds": len(kept), "new_tokens": sum(kept) + len(kept), "positions": positions(kept, 2)}
        rows.append(row | {"seconds_speculative": seconds})
    jsonl.write(path, rows)
    runs = [option for name in ("a", second) for option in ("--run", f"{name}={folder / name}")]
    return [*runs, "--variant", "base", "--settings", json.dumps(TINY), "--out", str(folder / "report.html")]


def compared(arguments: list[str]) -> dict[str, Any]:
    """Make the comparison and read its numbers."""
    options = parse_arguments(arguments)
    make_comparison(options)
    content: dict[str, Any] = json.loads(options.out.with_suffix(".json").read_text())
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, of which b has other settings in stage long and another commit, compared."""
    path = tmp_path_factory.mktemp("runs")
    arguments = write_runs(path)
    recipe = path / "b/base/long/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("window: 512", "window: 256"))
    told = read_json(path / "b/base/final_draft/provenance.json")
    told["stages"]["long"]["training_seconds"] = 61.0
    write_json(path / "b/base/final_draft/provenance.json", told | {"git_commit": "<script>1</script>"})
    compared(arguments)
    return path


def test_figures_by_hand(folder: Path) -> None:
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["runs"] == ["a", "b"]
    found = numbers["variants"]["base"]
    rows = {(row["drafter"], row["task"]): row for row in found["acceptance"]}
    assert [name for name, task in rows if task is None] == ["longcot", "base", "long", "untrained", "lookup"]
    for task in ("short", None):
        row = rows["longcot", task]
        assert (row["first"]["mean"], row["second"]["mean"]) == (19 / 8, 19 / 11)
        assert row["difference"] == pytest.approx(19 / 11 - 19 / 8)
        # Prompt by prompt b loses 1 2/3, 1 or 0 tokens a round at most: 6/2 - 5/3, 3 - 3/2, 0, 2 - 3/2, 7/3 - 7/3.
        assert -1.5 <= row["low"] < row["difference"] < row["high"] <= 0.0
        same = rows["long", task]
        assert (same["difference"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    assert {run: found["speed"][run]["longcot"]["speed_up"]["mean"] for run in "ab"} == {"a": 1.5, "b": 0.75}
    assert found["by_position"]["b"]["longcot"]["short"] == [7 / 11, 1 / 11]
    assert [(b["from"], b["mean"]) for b in found["by_context"]["b"]["longcot"]] == [(0, 8 / 5), (256, 8 / 4), (512, 3 / 2)]
    assert found["lossless"]["b"]["tokens_compared"] == 250


def test_recipes_and_provenance_tell_where_they_differ(folder: Path) -> None:
    found = json.loads((folder / "report.json").read_text())["variants"]["base"]
    assert found["recipe_differences"] == [{"stage": "long", "key": "draft.window", "first": 512, "second": 256}]
    told = [{"key": "git_commit", "first": "0f" * 20, "second": "<script>1</script>"}]
    assert found["provenance_differences"] == told
    steps = [(row["run"], row["stage"], row["steps"], row["tokens"]) for row in found["training"]]
    assert steps[:3] == [("a", "base", 200, 200 * 8192), ("a", "long", 60, 60 * 8192), ("a", "longcot", 100, 100 * 8192)]
    assert len(steps) == 6


def test_the_page(folder: Path) -> None:
    """Self-contained, well-formed, without a script, and its tables hold the figures."""
    parser, source, text = read_page(folder)
    assert (parser.faults, parser.open) == ([], [])
    assert all(reference.startswith("#") for reference in parser.references)
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert "https:" not in source
    assert source.count("<svg") == 2 + 3 + 3 + 1 + 1
    ids = [attributes["id"] for _, attributes in parser.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {reference[1:] for reference in parser.references} <= set(ids)
    rows = parser.rows("Drafter", "task")
    assert rows[0][:3] == ["longcot", "short", "5"]
    assert [cell.split()[0] for cell in rows[0][3:6]] == ["2.38", "1.73", "−0.648"]
    assert rows[2][5:] == ["+0.000 +0.000 to +0.000", "the same"]
    assert parser.rows("Stage", "setting") == [["long", "draft.window", "512", "256"]]
    assert parser.rows("Drafter", "a", "b")[-1][:3] == ["longcot", "1.50× 1.50 – 1.50", "0.75× 0.75 – 0.75"]
    assert "b − a: −0.648" in text
    assert "<script>1</script>" in text


@pytest.mark.usefixtures("undrawn")
def test_how_much_sooner_a_run_is_as_low(tmp_path: Path) -> None:
    """Losses on straight lines, which a moving mean leaves straight but at their ends: run a ends at 4.1, the mean of 4.2 to
    4.0; run b falls twice as fast, 10 - 0.2 t, which is below from step 30 on, and once before. Stage base is the same."""
    arguments = write_runs(tmp_path)
    for run, slope in (("a", 0.1), ("b", 0.2)):
        path = tmp_path / run / "base/long/metrics.jsonl"
        rows = [row | {"loss": 10 - slope * row["step"]} for row in jsonl.read(path)]
        if run == "b":
            rows[9]["loss"] = -20.0
        jsonl.write(path, rows)
    numbers = compared(arguments)["variants"]["base"]
    trained = {row["run"]: row for row in numbers["training"] if row["stage"] == "long"}
    assert (trained["a"]["first_loss"], trained["a"]["loss"]) == (pytest.approx(9.7), pytest.approx(4.2))  # of five steps each
    found = {row["stage"]: row for row in numbers["sooner"]}
    assert found["long"] == {
        "stage": "long", "loss": pytest.approx(4.1), "higher": "a", "steps": 60, "lower": "b", "step": 30, "times": 2.0
    }  # fmt: skip
    assert found["base"]["step"] > 0.9 * found["base"]["steps"]
    recipe = tmp_path / "b/base/base/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lag_mode: blocks", "lag_mode: fixed"))
    found = {row["stage"]: row for row in compared(arguments)["variants"]["base"]["sooner"]}
    assert (found["base"]["times"], found["long"]["times"]) == (None, 2.0)
    recipe, before = tmp_path / "b/base/long/recipe.yaml", (tmp_path / "b/base/long/recipe.yaml").read_text()
    for change in (("name: stdlib-long", "name: other"), ("global_batch: 2", "global_batch: 4")):
        assert change[0] in before
        recipe.write_text(before.replace(*change))
        rows = {row["stage"]: row for row in compared(arguments)["variants"]["base"]["sooner"]}
        assert rows["long"]["times"] is None
    recipe.write_text(before)
    compared(arguments)
    text = read_page(tmp_path)[2]
    assert "long: a ends at a smoothed loss of 4.100 after 60 steps; b is as low from step 30 on, 2.00 times as soon." in text


@pytest.mark.usefixtures("undrawn")
def test_runs_of_other_stages_are_compared_by_their_final_drafts(tmp_path: Path) -> None:
    """Run b ended after stage long: what both have is compared, and the final drafts, which come from unlike stages."""
    arguments = write_runs(tmp_path)
    provenance = read_json(tmp_path / "b/base/final_draft/provenance.json")
    provenance["order"].remove("longcot")
    write_json(tmp_path / "b/base/final_draft/provenance.json", provenance)
    found = compared(arguments)["variants"]["base"]
    rows = {row["drafter"]: row for row in found["acceptance"] if row["task"] is None}
    assert list(rows) == ["final draft", "base", "long", "untrained", "lookup"]
    assert (rows["final draft"]["first"]["mean"], rows["final draft"]["second"]["mean"]) == (19 / 8, 15 / 8)
    assert found["recipe_differences"] == [{"stage": "longcot", "key": None, "first": True, "second": False}]
    assert ["longcot", "trained at all", "yes", "no"] in read_page(tmp_path)[0].rows("Stage", "setting")


def test_what_has_chosen_one_runs_stage_is_left_out_of_both(tmp_path: Path) -> None:
    """Run a published its stage long, chosen by records 1 and 2: of longcot's 19 tokens 15 are left."""
    arguments = write_runs(tmp_path)
    path = tmp_path / "a/base/final_draft/provenance.json"
    write_json(path, read_json(path) | {"final": {"stage": "long", "records": {"stdlib": [1, 2], "puzzles": [0]}}})
    found = compared(arguments)["variants"]["base"]
    rows = {row["drafter"]: row for row in found["acceptance"] if row["task"] is None}
    assert (rows["longcot"]["first"]["mean"], rows["longcot"]["second"]["mean"]) == (15 / 6, 15 / 8)
    assert rows["longcot"]["first"]["prompts"] == rows["longcot"]["second"]["prompts"] == 3
    assert next(iter(rows)) == "final draft"
    assert rows["final draft"]["second"] == rows["longcot"]["second"]
    assert rows["final draft"]["first"] == rows["long"]["first"]
    assert "have chosen which stage of a run is published: short: 2 prompts." in read_page(tmp_path)[2]


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "b/base/evaluation/lookup.jsonl"
    for other in path.parent.iterdir():
        jsonl.write(other, [row | changes for row in list(jsonl.read(other))])


@pytest.mark.usefixtures("undrawn")
def test_variants_of_two_names_are_compared_and_the_page_says_so(tmp_path: Path) -> None:
    """The second run's is of another method: its drafts and baselines meet the first's, their losses do not."""
    arguments = write_runs(tmp_path)
    before = compared(arguments)["variants"]["base"]
    (tmp_path / "b/base").rename(tmp_path / "b/ttt")
    make_eagle3(tmp_path / "b/ttt", {"all": 1.0})
    arguments[arguments.index("--variant") + 1] = "base=ttt"
    (name, found), *others = compared(arguments)["variants"].items()
    assert (name, others) == ("base-and-ttt", [])
    assert found["acceptance"] == before["acceptance"]
    assert {row["drafter"] for row in found["acceptance"]} == {"base", "long", "longcot", "untrained", "lookup"}
    assert all(row["times"] is not None for row in before["sooner"])
    assert all(row["times"] is None for row in found["sooner"])
    told = {row["key"]: (row["first"], row["second"]) for row in found["recipe_differences"] if row["stage"] == "long"}
    assert (told["method.name"], told["method.layers"]) == ((None, "eagle3"), (None, "0, 1, 2"))
    parser, _, text = read_page(tmp_path)
    assert (parser.faults, parser.open) == ([], [])
    assert "base of a is compared with ttt of b: the runs share no variant of these names." in text
    assert "Nor can those of two methods." in text


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    arguments = write_runs(tmp_path)
    changed(tmp_path, prompt_hash="other")
    with pytest.raises(
        ValueError, match=r"b.base.evaluation.longcot\.jsonl: task short, prompt 0: prompt_hash: other, but 0 in "
    ):
        compared(arguments)
    changed(tmp_path, context_tokens=7)
    with pytest.raises(ValueError, match=r"longcot\.jsonl: context_tokens: prompts differ from those of .*longcot\.jsonl"):
        compared(arguments)
    assert not (tmp_path / "report.html").exists()


def test_what_are_not_two_runs_is_refused(tmp_path: Path) -> None:
    arguments = write_runs(tmp_path)
    with pytest.raises(ValueError, match="--run: a: give two different runs"):
        compared(arguments[:2] + arguments[4:])
    with pytest.raises(ValueError, match="--run: a, a: give two different runs"):
        compared(arguments[:2] * 2 + arguments[4:])
    with pytest.raises(
        ValueError, match=r"--run c: there is no folder .*nowhere; .* snakemake final_draft --config 'runs=\[c\]'"
    ):
        compared([*arguments[:2], "--run", f"c={tmp_path / 'nowhere'}", *arguments[4:]])
    (tmp_path / "b/base/long/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"b.base.long.metrics\.jsonl: missing; the workflow makes it \(rule train\)"):
        compared(arguments)
