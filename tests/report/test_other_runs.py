"""Reports of runs with something more: a chosen stage, prompt lookup beside the draft, another method or engine, odd texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import read_json, write_json
from longspec.chain_length import ChainAcceptance, read_acceptance
from longspec.report import ending
from tests.refusals import refused
from tests.report.synthetic_run import SETTINGS, STAGES, evaluation_rows, make_eagle3, sample, write_run
from tests.report.test_numbers import TINY, report, write_tiny
from tests.report.test_page import read_page

RECORDS = {"stdlib": [1, 5], "stdlib-long": [2], "puzzles": [3, 4, 9]}  # two prompts of each
OF_TASK = {"short": RECORDS["stdlib"], "long": RECORDS["stdlib-long"], "cot": RECORDS["puzzles"]}
PROMPTS = {task: 2 * len(lines) for task, lines in OF_TASK.items()}
FIGURE = {"mean": 2.5, "low": 2.25, "high": 2.75, "prompts": 12, "tokens": 99, "documents": 6}


def choose(folder: Path, stage: str = "long") -> None:
    """Have a stage of the variant base published."""
    path = folder / "final_draft/provenance.json"
    choice: dict[str, Any] = {"stage": stage, "why": "the best", "prompts": PROMPTS, "records": RECORDS}
    choice["figures"] = {name: FIGURE | {"mean": 2.5 + 0.1 * (name == stage)} for name in STAGES}
    choice["against_last"] = {"difference": 0.1, "low": 0.02, "high": 0.18, "improved": True}
    write_json(path, read_json(path) | {"final": choice})


def test_a_finished_run_says_how_each_variants_draft_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lossless = {"tokens_compared": 9, "unexplained": 0}
    write_json(Path("results/mine/report.json"), {"overall": {"a": {}, "b": {}}, "lossless": {"a": lossless, "b": lossless}})
    for variant in ("a", "b"):
        write_json(Path(f"results/mine/{variant}/final_draft/config.json"), {"draft": "eagle3"})
    served = [line.partition("serve ")[2] for line in ending.lines("mine", "runs/mine.yaml") if line.startswith("Serve it")]
    assert served == ["runs/mine.yaml --variant a", "runs/mine.yaml --variant b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chosen run, reported."""
    path = tmp_path_factory.mktemp("chosen")
    arguments = write_run(path, {"base": 0.0})
    choose(path / "results/base")
    report(arguments)
    return path


@pytest.mark.usefixtures("undrawn")
def test_every_figure_is_of_what_is_left(folder: Path, tmp_path: Path) -> None:
    """As of a run that has never measured these records, but for its final draft."""
    arguments = write_run(tmp_path, {"base": 0.0})
    for path in (tmp_path / "results/base/evaluation").iterdir():
        jsonl.write(path, [row for row in list(jsonl.read(path)) if row["record"] not in OF_TASK[row["task"]]])
    wanted, found = report(arguments), read_json(folder / "report.json")
    assert found["left_out"]["base"] == PROMPTS
    assert wanted["left_out"]["base"] == {}
    for part in ("variants", "overall", "improvements", "by_context", "lossless", "speed", "measured"):
        assert found[part] == wanted[part], part
    assert {row["stage"] for row in found["against_baselines"]["base"]} == {"long"}
    assert {row["stage"] for row in wanted["against_baselines"]["base"]} == {"longcot"}


def test_the_gates_judge_the_published_draft_and_every_stage(folder: Path) -> None:
    rows = read_json(folder / "report.json")["gates"]["base"]
    assert {row["what"].split(",")[0] for row in rows if row["gate"] == "context"} == {"long"}
    assert "longcot after long" in {row["what"].split(",")[0] for row in rows if row["gate"] == "forgetting"}


def test_chains_are_chosen_by_the_published_stage(folder: Path) -> None:
    rows = list(jsonl.read(folder / "results/base/evaluation/long.jsonl"))
    kept = [count for row in rows if row["record"] not in OF_TASK[row["task"]] for count in row["accepted"]]
    stored, *_ = read_acceptance(folder / "results/base/final_draft")  # prompt lookup's stand behind it
    assert vars(stored)["positions"][0] == (sum(count > 0 for count in kept), len(kept))


def test_the_page_tells_which_stage_why_and_what_is_left_out(folder: Path) -> None:
    parser, _, text = read_page(folder)
    assert "long: the best. Against the last stage, longcot, on the same prompts: +0.100 (+0.020 to +0.180)." in text
    rows = parser.rows("Stage", "acceptance")
    assert rows[1] == ["long", "2.60 2.25 – 2.75", "12", "6", "yes"]
    assert [row[-1] for row in rows] == ["no", "yes", "no"]
    assert "have chosen which stage is published: short: 4 prompts; long: 2 prompts; cot: 6 prompts." in text


WITH_LOOKUP = "with-lookup"


def measured_too(folder: Path, arguments: list[str], more: int) -> list[str]:
    """The command line after such a measurement, of so many more kept tokens in each round than the last stage's."""
    folder /= "results/base/evaluation"
    rows: list[dict[str, Any]] = []
    for row in evaluation_rows("longcot", SETTINGS, 1):
        accepted = [kept + more for kept in row["accepted"]]
        new = sum(accepted) + len(accepted)
        if "sample" in row:
            row["sample"] = sample(accepted)
        row |= {"drafter": WITH_LOOKUP, "accepted": accepted, "new_tokens": new, "acceptance_length": new / len(accepted)}
        rows.append(row)
    jsonl.write(folder / f"{WITH_LOOKUP}.jsonl", rows)
    place = arguments.index("--settings") + 1
    return [*arguments[:place], json.dumps(SETTINGS | {"with_lookup": 8}), *arguments[place + 1 :]]


@pytest.mark.usefixtures("undrawn")
def test_its_gain_over_the_draft_alone_is_told(tmp_path: Path) -> None:
    arguments = write_run(tmp_path, {"base": 0.0})
    alone = report(arguments)
    assert alone["with_lookup"] == {"base": None}
    assert "prompt lookup beside it" not in read_page(tmp_path)[2]
    found = report(measured_too(tmp_path, arguments, 1))
    mean = {name: each["mean"] for name, each in found["overall"]["base"].items()}
    assert mean[WITH_LOOKUP] == pytest.approx(mean["longcot"] + 1)
    assert found["with_lookup"]["base"]["difference"] == pytest.approx(1)
    assert found["against_baselines"] == alone["against_baselines"], "it is no baseline"
    speed = found["speed"]["base"][WITH_LOOKUP]["speed_up"]["mean"]
    _, page, text = read_page(tmp_path)
    assert page.index("after a prompt of") < page.index('class="sample"'), "each text stands below its task's heading"
    assert f"tokens of prompt lookup beside it the final draft brings {mean[WITH_LOOKUP]:.2f} tokens a round: +1.00" in text
    assert f", {speed:.2f} times plain decoding." in text
    (chain, beside, lookup) = read_acceptance(tmp_path / "results/base/final_draft")
    assert isinstance(chain, ChainAcceptance)
    assert (beside.levels, beside.copied) == ((1, 1, 1, 1), 8)
    assert (beside.expected_tokens, lookup.expected_tokens) == pytest.approx((mean[WITH_LOOKUP], mean["lookup"]))


HIGH = {"base": 0.99, "long": 0.98, "longcot": 0.97}


def write_eagle3(folder: Path, coverage: dict[str, float]) -> list[str]:
    """The tiny run, trained by EAGLE-3; the report's command line."""
    arguments = write_tiny(folder)
    path, long = make_eagle3(folder / "results/base", coverage), folder / "results/base/long/recipe.yaml"
    long.write_text(long.read_text().replace("draft:\n", "draft:\n  loss: lk\n"))
    return [*arguments, "--vocabulary", str(path)]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("all_tokens", [0.984, 0.949])
def test_its_own_settings_and_counts(tmp_path: Path, all_tokens: float, capsys: pytest.CaptureFixture[str]) -> None:
    coverage = HIGH | {"all": all_tokens}
    arguments = write_eagle3(tmp_path, coverage)
    stray = tmp_path / "draft_vocabulary_4.json"
    with refused(f"--vocabulary: {stray}", "--variant"):
        report([*arguments[:-1], str(stray)])
    numbers = report(arguments)
    assert numbers["vocabulary"] == {"base": {"size": 4, "of": 1024, "coverage": coverage}}
    parser, _, text = read_page(tmp_path)
    rows = {row[0]: row[1:] for row in parser.rows("Setting", "base", "long", "longcot")}
    assert rows["chain"] == [f"{steps} steps, weighted 0.8^i" for steps in (2, 3, 4)]
    assert rows["loss"] == ["soft", "lk", "soft"]
    assert "lag" not in rows
    assert rows["no loss: the target prefers a token outside the draft vocabulary"] == [
        "1,400",
        "420",
        "700",
    ]  # of 200, 60, 100
    told = f"holds {100 * all_tokens:.1f} % of the trained tokens (base 99.0 %, long 98.0 %, longcot 97.0 %)."
    assert f"draft vocabulary, 4 of the target's 1,024 tokens, {told}" in text
    assert ("Low coverage :" in text) == ("WARNING base: " in capsys.readouterr().out) == (all_tokens < 0.95)


TOKENS = [
    {"text": "x", "depth": 0},
    {"text": "<script>", "depth": 1},
    {"text": "alert(1)", "depth": 2},
    {"text": '</script>"\n', "depth": 0},
    {"text": '&amp;" onclick="x', "depth": 1},
    {"text": "\x00\t", "depth": 0},
]


@pytest.mark.usefixtures("undrawn")
def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    arguments, path = write_tiny(tmp_path), tmp_path / "results/base/evaluation/longcot.jsonl"
    shown = {"sample": {"before": "<img src=x onerror=alert(2)>", "tokens": TOKENS}}
    jsonl.write(path, [row | (shown if row["prompt"] == 0 else {}) for row in list(jsonl.read(path))])
    report(arguments)
    parser, source, text = read_page(tmp_path)
    assert not parser.tags & {"script", "img"}
    assert "onclick" not in {name for _, attributes in parser.elements for name in attributes}
    assert "<img src=x onerror=alert(2)>" in text
    assert "longcot: 3 of 6 tokens were drafted" in text
    spans = [attributes["class"] for tag, attributes in parser.elements if tag == "span" and "title" in attributes]
    assert spans == ["target", "kept-1", "kept-2", "target", "kept-1", "target missed"]
    assert "&lt;/script&gt;&#34;↵\n" in source
    assert '<script> alert(1) </script>"↵ &amp;" onclick="x ␀⇥' in text


@pytest.mark.usefixtures("undrawn")
def test_lines_of_vllm_show_what_it_does_not_tell_as_unknown(tmp_path: Path) -> None:
    arguments = write_tiny(tmp_path, engine="vllm", seconds_draft=None, seconds_target=None)
    settings = json.dumps(TINY | {"engine": "vllm"})
    arguments[arguments.index("--settings") + 1] = settings
    numbers = report(arguments)
    speed = numbers["speed"]["base"]["longcot"]
    assert speed["speed_up"]["mean"] == 1.5
    names = ("draft_share", "target_share", "other_share", "measured_cost_ratio", "verification_cost_ratio")
    assert [speed[name] for name in names] == [None] * 5
    assert {row["draft_share"] for row in numbers["measured"]["base"]["longcot"]} == {None}
    _, _, text = read_page(tmp_path)
    assert "Everything was decoded by vLLM and counted by its own counters; prompt lookup is vLLM's." in text
    assert "nan" not in text.lower().split()
