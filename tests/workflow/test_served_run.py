"""`longspec serve`: which engine it takes, what is measured before, how vLLM is started, and what to type for llama.cpp."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from longspec.atomic_files import write_json
from longspec.cli import serve
from longspec.config import plain
from longspec.methods.glide import settings as glide
from tests.refusals import check, refused
from tests.workflow.planning import Settings, install

DRAFT, TARGET = Path("results/demo-eagle3/ttt/final_draft"), "models/demo/target"
GLIDE = "results/demo/sinkpi-slicing/final_draft"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
ROW = {"engine": "vllm", "positions": [{"mean": 0.75}, {"mean": 0.5}, None], "tokens": {"mean": 2.125}, "rounds": 8}
MEASURED = {"chain": 3, "groups": [{"prompts": 2, "tasks": ["short"], "rows": [ROW]}]}


@pytest.fixture
def finished(settings: Settings) -> Settings:
    """What finished runs of two methods leave, as far as `serve` reads it."""
    write_json(DRAFT / "config.json", {"draft": "eagle3", "target_path": TARGET})
    write_json(Path(f"{GLIDE}/config.json"), {"draft": "glide", "target_path": TARGET})
    for folder in (DRAFT, Path(GLIDE)):
        write_json(folder / "provenance.json", {})
    write_json(Path(f"{TARGET}/config.json"), {"model_type": "qwen2", "max_position_embeddings": 1024})
    settings.edit("config/workflow.yaml", r"shapes: \[4\]", "shapes: [3]")
    return settings


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of Snakemake, which measures and ends well, and of what this process becomes."""
    made: list[Any] = []

    def measure(*words: str) -> int:
        made.append([*words])
        run = words[words.index("--config") + 1].removeprefix("run=")
        write_json(Path(f"results/{run}/serves.json"), {"variants": dict.fromkeys(("ttt", "sinkpi-slicing"), MEASURED)})
        return 0

    monkeypatch.setattr(serve, "snakemake", measure)
    monkeypatch.setattr(serve.os, "execve", lambda *given: made.append(given))
    monkeypatch.setattr(serve.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(V2, "1")
    monkeypatch.delenv(V2)
    return made


def test_the_draft_is_measured_and_served(finished: Settings, calls: list[Any], longspec: Any) -> None:
    install("vllm")
    told = longspec("serve", "demo-eagle3", "--", "--seed", "7")[1]
    assert ["vllm", "0.75", "0.50", "-", "2.12", "8"] in [line.replace("│", " ").split() for line in told.splitlines()]
    measured, (python, words, environment) = calls
    assert measured[measured.index("serves") :] == [
        "serves", "--config", "run=demo-eagle3", "--allowed-rules", "evaluate", "serves_page", "check_serves", "serves"
    ]  # fmt: skip
    assert words[:5] == [python, "-m", "vllm.entrypoints.openai.api_server", "--model", TARGET]
    draft = {"method": "eagle3", "model": str(DRAFT), "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    assert json.loads(words[words.index("--speculative-config") + 1]) == draft
    assert words[-7:] == ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--seed", "7"]
    assert "sampled text will not be the target's" in told
    Path(".venv-serve/vllm/lib/python3.12/site-packages/longspec_vllm-1.dist-info").mkdir(parents=True)
    assert "sampled text" not in longspec("serve", "demo-eagle3")[1]
    assert (environment["VLLM_ENABLE_V1_MULTIPROCESSING"], V2 in environment) == ("1", False)
    check(longspec("serve", "demo")[1], f"error: {GLIDE}/vllm: missing", f"longspec export {GLIDE} --layout vllm")
    Path(f"{GLIDE}/vllm").mkdir()
    write_json(Path(f"{GLIDE}/vllm/config.json"), {})
    longspec("serve", "demo")
    assert calls[-1][2][V2] == "0", "the plugin wants another model runner than the one that vLLM takes on GPUs"


@pytest.mark.parametrize(
    ("installed", "arguments", "told"),
    [
        ((), ["demo-eagle3"], ("error: vLLM", "make .venv-serve/vllm/.stamp")),
        (("llama.cpp",), ["demo"], ("error: vLLM", "make .venv-serve/vllm/.stamp")),
        (("llama.cpp",), ["demo-eagle3"], ("longspec export",)),
        (("vllm",), ["demo-eagle3", "--engine", "llama.cpp"], ("longspec export",)),
        (("vllm",), ["demo", "--engine", "llama.cpp"], ("error: llama.cpp", "glide drafts; use vLLM", "`longspec serve")),
        (("vllm",), ["demo-eagle3", "--variant", "tt"], ("error: --variant: 'tt'", "of ttt")),
        (("vllm",), ["demo-dflash"], ("error: results/demo-dflash/blocks/final_draft", "longspec train demo-dflash")),
    ],
)
def test_the_engine_that_fits_method_and_machine_is_taken(
    finished: Settings, calls: list[Any], longspec: Any, installed: tuple[str, ...], arguments: list[str], told: tuple[str, ...]
) -> None:
    install(*installed)
    check(longspec("serve", *arguments)[1], *told)
    assert calls == []


def test_figures_of_an_earlier_draft_are_not_shown(
    finished: Settings, calls: list[Any], longspec: Any, monkeypatch: Any
) -> None:
    """Where the draft was trained again and its measurement fails."""
    install("vllm")
    longspec("serve", "demo-eagle3")
    monkeypatch.setattr(serve, "snakemake", lambda *_: 1)
    later = Path("results/demo-eagle3/serves.json").stat().st_mtime + 5
    assert "0.75" in longspec("serve", "demo-eagle3")[1]
    os.utime(DRAFT / "provenance.json", (later, later))
    assert "0.75" not in longspec("serve", "demo-eagle3")[1]


def test_beside_a_target_that_llama_cpp_drafts_not_for_there_is_nothing_to_type(
    finished: Settings, longspec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"llama.cpp": replace(serve.ENGINES["llama.cpp"], targets=("llama", "mistral"))}
    monkeypatch.setattr(serve, "ENGINES", serve.ENGINES | others)
    check(longspec("serve", "demo-eagle3", "--engine", "llama.cpp")[1], "error: llama.cpp", "llama, mistral", "qwen2")


def test_a_draft_that_no_engine_loads_may_be_tried(finished: Settings, longspec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glide, "SERVED", {})
    check(longspec("serve", "demo")[1], "error: vLLM", "glide drafts", f"`longspec try {GLIDE}`")


def test_for_llama_cpp_it_prints_what_to_type(finished: Settings, longspec: Any) -> None:
    """The demo's draft has a window of 512 tokens, within which texts are kept."""
    export, server = map(shlex.split, longspec("serve", "demo-eagle3", "--engine", "llama.cpp")[1].splitlines())
    beside = DRAFT.parent
    assert export[:6] == ["longspec", "export", str(DRAFT), "--layout", "gguf", "--out"]
    assert export[6:] == [str(beside / "draft.gguf"), "--target", str(beside / "target.gguf"), "--context", "512"]
    assert server[:3] == ["llama-server", "-m", str(beside / "target.gguf")]
    assert server[server.index("--spec-draft-n-max") + 1] == "3"
    (own := Path("mine.gguf")).touch()
    sizes = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
    made = {"draft": "eagle3", "target_path": TARGET, "target_source": str(own), "target": sizes}
    write_json(DRAFT / "config.json", made)
    export, server = map(shlex.split, longspec("serve", "demo-eagle3", "--engine", "llama.cpp")[1].splitlines())
    assert "--target" not in export
    assert export[export.index("--dtype") + 1] == "q8_0", "its weights were made float32 for training"
    write_json(DRAFT / "config.json", made | {"target": sizes | {"hidden_size": 72}})
    assert " --dtype f16 " in longspec("serve", "demo-eagle3", "--engine", "llama.cpp")[1]
    assert server[:3] == ["llama-server", "-m", str(own)]
    write_json(DRAFT / "config.json", made | {"target": sizes | {"model_type": "qwen2"}})
    assert "--target" in longspec("serve", "demo-eagle3", "--engine", "llama.cpp")[1], "llama.cpp aborts beside the file itself"
    windowed: Any = SimpleNamespace(method=SimpleNamespace(name="dflash", sliding_window=64))  # which llama.cpp computes
    export_line, server_line = serve.llama_cpp_commands(DRAFT, {}, windowed, 4)
    assert "--context" not in export_line
    assert "--spec-type draft-dflash" in server_line
    method = plain(finished.plan(runs=["demo-eagle3"]).first_recipe("demo-eagle3", "ttt").method)
    with refused("recipe.method.fc_norm: true", "llama.cpp"):
        serve.llama_cpp_commands(DRAFT, made, OmegaConf.create({"method": method | {"fc_norm": True}}), 4)
