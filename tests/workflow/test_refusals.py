"""What is wrong with the configuration is said before the graph is built, with the key's name and the fix."""

import json
import re
from pathlib import Path

import pytest

from longspec import methods
from tests.workflow.planning import Settings, Workflow

pytestmark = pytest.mark.slow  # half a minute and more as a whole

WORKFLOW = "config/workflow.yaml"
LONGCOT = "config/run/demo.yaml:longcot"

DEMO = "config/run/demo.yaml"
MODEL = "config/model/demo.yaml"
PUZZLES = r"puzzles: .*"
BOTH = r"  stdlib: .*\n  stdlib-long: .*$"
COT = r"\bcot: \{.*\}"

# By what is wrong: the file (or the part of it), what is replaced, by what, and the key that is named.
SCHEMA = {
    ("^evaluation:", "evalution:"): "evalution: unknown key; did you mean 'evaluation'?",
    (r"\brecords: ", "record: "): "data.puzzles.record: unknown key; did you mean 'records'?",
    (r"^runs: \[.*?\]", "runs: demo"): "runs: must be a list",
    (r"^(  stdlib-long: .*), shards: \d+", r"\1"): "data.stdlib-long.shards: missing; give a whole number from 1 to 1000",
    (r"^data:$", "data:\n  typo: {sorce: x, shards: 1, revision: 1}"): "data.typo.sorce: unknown key; did you mean 'source'?",
    (r"revision: 1\b", "revision: 2025"): "data.typo.revision: must be a text that is not empty, is 2025",
    (r"^  puzzles: ", "  other: {source: x.jsonl, shards: 1, aling: []}\n  puzzles: "): "data.other.aling: unknown key",
    (r"^variants: \[.*?\]", "variants: [1]"): "variants.0: must be a name, is 1",
}
CASES = {
    "a list of replayed stages": (LONGCOT, r"replay: \{.*?\}", "replay: [base]", "recipe.data.replay: {base: 0.2} (in "),
    "a target that nothing trains": (MODEL, r"mixture:\n(?: +-.*\n)+", "mixture: []\n", "build.mixture: is empty"),
    "a key of the target's phases": (MODEL, r"\brows:", "row:", "build.mixture.0.row: unknown key; did you mean 'rows'?"),
    "missing file": (WORKFLOW, PUZZLES, "puzzles: {source: in/a.jsonl, shards: 1}", "data.puzzles.source: in/a.jsonl: no such"),
    "an unknown preset": (WORKFLOW, PUZZLES, "puzzles: {preset: ultrachats}", "data.puzzles.preset: config/data.yaml has no "),
    "an archive": (WORKFLOW, PUZZLES, "puzzles: {source: hf:o/n/data.zip, shards: 2}", "source: hf:o/n/data.zip is an archive"),
    "a name that leads out": (
        WORKFLOW,
        PUZZLES,
        "puzzles: {source: hf:a/b/../../../x.jsonl, shards: 1}",
        "is no name of a dataset",
    ),
    "a file and a list that holds it with two shares": (
        WORKFLOW,
        BOTH,
        "  stdlib: {source: profiles/../b.jsonl, held_out: 0.1, shards: 1}\n  stdlib-long: {source: ['?.jsonl'], shards: 1}",
        "b.jsonl': a record held out in one would be trained on in the other",
    ),
    "a name that a shell would run": (MODEL, r"\bname: demo", "name: 'x$(touch INJECTED)'", "recipe.model.name: 'x$(touch INJ"),
    "rows beyond the positions": (LONGCOT, r"_length: \d+", "_length: 40000", "recipe.data.sequence_length: 40000 tokens"),
    "fields that the file has not": (DEMO, COT, "cot: {source: prompts.jsonl, template: '{qestion}'}", "tasks.cot.template: "),
    "a file that runs code": (
        WORKFLOW,
        r"^keep_states: .*",
        "__use_yte__: true\nkeep_states:\n  - ?open('INJECTED', 'w').close()",
        "config/workflow.yaml: __use_yte__: a configuration holds values and runs no code; remove the key",
    ),
    "unknown dataset of a task": (DEMO, r"\bdata: puzzles\b", "data: puzzle", "evaluation.tasks.cot.data: there is no dataset"),
    "unknown dataset of the target": (MODEL, "dataset: stdlib,", "dataset: other,", f"{MODEL}: build.mixture: dataset: "),
    "unknown dataset of a stage": (LONGCOT, r"\bname: puzzles\b", "name: puzles", "recipe.data.name: there is no dataset"),
    "unknown run": (WORKFLOW, r"^runs: \[.*?\]", "runs: [dmo]", "runs: there is no config/run/dmo.yaml; did you mean 'demo'?"),
    "unknown stage": (
        DEMO,
        r"^  long:",
        "  lang:",
        f"{DEMO}: stages: there is no config/stage/lang.yaml; did you mean 'long'?",
    ),
    "unknown recipe key": (
        LONGCOT,
        r"\blr:",
        "learning_rate:",
        "run 'demo', variant 'sinkpi-slicing', stage 'longcot': recipe.optimizer.learning_rate: unknown key; "
        "Known: betas, clip, eps, lr, name, schedule, warmup_ratio, weight_decay. (in config/run/demo.yaml, stage longcot)",
    ),
}


@pytest.fixture
def files(settings: Settings) -> Settings:
    """The settings beside files that some cases name."""
    (settings.folder / "profiles").mkdir()
    for name in ("a", "b", "{x}"):
        (settings.folder / f"{name}.jsonl").touch()
    (settings.folder / "prompts.jsonl").write_text('{"question": "1 + 1?", "reference": "2"}\n')
    return settings


@pytest.mark.parametrize("case", CASES)
def test_the_message_names_the_key_and_the_fix(files: Settings, case: str) -> None:
    path, pattern, new, message = CASES[case]
    files.edit(path, pattern, new)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        files.plan()
    # A misspelt key leaves another missing, which is told too, here in each of a target's three phases.
    lines = str(refused.value).splitlines()
    missing = [line for line in lines if ": missing; give" in line]
    assert len(lines) == max(1, 2 * len(missing))
    assert not list(files.folder.rglob("INJECTED"))


def test_the_files_as_they_stand_make_a_plan(files: Settings) -> None:
    """Else every case above would be refused for a reason of its own."""
    assert files.plan().runs == ["demo"]


def test_snakemake_does_not_run_a_file_as_a_template(workflow: Workflow) -> None:
    path, pattern, new, message = CASES["a file that runs code"]
    workflow.edit(path, pattern, new)
    assert workflow.refusal() == message
    assert not list(workflow.folder.rglob("INJECTED"))


def test_all_violations_of_the_schema_are_told_at_once(settings: Settings) -> None:
    for pattern, new in SCHEMA:
        settings.edit(WORKFLOW, pattern, new)
    with pytest.raises(ValueError, match=r"^config/workflow\.yaml: ") as refused:
        settings.plan()
    assert [message for message in SCHEMA.values() if message not in str(refused.value)] == []


def test_a_file_that_no_chosen_run_reads_need_not_be_there(settings: Settings) -> None:
    settings.edit(WORKFLOW, r"^data:\n", "data:\n  unused: {source: nowhere.jsonl, shards: 1}\n")
    assert "unused" in settings.plan().data


def test_prompts_that_are_trained_on_are_refused(files: Settings) -> None:
    """By whatever name the file goes; a file that no chosen run trains on may be measured."""
    files.edit(
        WORKFLOW,
        r"^  stdlib: .*$",
        "  stdlib: {source: profiles/../b.jsonl, held_out: 0.1, shards: 1}\n  unused: {source: a.jsonl, shards: 1}",
    )
    files.edit("config/run/demo.yaml", r"\bcot: \{.*\}", "cot: {source: a.jsonl}")
    assert files.plan().task_files("demo") == [Path("a.jsonl")]
    files.edit("config/run/demo.yaml", r"\bcot: \{.*\}", "cot: {source: '?.jsonl'}")
    told = "evaluation.tasks.cot.source: b.jsonl is trained on, as data.stdlib; give other prompts, or its held-out records"
    files.refuses(re.escape(told))


def test_one_target_a_run_and_one_name_a_target(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml:long", r"^recipe:\n", "recipe:\n  model: {name: other}\n")
    settings.refuses(r"recipe\.model\.name: 'other', but another stage of the run trains for 'demo'")
    settings.edit("config/run/demo.yaml:long", "name: other", "source: hf:a/b")
    settings.refuses(r"recipe\.model\.name: 'demo' stands for two different targets")


def test_drafts_that_vllm_does_not_load_and_trees_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an interpreter that is not there, for a run whose drafts it would load."""
    monkeypatch.setattr(methods.settings_of("glide"), "SERVED", {})
    settings.edit(WORKFLOW, r"^  engine: longspec", "  engine: vllm")
    told = "config/workflow.yaml: evaluation.engine: vllm: loads no glide drafts; set evaluation.engine: longspec (run "
    settings.refuses(re.escape(told + "'demo', variant 'sinkpi-slicing')"))
    told = r"config/workflow\.yaml: evaluation\.serve_python: \.venv-serve/vllm/bin/python: no such file; `make \.venv-serve"
    settings.refuses(told, runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  serve_python: \S+", "  serve_python: /bin/sh")
    section = json.loads(settings.plan(runs=["demo-eagle3"]).evaluation_settings("demo-eagle3"))
    assert (section["engine"], section["serve_python"]) == ("vllm", "/bin/sh")
    settings.edit(WORKFLOW, r"^  engine: vllm", "  engine: vllm\n  with_lookup: 8")
    settings.refuses(r"evaluation\.with_lookup: 8: vLLM drafts by one means alone; give null, or", runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  with_lookup: 8", "  with_lookup: null")
    settings.edit(WORKFLOW, r"^  shapes: \[4\]", "  shapes: [3, [4, 16]]")
    settings.refuses(r"evaluation\.shapes: tree 4-16: vLLM drafts chains alone; give a number of tokens", runs=["demo-eagle3"])


def test_a_draft_that_llama_cpp_cannot_represent_is_refused(settings: Settings) -> None:
    """With the recipe's key, before anything is trained: its drafts see all of a text."""
    settings.edit(WORKFLOW, r"^  engine: longspec", "  engine: llama.cpp")
    told = "config/workflow.yaml: evaluation.engine: llama.cpp: loads no glide drafts; set evaluation.engine: longspec or eval"
    settings.refuses(re.escape(told))
    told = (
        "config/workflow.yaml: evaluation.engine: llama.cpp: recipe.method.sliding_window: 512: drafts see all of a text in "
        "llama.cpp, here 4160 tokens; keep to texts of 512 tokens (of an evaluation evaluation.tasks,"
    )
    settings.refuses(re.escape(told), runs=["demo-eagle3"])
    settings.edit("config/run/demo-eagle3.yaml", r"^    (long|cot): \{data.*\n", "")
    settings.refuses(
        r"serve_python: \.venv-serve/llama\.cpp/bin/python: no such file; `make \.venv-serve/ll", runs=["demo-eagle3"]
    )
    settings.edit(WORKFLOW, r"^  serve_python: \S+", "  serve_python: /bin/sh")
    section = json.loads(settings.plan(runs=["demo-eagle3"]).evaluation_settings("demo-eagle3"))
    assert (section["engine"], section["serve_python"]) == ("llama.cpp", "/bin/sh")
    settings.plan(runs=["demo-dflash"])  # whose texts may be long; but its blocks have four tokens beside the newest
    settings.edit(WORKFLOW, r"^  shapes: \[4\]", "  shapes: [4, 5]")
    told = "evaluation.engine: llama.cpp: evaluation.shapes: 5: drafts of this recipe have at most 4 tokens; ask for no more"
    settings.refuses(re.escape(told), runs=["demo-dflash"])


def test_a_draft_that_openvino_cannot_represent_is_refused(settings: Settings) -> None:
    """The demo's draft reads the input of layer 0, and OpenVINO reads outputs of layers."""
    settings.edit(WORKFLOW, r"^  engine: longspec", "  engine: openvino")
    told = "config/workflow.yaml: evaluation.engine: openvino: recipe.method.layers: [0, 1, 2]: OpenVINO reads outputs of"
    settings.refuses(re.escape(told), runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  temperatures: \[0\]", "  temperatures: [0, 0.7]")
    settings.refuses(r"evaluation\.temperatures: 0\.7: text sampled by OpenVINO is not measured here", runs=["demo-eagle3"])


def test_our_own_engine_is_not_recorded(settings: Settings) -> None:
    """What was evaluated before there was a choice stays as it is."""
    before = settings.plan().evaluation_settings("demo")
    assert not {"engine", "serve_python"} & json.loads(before).keys()
    settings.edit(WORKFLOW, r"^  (engine|serve_python): .*\n", "")
    assert settings.plan().evaluation_settings("demo") == before
