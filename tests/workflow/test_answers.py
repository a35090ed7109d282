"""Answers by the target in the graph: whose records they stand in for, what makes them again, what is refused."""

import json
import re
from typing import Any

import pytest

from longspec.answers.settings import folder_name, parse
from longspec.workflow.answers import AnswersPlan
from tests.refusals import refused
from tests.workflow.planning import FILE, Copied, Settings, Workflow, build_all

WORKFLOW = str(FILE)
KEY = f"{WORKFLOW}: data.own.regenerate"
OWN = "  own: {source: puzzles, records: 4000, seed: 0, shards: 2, regenerate: {new_tokens: 256}}\n"
LONGCOT = "config/run/demo.yaml:longcot"
FOLDER = r"data/answers/demo/own/greedy-256-[0-9a-f]{8}"


def regenerate(copied: Copied, entry: str = OWN) -> None:
    """Have the last stage and one task use answers by the target."""
    copied.edit(WORKFLOW, r"^data:\n", f"data:\n{entry}")
    copied.edit(LONGCOT, "name: puzzles", "name: own")
    copied.edit("config/run/demo.yaml", "cot: {data: puzzles", "cot: {data: own")


def planned(settings: Settings, **more: object) -> AnswersPlan:
    """The answers of the plan; more: keys of regenerate."""
    text = json.dumps({"new_tokens": 256, **more})
    settings.edit(WORKFLOW, r"regenerate: \{.*?\}+$", f"regenerate: {text}}}")
    return AnswersPlan(settings.plan())


def test_only_what_decides_answers_names_their_folder(settings: Settings) -> None:
    regenerate(settings)
    first = AnswersPlan(settings.plan()).folder("demo", "own")
    assert re.fullmatch(FOLDER, first)

    def named(**more: object) -> str:
        return f"data/answers/demo/own/{folder_name(parse('own', {'new_tokens': 256, **more}))}"

    same: list[dict[str, object]] = [{"batch": 3}, {"max_failed": 0.5, "temperature": 0}, {"cut": "drop", "top_p": 1.0}]
    assert {named(**more) for more in same} == {first}
    server = {"engine": "endpoint", "endpoint": "http://one:8000/v1"}
    endpoint = named(**server)
    moved = named(**server | {"endpoint": "https://two/v1", "requests": 7, "timeout": 5})
    assert moved == endpoint != first
    others: list[dict[str, object]] = [{"temperature": 0.7}, {"seed": 1}, {"cut": "keep"}, {"precision": "fp32"}]
    others += [{"top_p": 0.9}, {"new_tokens": 512}, {"longest_prompt": 64}]
    assert len({named(**more) for more in others} | {first}) == len(others) + 1


def test_a_dataset_without_it_is_tokenized_and_measured_as_ever(settings: Settings) -> None:
    regenerate(settings)
    plan = settings.plan()
    answers = AnswersPlan(plan)
    assert answers.records("demo", "puzzles") == "data/raw/puzzles/manifest.json"
    own = answers.records("demo", "own")
    short, long = (f"data/raw/{name}/manifest.json" for name in ("stdlib", "stdlib-long"))
    assert answers.evaluation_options("demo") == [f"own={own}", f"stdlib={short}", f"stdlib-long={long}"]
    assert answers.evaluation_records("demo") == [own, short, long]
    assert answers.compared_options("demo", "demo") == ["--answers", own]
    assert AnswersPlan(settings.plan(run="demo-eagle3")).compared_options("demo-eagle3", "demo-eagle3") == []
    assert json.loads(plan.raw_settings("own")) == {"source": "puzzles", "records": 4000, "seed": 0}


SERVED = {"engine": "endpoint"}
WITH_KEY = "http://user:secret@host:8000/v1"
# By what is wrong: keys of regenerate, the key at fault below it, and what is named.
REFUSED: dict[str, tuple[Any, ...]] = {
    "no place": (SERVED, ": engine: endpoint", "endpoint (http://host:8000/v1", "server (", "neither"),
    "the other engine's key": ({"requests": 4}, ".requests", "engine: endpoint", "data.own.regenerate.engine"),
    "a command without its places": (SERVED | {"server": "vllm serve {model}"}, ".server: lacks {port}", "docs/answers.md"),
    "a key in the command": (
        SERVED | {"server": "vllm {model} {port} --api-key=secret"},
        ".server: --api-key",
        "VLLM_API_KEY",
        "OPENAI_API_KEY",
    ),
    "no such program": (SERVED | {"server": "no/vllm {model} {port}"}, ".server: no/vllm", "make .venv-serve/vllm/.stamp"),
    "a misspelt key": ({"temprature": 1}, ".temprature: unknown key", "'temperature'?"),
    "no number": ({"new_tokens": "many"}, ".new_tokens", "1 to 16777216"),
    "no address": (SERVED | {"endpoint": "host:8000"}, ".endpoint", "http://host:8000/v1", "is 'host:8000'"),
    "a key in the address": (SERVED | {"endpoint": WITH_KEY}, ".endpoint", "the environment's OPENAI_API_KEY"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_dies_at_the_plan_with_its_key(settings: Settings, name: str) -> None:
    given, place, *facts = REFUSED[name]
    regenerate(settings)
    with refused(f"{KEY}{place}", *facts):
        planned(settings, **given)


def test_running_text_and_the_targets_own_training_are_refused(settings: Settings) -> None:
    regenerate(settings)
    settings.edit("config/model/demo.yaml", "dataset: puzzles", "dataset: own")
    settings.refuses(f"{KEY}: config/model/demo.yaml", "build.mixture", "own-answers")
    settings.edit("config/model/demo.yaml", "dataset: own", "dataset: puzzles")
    settings.edit(WORKFLOW, "own: {source: puzzles, records: 4000, seed: 0", "own: {source: stdlib, held_out: 0.1")
    settings.refuses(KEY, "source stdlib")


@pytest.mark.slow
def test_answers_are_tokenized_in_the_place_of_records_and_made_again_for_what_decides_them_alone(workflow: Workflow) -> None:
    regenerate(workflow)
    plan = workflow.plan()
    jobs = {output: fields for output, fields in plan.items() if "/answers/" in output}
    (merged,) = [output for output, fields in jobs.items() if fields["rule"] == "merge_answers"]
    shards = sorted(output for output, fields in jobs.items() if fields["rule"] == "answer")
    assert shards == [merged.replace("manifest.json", f"{part}-of-2/shard.json") for part in (0, 1)]
    command = jobs[shards[1]]["command"]
    assert "launch --plain --ranks 1 --cpus 2 --gres= -- longspec.answers shard " in command
    assert " --shard 1 --num-shards 2 " in command
    assert {"models/demo/target_manifest.json", "data/raw/own/manifest.json"} <= set(jobs[shards[0]]["input"].split(", "))
    for shard in ("000", "001"):
        assert merged in plan[f"data/tokens/demo/own/{shard}.json"]["input"].split(", ")
        assert "data/raw/puzzles/manifest.json" in plan[f"data/tokens/demo/puzzles/{shard}.json"]["input"].split(", ")
    build_all(workflow)
    workflow.edit(WORKFLOW, "new_tokens: 256", "new_tokens: 256, batch: 4, max_failed: 0.2")
    assert workflow.plan() == {}
    workflow.edit(WORKFLOW, "new_tokens: 256", "new_tokens: 256, temperature: 0.5")
    again = workflow.plan()
    rules = [fields["rule"] for fields in again.values()]
    assert (rules.count("answer"), rules.count("merge_answers"), rules.count("raw")) == (2, 1, 0)
    tokenized = {output for output, fields in again.items() if fields["rule"] == "tokenize"}
    assert tokenized == {"data/tokens/demo/own/000.json", "data/tokens/demo/own/001.json"}
    trained = {output for output, fields in again.items() if fields["rule"] == "train"}
    assert trained == {"results/demo/sinkpi-slicing/longcot/checkpoint.json"}
    served = 'regenerate: {new_tokens: 256, engine: endpoint, endpoint: "http://host:8000/v1"}}'
    workflow.edit(WORKFLOW, r"regenerate: \{.*$", served)
    asked = [output for output, fields in workflow.plan().items() if fields["rule"] == "ask"]
    assert len(asked) == 2, "their jobs ask for no GPU"


def test_answers_longer_than_the_targets_positions_are_refused(settings: Settings) -> None:
    """The demo's target has 32,768; as the message says, fewer tokens are planned."""
    regenerate(settings)
    with refused(f"{KEY}.new_tokens: 32768", "32768 positions; lower"):
        planned(settings, new_tokens=32768)
    with refused(f"{KEY}.longest_prompt: 100 and 32767", "32768 positions; 1 is"):
        planned(settings, new_tokens=32767, longest_prompt=100)
    planned(settings, new_tokens=32767)


# Datasets of questions alone: for prompts that are whole questions, and to train on where the target answers them.

QUESTIONS = "  asked: {source: questions, records: 20, held_out: 0.1, shards: 1}\n  puzzles:"
WHOLE = "    cot: {data: asked, context: [16, 512], whole_questions: true}"


@pytest.fixture
def asked(settings: Settings) -> Settings:
    """Settings with a dataset `asked` of questions, which nothing uses yet."""
    settings.edit(str(FILE), r"^  puzzles:", QUESTIONS)
    return settings


def test_prompts_that_are_whole_questions_need_no_answers(asked: Settings) -> None:
    asked.edit("config/run/demo.yaml", r"^    cot: \{.*\}", WHOLE)
    plan = asked.plan(runs=["demo"])
    assert "data/raw/asked/manifest.json" in AnswersPlan(plan).evaluation_records("demo")
    assert json.loads(plan.evaluation_settings("demo"))["tasks"]["cot"]["whole_questions"] is True
    assert json.loads(plan.raw_settings("asked")) == {"source": "questions", "records": 20, "held_out": 0.1}


def test_training_on_them_and_other_prompts_of_them_are_refused(asked: Settings) -> None:
    asked.edit("config/run/demo.yaml:longcot", "name: puzzles", "name: asked")
    advice = "data.asked.regenerate: {new_tokens: 256, temperature: 0, engine: transformers}"
    asked.refuses("run 'demo', stage 'longcot': recipe.data.name: asked", advice, runs=["demo"])
    asked.edit("config/run/demo.yaml:longcot", "name: asked", "name: puzzles")
    asked.edit("config/run/demo.yaml", r"^    cot: \{.*\}", WHOLE.replace("true", "false"))
    asked.refuses("config/run/demo.yaml: evaluation.tasks.cot: data.asked", "whole_questions: true", runs=["demo"])


def test_whole_questions_of_data_that_no_stage_trains_on_are_answered_by_nobody(asked: Settings) -> None:
    asked.edit(str(FILE), r"(asked: .*), shards: 1\}", r"\1, shards: 1, regenerate: {new_tokens: 8}}")
    asked.edit("config/run/demo.yaml", r"^    cot: \{.*\}", WHOLE)
    answers = AnswersPlan(asked.plan(runs=["demo"]))
    assert "data/raw/asked/manifest.json" in answers.evaluation_records("demo")
    asked.edit("config/run/demo.yaml", r"^(    cot: \{.*\})", rf"\1\n{WHOLE.replace('cot', 'parts').replace('true', 'false')}")
    answers = AnswersPlan(asked.plan(runs=["demo"]))
    assert answers.records("demo", "asked") in answers.evaluation_records("demo")


def test_questions_are_held_out_by_the_modules_that_the_librarys_text_is_held_out_by(asked: Settings) -> None:
    asked.edit("config/run/demo.yaml", r"^    cot: \{.*\}", WHOLE)
    asked.edit(str(FILE), r"records: 20, held_out: 0\.1", "records: 20, held_out: 0.2")
    asked.refuses(f"{FILE}: data.asked.held_out: 0.2", "data.stdlib.held_out: 0.1", "'stdlib'", runs=["demo"])
