"""What the plan answers the rules: which files a job reads, what it is told, what is measured, and which engines serve."""

import json
from pathlib import Path

import pytest

from longspec.config import compose_stage
from longspec.measure.tasks import parse
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of
from longspec.workflow.plan import Plan
from longspec.workflow.serves import ServesPlan
from tests.refusals import refused
from tests.workflow.planning import FILE, Copied, Settings, install

P = "results/demo/sinkpi-slicing"
VARIANT = ("demo", "sinkpi-slicing")


def test_the_best_stage_is_published_or_the_last_as_the_run_says(settings: Settings) -> None:
    plan = settings.plan()
    assert plan.choice(*VARIANT) == [f"{P}/final_stage.json"]
    assert plan.choosing_evaluations(*VARIANT) == [f"{P}/evaluation/{stage}.jsonl" for stage in plan.stages["demo"]]
    drafts = plan.candidates(*VARIANT)
    assert [path for path in drafts if path.endswith("model.safetensors")] == [
        f"{P}/{stage}/draft/model.safetensors" for stage in plan.stages["demo"]
    ]
    assert plan.published_option(plan.choice(*VARIANT), drafts) == ["--choice", f"{P}/final_stage.json"]
    for run, variant, stage in (("published", "sinkpi-slicing", "longcot"), ("smollm2-eagle3", "ttt", "answers")):
        last, folder = settings.plan(runs=[run]), f"results/{run}/{variant}/{stage}/draft"
        assert last.choice(run, variant) == []  # one stage alone leaves nothing to choose
        assert [path for path in last.candidates(run, variant) if not path.startswith(folder)] == []
        assert last.published_option([], last.candidates(run, variant)) == ["--draft", Path(folder)]


def test_a_choice_needs_a_task_of_held_out_records(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml", r"^    (short|cot): .*\n", "")
    settings.edit("config/run/demo.yaml", r"\blong: \{data.*\}", "math: {preset: math}")
    settings.refuses("config/run/demo.yaml: final: best", "to last,", "evaluation.tasks in config/run/demo.yaml")
    settings.edit("config/run/demo.yaml", "^stages:", "final: last\nstages:")
    assert settings.plan().choice(*VARIANT) == []


def test_the_published_draft_is_measured_with_prompt_lookup_where_that_is_asked_for(settings: Settings) -> None:
    """What the other drafters are measured by stays as it is, so that nothing of theirs is measured again."""
    before = settings.plan()
    settings.edit(str(FILE), r"^  engine: longspec", "  with_lookup: 8\n  engine: longspec")
    plan = settings.plan()
    assert plan.evaluations("demo") == [*before.evaluations("demo"), f"{P}/evaluation/with-lookup.jsonl"]
    told = json.loads(before.evaluation_settings("demo"))
    assert json.loads(plan.evaluation_settings("demo", "base")) == json.loads(plan.evaluation_settings("demo")) == told
    assert json.loads(plan.evaluation_settings("demo", "with-lookup")) == told | {"with_lookup": 8}
    weights = plan.drafter_weights(*VARIANT, "with-lookup")
    assert weights == [f"{P}/final_draft/model.safetensors", f"{P}/final_draft/config.json"]
    assert plan.drafter_options("with-lookup", weights) == ["--drafter", "with-lookup", "--draft", Path(f"{P}/final_draft")]
    settings.edit(str(FILE), r"^  with_lookup: 8", "  with_lookup: 0")
    settings.refuses("config/workflow.yaml: evaluation.with_lookup", "1 to 64, or null, is 0")


def test_a_benchmarks_file_is_read_by_the_evaluation_alone(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml", r"\bcot: \{.*\}", "cot: {preset: gsm8k, source: 'in/*.jsonl'}")
    (settings.folder / "in").mkdir()
    (settings.folder / "in/gsm8k.jsonl").touch()
    plan = settings.plan()
    assert plan.task_files("demo") == [Path("in/gsm8k.jsonl")]
    assert "put your final answer within" in plan.evaluation_settings("demo")
    assert plan.evaluation_data("demo") == ["stdlib", "stdlib-long"]
    assert "data/raw/puzzles/manifest.json" in plan.report_records("demo")  # still trained on
    assert not [path for name in plan.datasets_in_use() for path in plan.raw_files(name) if "in/" in str(path)]


def test_the_tokenizer_and_the_target_read_the_mixture_whatever_the_stages_read(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml:long", "name: stdlib-long", "name: own")
    settings.edit(str(FILE), "^  stdlib: ", "  own: {source: stdlib, held_out: 0.1, shards: 2}\n  stdlib: ")
    plan = settings.plan()
    names = ("puzzles", "stdlib", "stdlib-long")
    assert plan.tokenizer_data("demo") == [f"data/raw/{name}/manifest.json" for name in names]
    mixture = compose_stage(*VARIANT, "base").build.mixture
    wanted = [f"data/packed/demo/{each.dataset}-base-{each.sequence_length}-split/manifest.json" for each in mixture]
    assert plan.mixture_rows("demo") == wanted
    assert "own" in plan.datasets_trained_on()


def test_what_makes_the_records_again(settings: Settings) -> None:
    """Snakemake records the settings of a dataset's records; what is not among them makes nothing again."""

    def told(plan: Plan) -> dict[str, str]:
        return {name: plan.raw_settings(name) for name in plan.data}

    before = told(settings.plan())
    settings.edit(str(FILE), r"^(  puzzles: .*\bshards: )\d+", r"\g<1>7")
    more_shards = settings.plan()
    assert told(more_shards) == before
    assert more_shards.shards("puzzles") == len(more_shards.token_shards("demo", "puzzles")) == 7
    settings.edit(str(FILE), r"\brecords: \d+", "records: 7777")
    assert [name for name, text in told(settings.plan()).items() if text != before[name]] == ["puzzles"]


def test_two_runs_are_compared_and_no_other_number(settings: Settings, root: Path) -> None:
    settings.add_benchmarks(root)
    plan = settings.plan(runs=["ablation-lag-1", "ablation-reference"])
    assert plan.compared_page() == "results/compare/ablation-lag-1_ablation-reference.html"
    with refused("runs: demo", "snakemake compare --config 'runs=[a,b]'"):
        settings.plan().compared_page()
    with refused("runs: llama3.1-8b-eagle3, qwen3-8b-eagle3", "for llama-3.1-8b and for qwen3-8b;"):
        settings.plan(runs=["llama3.1-8b-eagle3", "qwen3-8b-eagle3"]).compared_page()
    other = "config/run/ablation-lag-1.yaml"
    settings.edit(other, r"^recipe:", "evaluation: {prompts: 7, temperatures: [0.0]}\nrecipe:")
    differ = "(ablation-lag-1 -> ablation-reference): evaluation.prompts: 7 -> 40; they"
    with refused("runs: ablation-lag-1, ablation-reference", differ, f"{other} and config/workflow.yaml"):
        settings.plan(runs=plan.runs).compared_page()
    settings.edit(other, "prompts: 7", "prompts: 40")
    assert settings.plan(runs=plan.runs).compared_page() == plan.compared_page()


RUN = "config/run/demo.yaml"
BENCH = "bench: {prompts: 2, repeats: 3, tasks: {far: {data: stdlib-long, context: [4096, 8000], new_tokens: 48}}}"


def add_bench(copy: Copied, bench: str = BENCH) -> None:
    copy.edit(RUN, r"^evaluation:", f"evaluation:\n  {bench}")


def test_a_benchs_keys_stand_in_place_of_the_others_and_the_rest_stays_what_it_was(settings: Settings) -> None:
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
def test_a_mistake_in_it_dies_at_the_plan_with_file_and_key(settings: Settings, bench: str, told: tuple[str, ...]) -> None:
    add_bench(settings, bench)
    with refused(f"{RUN}: evaluation.{told[0]}", *told[1:]):
        bench_of(settings.plan(runs=["demo"]))


def test_a_run_that_measures_nothing_apart_is_refused_by_name(settings: Settings) -> None:
    bench = bench_of(settings.plan(runs=["demo"]))
    with refused("runs: demo", "evaluation.bench", RUN):
        bench.pages()


EAGLE3 = "config/run/demo-eagle3.yaml"
MEASURED = ("longspec", "vllm", "llama.cpp")


def test_each_engine_is_measured_on_what_it_can_represent_by_greedy_chains(settings: Settings) -> None:
    """The demo's EAGLE-3 draft has a window of 512 tokens, which llama.cpp and OpenVINO do not have."""
    install("vllm", "llama.cpp")
    settings.edit("config/workflow.yaml", r"^  temperatures: \[0\]", "  temperatures: [0.7, 0]")
    settings.edit("config/workflow.yaml", r"^  shapes: \[4\]", "  shapes: [[4, 4], 5]")
    plan = settings.plan(runs=["demo-eagle3"])
    serves = ServesPlan(plan)
    standings = serves.standings("demo-eagle3", "ttt")
    folder = "results/demo-eagle3/ttt/serves"
    assert serves.evaluations("demo-eagle3") == [f"{folder}/{name}.jsonl" for name in MEASURED]
    sections = {name: json.loads(serves.evaluation_settings("demo-eagle3", "ttt", name)) for name in MEASURED}
    for name, section in sections.items():
        found = parse(section)
        assert [(each.temperature, each.shape) for each in found.settings] == [(0, 5)]
        assert (found.engine, found.repeats, found.prompts, found.with_lookup) == (name, 1, 40, None)
    assert sections["vllm"]["tasks"].keys() == sections["longspec"]["tasks"].keys() == {"short", "long", "cot"}
    assert list(sections["llama.cpp"]["tasks"]) == ["short"]  # 448 + 24 + 5 tokens
    assert "cot" in standings["llama.cpp"].left_out
    assert "here 1053 tokens" in standings["llama.cpp"].left_out["cot"]
    why = "cannot represent this draft: recipe.method.layers: [0, 1, 2]: OpenVINO reads outputs of layers"
    assert standings["openvino"].section is None
    assert standings["openvino"].why.startswith(why)
    pages = ["results/demo-eagle3/serves.html", "results/demo-eagle3/serves_gates.json"]
    assert serves.pages() == pages + serves.evaluations("demo-eagle3")


def test_an_engine_that_cannot_stands_there_with_the_reason(settings: Settings) -> None:
    plan = settings.plan(runs=["demo"])
    missing = ServesPlan(plan).standings("demo", "sinkpi-slicing")["vllm"]
    why = "is not installed: `make .venv-serve/vllm/.stamp`, then `snakemake serves --config run=demo`"
    assert (missing.section, missing.why) == (None, why)
    install("vllm", "llama.cpp")
    standings = ServesPlan(plan).standings("demo", "sinkpi-slicing")
    assert standings["llama.cpp"].why == "loads no glide drafts; use vLLM: `longspec serve demo --engine vllm`"
    assert standings["vllm"].section is not None
    settings.edit(EAGLE3, "sliding_window: 512", "sliding_window: 64")
    standings = ServesPlan(settings.plan(runs=["demo-eagle3"])).standings("demo-eagle3", "ttt")
    assert standings["llama.cpp"].section is None
    assert standings["llama.cpp"].why.startswith(
        "cannot represent this draft: recipe.method.sliding_window: 64: drafts see all of a text in llama.cpp"
    )


def test_the_interpreter_that_the_evaluation_names_is_its_engines_alone(settings: Settings, tmp_path: Path) -> None:
    install("vllm", "llama.cpp")
    (python := tmp_path / "python").touch(0o755)
    settings.edit(EAGLE3, "^evaluation:", f"evaluation:\n  engine: vllm\n  serve_python: {python}")
    serves = ServesPlan(settings.plan(runs=["demo-eagle3"]))
    sections = {name: json.loads(serves.evaluation_settings("demo-eagle3", "ttt", name)) for name in MEASURED}
    assert [section.get("serve_python") for section in sections.values()] == [None, str(python), None]
    assert [section.get("engine") for section in sections.values()] == [None, "vllm", "llama.cpp"]
