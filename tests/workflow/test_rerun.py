"""Which change makes which job run again."""

import re
import shutil

import pytest

from longspec.cli.serve import MEASURES
from tests.workflow.planning import Workflow, install
from tests.workflow.test_plan import add_bench

pytestmark = pytest.mark.slow  # half a minute and more as a whole

P = "results/demo/sinkpi-slicing"
AFTER_ALL_STAGES = {f"{P}/final_stage.json", f"{P}/final_draft/model.safetensors"}
AFTER_ALL_STAGES |= {"results/demo/report.html", "results/demo/gates.json"}
AFTER = ("choose_final_stage", "assemble_final_draft", "report", "check_gates")


def stage_outputs(stage: str) -> set[str]:
    """First outputs of the jobs that make and measure one stage, its frozen recipe apart."""
    return {f"{P}/{stage}/checkpoint.json", f"{P}/{stage}/draft/model.safetensors", f"{P}/evaluation/{stage}.jsonl"}


def test_what_decides_no_weights_runs_nothing_again(built: Workflow) -> None:
    """Comments, new files, a command's wording, the runtime section and another machine, all at once."""
    built.edit("config/stage/long.yaml", "^recipe:", "# a remark\nrecipe:")
    built.edit("config/workflow.yaml", "^runs:", "# a remark\nruns:")
    (built.folder / "config/run/another.yaml").write_text("base: demo\n")
    (built.folder / "config/exp/another.yaml").write_text("# @package _global_\n")
    built.edit("rules/draft.smk", r" > \{log:q\} 2>&1", " &> {log:q}")
    built.edit("config/run/demo.yaml:long", r"\bsave_every: \d+", "save_every: 77, log_every: 5")
    built.edit("rules/train.smk", r"runtime=[\w.]+", 'runtime="77m"')
    add_bench(built)  # runs when it is asked for alone
    resources = ["train:ranks=2", "train:cpus_per_task=16", "train:mem_mb=1000"]
    assert built.plan("--cores=8", "--set-threads", "train=4", "--set-resources", *resources) == {}
    told = built.output("-n", "bench")
    assert f"{P}/bench/longcot.jsonl" in told
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", told, re.MULTILINE))
    assert jobs == {"evaluate": "5", "report": "1", "bench": "1", "total": "7"}
    assert "--evaluations bench" in told


def test_serves_measures_a_finished_run_in_what_is_installed_and_plans_nothing_else(
    built: Workflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(built.folder)
    install("vllm")
    told = built.output("-n", "serves")
    assert all(f"{P}/serves/{name}.jsonl" in told for name in ("longspec", "vllm"))
    assert f"{P}/serves/llama.cpp.jsonl" not in told
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", told, re.MULTILINE))
    assert jobs == {"evaluate": "2", "serves_page": "1", "check_serves": "1", "serves": "1", "total": "5"}
    assert built.plan() == {}
    built.edit("config/run/demo.yaml:long", r"\blr: [^,}]+", "lr: 7.7e-3")
    alone = built.output("-n", "serves", "--allowed-rules", *MEASURES)  # as `longspec serve` calls it
    assert dict(re.findall(r"^(\w+) +(\d+)$", alone, re.MULTILINE)) == jobs


def test_a_changed_runtime_section_does_not_hide_an_unfinished_stage(built: Workflow) -> None:
    """Nor does it change what is written down of the finished ones; the training itself fails here."""
    runtimes = {stage: built.folder / P / stage / "runtime.yaml" for stage in ("base", "long")}
    for path in runtimes.values():
        path.write_text("as it was\n")
    (built.folder / P / "long/checkpoint.json").unlink()
    for stage in runtimes:
        built.edit(f"config/run/demo.yaml:{stage}", r"\bsave_every: \d+", "save_every: 77")
    assert built.call(f"{P}/long/checkpoint.json", "--cores=1").returncode == 1
    assert "save_every: 77\n" in runtimes["long"].read_text()
    assert runtimes["base"].read_text() == "as it was\n"


def test_a_learning_rate_trains_its_stage_and_later_ones(built: Workflow) -> None:
    built.edit("config/run/demo.yaml:long", r"\blr: [^,}]+", "lr: 7.7e-3")
    expected = {f"{P}/long/recipe.yaml"} | stage_outputs("long") | stage_outputs("longcot") | AFTER_ALL_STAGES
    assert set(built.plan()) == expected


def test_a_changed_tokenizer_does_the_data_again(built: Workflow) -> None:
    built.edit("config/model/demo.yaml", r"\bvocabulary: \d+", "vocabulary: 7777")
    rules = [job["rule"] for job in built.plan().values()]
    counts = {rule: rules.count(rule) for rule in rules}
    tokenized = len(list((built.folder / "data/tokens/demo").glob("*/*.json")))
    packed = len(list((built.folder / "data/packed/demo").iterdir()))
    once = dict.fromkeys(("build_config", "build_tokenizer", "train_target", *AFTER), 1)
    assert counts == once | {"tokenize": tokenized, "pack": packed, "train": 3, "extract": 3, "evaluate": 5}


def test_the_evaluation_settings_measure_again_and_train_nothing(built: Workflow) -> None:
    built.edit("config/workflow.yaml", r"\bprompts: \d+", "prompts: 77")
    assert {job["rule"] for job in built.plan().values()} == {"evaluate", *AFTER}


def test_another_choice_of_the_final_stage_trains_and_measures_nothing(built: Workflow) -> None:
    built.edit("config/run/demo.yaml", "^stages:", "final: last\nstages:")
    jobs = built.plan()
    assert {job["rule"] for job in jobs.values()} == {"assemble_final_draft", "report", "check_gates"}
    assert f"final --draft {P}/longcot/draft --stages" in jobs[f"{P}/final_draft/model.safetensors"]["command"]


def test_a_finished_run_is_compared_with_one_that_differs_in_its_name_alone(built: Workflow) -> None:
    """Of the second run all is made, its data and target are there; of the first nothing."""
    shutil.copy(built.folder / "config/run/demo.yaml", built.folder / "config/run/demo-2.yaml")
    text = built.output("-n", "compare", "--config", "runs=[demo,demo-2]")
    outputs = re.findall(r"^    output: (\S+?),?(?: .*)?$", text, re.MULTILINE)
    assert {path.split("/")[1] for path in outputs} == {"demo-2", "compare"}
    job = next(block for block in text.split("\n\n") if "rule compare_runs:" in block)
    assert "input: results/demo/report.json, results/demo-2/report.json" in job
    assert "output: results/compare/demo_demo-2.html, results/compare/demo_demo-2.json" in job
    variants = (f"--variant {run}/sinkpi-slicing=results/{run}/sinkpi-slicing" for run in ("demo", "demo-2"))
    assert f"--model-dir models/demo {' '.join(variants)} --raw data/raw/" in job


def test_calls_refuse_an_edited_recipe(built: Workflow) -> None:
    """A digit of the frozen recipe: a training would take it for what it is to do. No job is run."""
    (built.folder / P / "base/recipe.yaml").write_text("steps: 7\n")
    done = built.call(f"{P}/base/checkpoint.json", "--cores=1")
    assert done.returncode == 1
    assert f"{P}/base/recipe.yaml: edited since it was frozen" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
