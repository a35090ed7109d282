"""What a run measures apart: planned when it is asked for, checked as the rest is, and without effect on the rest."""

import json

import pytest

from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of
from tests.refusals import refused
from tests.workflow.planning import Copied, Settings

RUN = "config/run/demo.yaml"
BENCH = "bench: {prompts: 2, repeats: 3, tasks: {far: {data: stdlib-long, context: [4096, 8000], new_tokens: 48}}}"


def add_bench(copy: Copied, bench: str = BENCH) -> None:
    copy.edit(RUN, r"^evaluation:", f"evaluation:\n  {bench}")


def test_its_keys_stand_in_place_of_the_others_and_the_rest_stays_what_it_was(settings: Settings) -> None:
    before = settings.plan(runs=["demo", "demo-eagle3"])
    add_bench(settings)
    plan = settings.plan(runs=["demo", "demo-eagle3"])
    bench = bench_of(plan)
    assert plan.evaluation_settings("demo") == before.evaluation_settings("demo")
    assert plan.evaluations("demo") == before.evaluations("demo")
    whole = json.loads(plan.evaluation_settings("demo"))
    tasks = {"far": {"data": "stdlib-long", "context": [4096, 8000], "new_tokens": 48}}
    assert json.loads(bench.evaluation_settings("demo")) == whole | {"prompts": 2, "repeats": 3, "tasks": tasks}
    assert AnswersPlan(bench).evaluation_records("demo") == ["data/raw/stdlib-long/manifest.json"]
    assert bench.evaluations("demo") == [path.replace("/evaluation/", "/bench/") for path in plan.evaluations("demo")]
    assert bench.pages() == ["results/demo/bench.html"]


@pytest.mark.parametrize(
    ("bench", "told"),
    [
        ("bench: {prompts: 2}", ("bench.tasks: missing", "a mapping")),
        (BENCH.replace("prompts", "prompt"), ("bench.prompt: unknown key", "'prompts'?")),
        (BENCH.replace("bench: {", "bench: {bench: {tasks: {}}, "), ("bench.bench: unknown key",)),
        (BENCH.replace("8000", "32768"), ("tasks.far.context: prompts of 32768", "32768 positions")),
    ],
)
def test_a_mistake_dies_at_the_plan_with_file_and_key(settings: Settings, bench: str, told: tuple[str, ...]) -> None:
    add_bench(settings, bench)
    with refused(f"{RUN}: evaluation.{told[0]}", *told[1:]):
        bench_of(settings.plan(runs=["demo"]))


def test_a_run_that_measures_nothing_apart_is_refused_by_name(settings: Settings) -> None:
    bench = bench_of(settings.plan(runs=["demo"]))
    with refused("runs: demo", "evaluation.bench", RUN):
        bench.pages()
