"""What is wrong with the configuration is said before the graph is built, with the key's name and the fix."""

import json
from pathlib import Path

import pytest

from longspec import methods
from tests.refusals import check, refused
from tests.workflow.planning import Settings, Workflow

pytestmark = pytest.mark.slow  # half a minute and more as a whole

WORKFLOW = "config/workflow.yaml"
LONGCOT = "config/run/demo.yaml:longcot"

DEMO = "config/run/demo.yaml"
MODEL = "config/model/demo.yaml"
PUZZLES, PUZZLE = r"puzzles: .*", f"{WORKFLOW}: data.puzzles"
BOTH = r"  stdlib: .*\n  stdlib-long: .*$"
COT = r"\bcot: \{.*\}"

EVALUATION, TASK = f"{WORKFLOW}: evaluation", f"{DEMO}: evaluation.tasks.cot"
BASE = "run 'demo', variant 'sinkpi-slicing', stage 'base'"
DATA = "run 'demo', stage 'longcot': recipe.data"

# By what is wrong: the file (or the part of it), what is replaced, by what, and the key that is named, with facts.
SCHEMA = {
    ("^evaluation:", "evalution:"): ("evalution: unknown key", "'evaluation'?"),
    (r"\brecords: ", "record: "): ("data.puzzles.record: unknown key", "'records'?"),
    (r"^runs: \[.*?\]", "runs: demo"): ("runs", "a list", "is 'demo'"),
    (r"^(  stdlib-long: .*), shards: \d+", r"\1"): ("data.stdlib-long.shards: missing", "1 to 1000"),
    (r"^data:$", "data:\n  typo: {sorce: x, shards: 1, revision: 1}"): ("data.typo.sorce: unknown key", "'source'?"),
    (r"revision: 1\b", "revision: 2025"): ("data.typo.revision", "a text", "is 2025"),
    (r"^  puzzles: ", "  other: {source: x.jsonl, shards: 1, aling: []}\n  puzzles: "): ("data.other.aling: unknown key",),
    (r"^variants: \[.*?\]", "variants: [1]"): ("variants.0", "a name", "is 1"),
}
CASES = {
    "a list of replayed stages": (
        LONGCOT,
        r"replay: \{.*?\}",
        "replay: [base]",
        "config/run/demo.yaml: stages.longcot.recipe.data.replay",
        "is ['base']",
    ),
    "a target that nothing trains": (MODEL, r"mixture:\n(?: +-.*\n)+", "mixture: []\n", f"{MODEL}: build.mixture", "empty"),
    "a key of the target's phases": (MODEL, r"\brows:", "row:", f"{BASE}: build.mixture.0.row: unknown key", "'rows'?"),
    "missing file": (WORKFLOW, PUZZLES, "puzzles: {source: in/a.jsonl, shards: 1}", f"{PUZZLE}.source: in/a.jsonl", "no such"),
    "an unknown preset": (WORKFLOW, PUZZLES, "puzzles: {preset: chats}", f"{PUZZLE}.preset: config/data.yaml", "has no preset"),
    "an archive": (WORKFLOW, PUZZLES, "puzzles: {source: hf:o/n/a.zip, shards: 2}", f"{PUZZLE}.source: hf:o/n/a.zip", "member"),
    "a name that leads out": (
        WORKFLOW,
        PUZZLES,
        "puzzles: {source: hf:a/b/../../../x.jsonl, shards: 1}",
        f"{PUZZLE}.source: 'hf:a/b/../../../x.jsonl'",
        "hf:<owner>/<repository>",
    ),
    "a file and a list that holds it with two shares": (
        WORKFLOW,
        BOTH,
        "  stdlib: {source: profiles/../b.jsonl, held_out: 0.1, shards: 1}\n  stdlib-long: {source: ['?.jsonl'], shards: 1}",
        f"{WORKFLOW}: data.stdlib-long.held_out: 0.02",
        "data.stdlib.held_out: 0.1",
        "b.jsonl'",
    ),
    "a name that a shell would run": (MODEL, r"\bname: demo", "name: 'x$(touch INJECTED)'", f"{BASE}: recipe.model.name: 'x$"),
    "rows beyond the positions": (LONGCOT, r"_length: \d+", "_length: 40000", f"{DATA}.sequence_length: 40000 tokens"),
    "fields that the file has not": (DEMO, COT, "cot: {source: prompts.jsonl, template: '{qestion}'}", f"{TASK}.template"),
    "a file that runs code": (
        WORKFLOW,
        r"^keep_states: .*",
        "__use_yte__: true\nkeep_states:\n  - ?open('INJECTED', 'w').close()",
        f"{WORKFLOW}: __use_yte__",
        "remove",
    ),
    "unknown dataset of a task": (DEMO, r"\bdata: puzzles\b", "data: puzzle", f"{TASK}.data", "'puzzles'?"),
    "unknown dataset of the target": (MODEL, "dataset: stdlib,", "dataset: other,", f"{MODEL}: build.mixture: dataset"),
    "unknown dataset of a stage": (LONGCOT, r"\bname: puzzles\b", "name: puzles", f"{DATA}.name", "'puzzles'?"),
    "unknown run": (WORKFLOW, r"^runs: \[.*?\]", "runs: [dmo]", "runs", "config/run/dmo.yaml", "'demo'?"),
    "unknown stage": (DEMO, r"^  long:", "  lang:", f"{DEMO}: stages", "config/stage/lang.yaml", "'long'?"),
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
    path, pattern, new, *told = CASES[case]
    files.edit(path, pattern, new)
    with refused(*told) as caught:
        files.plan()
    # A misspelt key leaves another missing, which is told too, here in each of a target's three phases.
    lines = str(caught.value).splitlines()
    missing = [line for line in lines if ": missing; give" in line]
    assert len(lines) == max(1, 2 * len(missing))
    assert not list(files.folder.rglob("INJECTED"))


def test_snakemake_does_not_run_a_file_as_a_template(workflow: Workflow) -> None:
    path, pattern, new, *told = CASES["a file that runs code"]
    workflow.edit(path, pattern, new)
    done = workflow.call("-n", "final_draft")
    assert done.returncode == 1, done.stdout + done.stderr
    said = (done.stdout + done.stderr).splitlines()
    [line] = [line for line in said if not line.startswith("Using workflow specific profile")]
    check(line, *told)
    assert not list(workflow.folder.rglob("INJECTED"))


def test_all_violations_of_the_schema_are_told_at_once(settings: Settings) -> None:
    for pattern, new in SCHEMA:
        settings.edit(WORKFLOW, pattern, new)
    with refused(WORKFLOW) as caught:
        settings.plan()
    for place, *facts in SCHEMA.values():
        [line] = [line for line in str(caught.value).splitlines() if line.startswith(f"{WORKFLOW}: {place}")]
        check(line, f"{WORKFLOW}: {place}", *facts)


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
    files.refuses(f"{DEMO}: evaluation.tasks.cot.source: b.jsonl", "data.stdlib;", "cot: {data: stdlib, context: [64, 1024]}")


def test_one_target_a_run_and_one_name_a_target(settings: Settings) -> None:
    settings.edit("config/run/demo.yaml:long", r"^recipe:\n", "recipe:\n  model: {name: other}\n")
    settings.refuses("run 'demo', stage 'long': recipe.model.name: 'other'", "'demo';")
    settings.edit("config/run/demo.yaml:long", "name: other", "source: hf:a/b")
    settings.refuses("run 'demo', stage 'long': recipe.model.name: 'demo'", "(source, sha256 or build)")


def test_an_interpreter_of_no_engine_is_refused(settings: Settings) -> None:
    settings.edit(WORKFLOW, r"^  serve_python: \S+", "  serve_python: /bin/sh")
    settings.refuses(f"{EVALUATION}.serve_python: /bin/sh", "evaluation.engine", "vllm")


def test_drafts_that_vllm_does_not_load_and_trees_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an interpreter that is not there, for a run whose drafts it would load."""
    monkeypatch.setattr(methods.settings_of("glide"), "SERVED", {})
    settings.edit(WORKFLOW, r"^  engine: longspec", "  engine: vllm")
    advice = "evaluation.engine: longspec"
    settings.refuses(f"{EVALUATION}.engine: vllm", "glide drafts", f"{advice} (run 'demo', variant 'sinkpi-slicing')")
    missing = f"{EVALUATION}.serve_python: .venv-serve/vllm/bin/python"
    settings.refuses(missing, "make .venv-serve/vllm/.stamp", runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  serve_python: \S+", "  serve_python: /bin/sh")
    section = json.loads(settings.plan(runs=["demo-eagle3"]).evaluation_settings("demo-eagle3"))
    assert (section["engine"], section["serve_python"]) == ("vllm", "/bin/sh")
    settings.edit(WORKFLOW, r"^  engine: vllm", "  engine: vllm\n  with_lookup: 8")
    settings.refuses(f"{EVALUATION}.with_lookup: 8", "vLLM", f"null, or {advice}", runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  with_lookup: 8", "  with_lookup: null")
    settings.edit(WORKFLOW, r"^  shapes: \[4\]", "  shapes: [3, [4, 16]]")
    settings.refuses(f"{EVALUATION}.shapes: tree 4-16", "vLLM", advice, runs=["demo-eagle3"])


def test_a_draft_that_llama_cpp_cannot_represent_is_refused(settings: Settings) -> None:
    """With the recipe's key, before anything is trained: its drafts see all of a text."""
    settings.edit(WORKFLOW, r"^  engine: longspec", "  engine: llama.cpp")
    engine, advice = f"{EVALUATION}.engine: llama.cpp", "evaluation.engine: longspec"
    settings.refuses(engine, "glide drafts", f"{advice} or evaluation.engine: vllm")
    window = f"{engine}: recipe.method.sliding_window: 512"
    settings.refuses(window, "4164 tokens", "512 tokens (", "evaluation evaluation.tasks,", runs=["demo-eagle3"])
    settings.edit("config/run/demo-eagle3.yaml", r"^    (long|cot): \{data.*\n", "")
    missing = f"{EVALUATION}.serve_python: .venv-serve/llama.cpp/bin/python"
    settings.refuses(missing, "make .venv-serve/llama.cpp/.stamp", runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  serve_python: \S+", "  serve_python: /bin/sh")
    section = json.loads(settings.plan(runs=["demo-eagle3"]).evaluation_settings("demo-eagle3"))
    assert (section["engine"], section["serve_python"]) == ("llama.cpp", "/bin/sh")
    settings.edit(WORKFLOW, r"^  draft_vocabulary: \S+", "  draft_vocabulary: 512")
    settings.refuses(f"{EVALUATION}.draft_vocabulary: 512", "llama.cpp", advice, runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  draft_vocabulary: \S+", "  draft_vocabulary: null")
    settings.refuses(engine, "qwen3", "llama, mistral, qwen2", runs=["qwen3-8b-eagle3"])
    settings.plan(runs=["demo-dflash"])  # whose texts may be long; but its blocks have four tokens beside the newest
    settings.edit(WORKFLOW, r"^  shapes: \[4\]", "  shapes: [4, 5]")
    settings.refuses(f"{engine}: evaluation.shapes: 5", "4 tokens", runs=["demo-dflash"])


def test_a_draft_that_openvino_cannot_represent_is_refused(settings: Settings) -> None:
    """The demo's draft reads the input of layer 0, and OpenVINO reads outputs of layers."""
    settings.edit(WORKFLOW, r"^  engine: longspec", "  engine: openvino")
    layers = f"{EVALUATION}.engine: openvino: recipe.method.layers: [0, 1, 2]"
    settings.refuses(layers, "OpenVINO", "layer 0's input", "from 1 on", runs=["demo-eagle3"])
    settings.edit(WORKFLOW, r"^  temperatures: \[0\]", "  temperatures: [0, 0.7]")
    settings.refuses(f"{EVALUATION}.temperatures: 0.7", "OpenVINO", "give [0]", runs=["demo-eagle3"])


def test_our_own_engine_is_not_recorded(settings: Settings) -> None:
    """What was evaluated before there was a choice stays as it is."""
    before = settings.plan().evaluation_settings("demo")
    assert not {"engine", "serve_python"} & json.loads(before).keys()
    settings.edit(WORKFLOW, r"^  (engine|serve_python): .*\n", "")
    assert settings.plan().evaluation_settings("demo") == before
