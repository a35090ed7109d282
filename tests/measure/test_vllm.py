"""An EAGLE-3 draft for the demo's target in an unmodified vLLM: its text, and its acceptance by vLLM's own counters.

The other side is our own decoding of the same prompts. What differs between the two at all: near-ties of the
target, and drafted tokens that vLLM keeps behind the one that ends a text. Neither occurs here, so that the rounds themselves
are the same; the bars leave room for processors on which a near-tie does.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longspec import jsonl
from longspec.atomic_files import describe_files, read_json, write_json, write_text
from longspec.engines import ENGINES, LLAMA_CPP, OURS, VLLM
from tests.measure.demo_draft import DRAFT, FILE, NEEDED, ROOT, Line, assert_as_ours, at_root, demo, is_seen
from tests.workflow.planning import copy_to

__all__ = ["at_root"]  # a fixture
# `make test-serve` makes both, and says why where it cannot.
MISSING = [name for name in (".venv-serve/vllm/.stamp", NEEDED) if not (ROOT / name).is_file()]
pytestmark = [pytest.mark.serve, pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing: make test-serve")]
PYTHON = ROOT / ".venv-serve/vllm/bin/python"
# A small window and a small RoPE base, of target and draft: in prompts of 64 tokens another one is then seen.
WINDOW, BASE = 8, 100.0
EVALUATION = """evaluation:
  prompts: 40
  new_tokens: 64
  shapes: [3]
  tasks: {of-64: {data: stdlib, context: [64, 64]}}
"""


def test_text_and_acceptance_in_vllm_are_ours(tmp_path: Path) -> None:
    """By `snakemake serves`, of a copy of the run, float32, greedy. llama.cpp is measured beside vLLM where it is installed."""
    copy, run = copy_to(tmp_path, ROOT), tmp_path / "results/served-eagle3"
    for name in ("data", "models", "serve", ".venv-serve"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "results/served-eagle3", run, ignore=shutil.ignore_patterns("checkpoints", "serves*"))
    copy.edit("config/run/demo-eagle3.yaml", r"^evaluation:\n(  .*\n)+", EVALUATION)
    words = [sys.executable, "-m", "snakemake", "serves", "--config", f"runs=[{FILE}]", "--cores=1"]
    subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "src")}, check=True)
    others = [ENGINES[name] for name in (VLLM, LLAMA_CPP) if (ROOT / ENGINES[name].python).exists()]
    verdicts = {(row["gate"], row["passed"]) for row in json.loads((run / "serves_gates.json").read_text())}
    assert verdicts == {(engine.title, True) for engine in others}
    ours, theirs = (list(jsonl.read(run / f"ttt/serves/{name}.jsonl")) for name in (OURS, VLLM))
    assert_as_ours(theirs, ours, "vllm", 40 * 60)


def edit(path: Path, change: Callable[[Line], None]) -> None:
    """Change a JSON file in its place."""
    content = read_json(path)
    change(content)
    write_json(path, content)


def test_window_and_rope_base_of_a_draft_are_read_as_we_read_them(tmp_path: Path) -> None:
    """No good draft for no good target, but the same one for both engines; a draft whose window is one token off is seen."""
    draft, shifted = tmp_path / "draft", tmp_path / "shifted"
    shutil.copytree(ROOT / "models/demo/target", tmp_path / "target")
    shutil.copytree(DRAFT, draft)
    edit(tmp_path / "target/config.json", lambda config: config["rope_parameters"].update(rope_theta=BASE))

    def narrowed(config: Line) -> None:
        config["rope_parameters"]["rope_theta"] = config["target"]["rope_parameters"]["rope_theta"] = BASE
        config |= {"rope_theta": BASE, "sliding_window": WINDOW, "layer_types": ["sliding_attention"]}
        config["settings"]["sliding_window"] = WINDOW

    edit(draft / "config.json", narrowed)
    manifest = read_json(ROOT / "models/demo/target_manifest.json")
    files = manifest["files"] | describe_files(tmp_path / "target", ["config.json"])
    write_json(tmp_path / "target_manifest.json", manifest | {"path": str(tmp_path / "target"), "files": files})
    measured = demo(20, 64)
    recipe = measured.recipe.read_text()
    window = f"sliding_window: {read_json(DRAFT / 'config.json')['sliding_window']}"
    assert window in recipe
    write_text(tmp_path / "recipe.yaml", recipe.replace(window, f"sliding_window: {WINDOW}"))
    small = replace(measured, target=tmp_path / "target_manifest.json", draft=draft, recipe=tmp_path / "recipe.yaml")
    ours = small.lines(tmp_path / "ours.jsonl")
    shutil.copytree(draft, shifted)
    edit(shifted / "config.json", lambda config: config.update(sliding_window=WINDOW + 1))
    for folder in (draft, shifted):
        options = ("--engine", "vllm", "--serve-python", str(PYTHON), "--served-draft", str(folder))
        theirs = small.lines(tmp_path / f"{folder.name}.jsonl", *options)
        assert is_seen(theirs, ours) == (folder == shifted)
