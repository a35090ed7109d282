"""The runs on UltraChat and ShareGPT: planned without their targets, measured on their own data."""

import json

import pytest

from longspec.config import yaml_files
from longspec.workflow.checks import forgetting_warning
from tests.workflow.planning import FILE, Settings, Workflow

pytestmark = pytest.mark.slow  # half a minute and more as a whole

RUNS = ["llama3.1-8b-eagle3", "qwen3-8b-eagle3", "qwen3-30b-a3b-eagle3", "llama3.3-70b-eagle3"]
FIRST = RUNS[0]
STAGES = ["ultrachat", "sharegpt"]
RULES = ("fetch_data", "fetch_target", "raw", "train", "evaluate", "assemble_final_draft")
RUN = f"config/run/{FIRST}.yaml"


def test_all_four_are_planned_in_one_call(workflow: Workflow) -> None:
    jobs = workflow.plan("--config", f"runs=[{','.join(RUNS)}]")
    rules = [fields["rule"] for fields in jobs.values()]
    assert {rule: rules.count(rule) for rule in RULES} == {
        "fetch_data": 2,
        "fetch_target": 4,
        "raw": 2,
        "train": 8,
        "evaluate": 16,
        "assemble_final_draft": 4,
    }
    assert not [path for path in jobs if "stdlib" in path or "puzzles" in path]
    packed = {output.split("/")[-2] for output, fields in jobs.items() if fields["rule"] == "pack"}
    assert packed == {f"{stage}-long-4096-truncate" for stage in STAGES}, "answers alone"
    for run in RUNS:
        measured = jobs[f"results/{run}/ttt/evaluation/sharegpt.jsonl"]
        assert {f"data/raw/{name}/manifest.json" for name in STAGES} <= set(measured["input"].split(", "))
        assert (
            "--raw sharegpt=data/raw/sharegpt/manifest.json ultrachat=data/raw/ultrachat/manifest.json" in measured["command"]
        )


def test_the_demo_neither_fetches_nor_measures_them(settings: Settings) -> None:
    own = yaml_files.read(settings.folder / "config/run/demo.yaml")["evaluation"]
    told = yaml_files.read(settings.folder / FILE)["evaluation"] | own
    for chosen in (["demo"], ["demo", FIRST]):
        plan = settings.plan(runs=chosen)
        assert json.loads(plan.evaluation_settings("demo")) == {
            key: told[key] for key in told if key not in ("draft_vocabulary", "engine", "serve_python")
        }
        assert plan.evaluation_data("demo") == ["puzzles", "stdlib", "stdlib-long"]
        assert set(plan.datasets_in_use()) & set(STAGES) == (set(STAGES) if chosen[1:] else set())


def test_a_gate_that_judges_nothing_names_the_runs_file(settings: Settings) -> None:
    settings.edit(RUN, r"^    ultrachat: .*\n", "")
    told = forgetting_warning(settings.plan(runs=["demo", FIRST]))
    assert told.startswith("gates.forgetting cannot judge what is forgotten of ultrachat: no task measures it.")
    assert f"evaluation.tasks in {RUN}, such as own: {{data: ultrachat" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        (
            str(FILE),
            r"\bshapes: .*$",
            "shapes: [[4, 16], [4, 16]]",
            rf"^{FILE}: evaluation\.temperatures, evaluation\.shapes: .* twice",
        ),
        (RUN, "new_tokens: 128", "new_tokens: 128\n  shapes: [3, 3]", rf"^{FILE}, {RUN}: evaluation\.temperatures, .* twice"),
        (str(FILE), r"engine: longspec", "engine: vllm", rf"^{FILE}: evaluation\.shapes: tree 4-16"),
        (RUN, "new_tokens: 128", "new_tokens: 128\n  engine: vllm", rf"^{FILE}, {RUN}: evaluation\.shapes: tree 4-16"),
    ],
)
def test_a_wrong_key_names_the_file_that_holds_it(settings: Settings, path: str, old: str, new: str, told: str) -> None:
    settings.edit(str(FILE), r"\bshapes: .*$", "shapes: [[4, 16]]")
    settings.edit(path, old, new)
    with pytest.raises(ValueError, match=told):
        settings.plan(runs=[FIRST])
