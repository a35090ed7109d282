"""Datasets of questions alone: for prompts that are whole questions, and to train on where the target answers them."""

import json

import pytest

from longspec.workflow.answers import AnswersPlan
from tests.workflow.planning import FILE, Settings

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
    with pytest.raises(ValueError, match=r"^run 'demo', stage 'longcot': recipe\.data\.name: asked has questions alone"):
        asked.plan(runs=["demo"])
    asked.edit("config/run/demo.yaml:longcot", "name: asked", "name: puzzles")
    asked.edit("config/run/demo.yaml", r"^    cot: \{.*\}", WHOLE.replace("true", "false"))
    with pytest.raises(ValueError, match=r"^config/run/demo\.yaml: evaluation\.tasks\.cot: data\.asked has "):
        asked.plan(runs=["demo"])


def test_answered_questions_are_trained_on(asked: Settings) -> None:
    asked.edit("config/run/demo.yaml:longcot", "name: puzzles", "name: asked")
    asked.edit(str(FILE), r"(asked: .*), shards: 1\}", r"\1, shards: 1, regenerate: {new_tokens: 8}}")
    plan = asked.plan(runs=["demo"])
    assert json.loads(plan.raw_settings("asked")) == {"source": "questions", "records": 20, "held_out": 0.1}
    assert AnswersPlan(plan).records("demo", "asked").startswith("data/answers/demo/asked/greedy-8-")


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
    with pytest.raises(ValueError, match=r"data\.\S+held_out: 0\.[12].* both are made from 'stdlib'"):
        asked.plan(runs=["demo"])
