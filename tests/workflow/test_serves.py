"""What `snakemake serves` plans: which engines are measured, on which tasks, by which settings, and why the others are not."""

import json
from pathlib import Path

from longspec.measure.tasks import parse
from longspec.workflow.serves import ServesPlan
from tests.workflow.planning import Settings, install

RUN = "config/run/demo-eagle3.yaml"
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
    settings.edit(RUN, "sliding_window: 512", "sliding_window: 64")
    standings = ServesPlan(settings.plan(runs=["demo-eagle3"])).standings("demo-eagle3", "ttt")
    assert standings["llama.cpp"].section is None
    assert standings["llama.cpp"].why.startswith(
        "cannot represent this draft: recipe.method.sliding_window: 64: drafts see all of a text in llama.cpp"
    )


def test_the_interpreter_that_the_evaluation_names_is_its_engines_alone(settings: Settings, tmp_path: Path) -> None:
    install("vllm", "llama.cpp")
    (python := tmp_path / "python").touch(0o755)
    settings.edit(RUN, "^evaluation:", f"evaluation:\n  engine: vllm\n  serve_python: {python}")
    serves = ServesPlan(settings.plan(runs=["demo-eagle3"]))
    sections = {name: json.loads(serves.evaluation_settings("demo-eagle3", "ttt", name)) for name in MEASURED}
    assert [section.get("serve_python") for section in sections.values()] == [None, str(python), None]
    assert [section.get("engine") for section in sections.values()] == [None, "vllm", "llama.cpp"]
