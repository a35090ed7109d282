"""Servers that a job starts itself, and their ends; a real vLLM, whose answers are those of transformers."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from longspec.answers import server as own_server
from longspec.atomic_files import files_below, read_json
from longspec.target import fetch
from tests.answers.conftest import Case, journal_of, turns, write_chats
from tests.refusals import refused
from tests.slurm.cluster import is_running, until
from tests.targets import SHAPES
from tests.warm_jobs import popen

STAND_IN, ROOT = Path(__file__).with_name("stand_in.py"), Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-serve/vllm/bin/python"
SERVER = (
    f"env OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 {PYTHON} -m "
    "vllm.entrypoints.openai.api_server --model {model} --port {port} --generation-config vllm --dtype float32 "
    "--enforce-eager --max-model-len 512"
)
OPENER, CLOSER, OTHER = "[THINK]", "[/THINK]", "<|other|>"  # a thought's marks, and one that no answer may hold


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a server answers is seen at once."""
    monkeypatch.setattr(own_server, "LOOK", 0.1)


def command(*words: str) -> str:
    """A server of the job's own."""
    return " ".join([sys.executable, str(STAND_IN), "{model}", "{port}", *words])


def test_the_job_starts_its_server_for_what_is_left_and_ends_it(case: Case, tmp_path: Path) -> None:
    settings = {"engine": "endpoint", "server": command(str(tmp_path / "pid")), "requests": 2}
    made = case.make(tmp_path, **settings)
    assert made["ends"]["answered"] == 14
    assert journal_of(tmp_path)["train", 2]["messages"][1]["content"] == f"by {case.folder}"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    (tmp_path / "pid").unlink()
    (tmp_path / "shard.json").unlink()
    assert case.make(tmp_path, **settings) == made
    assert not (tmp_path / "pid").exists()


def test_a_server_that_ends_is_told_with_its_last_words(case: Case, tmp_path: Path) -> None:
    for when in ("at-once", "later"):
        with refused("regenerate.server", "exit code 7: no memory", tmp_path / "server.log"):
            case.make(tmp_path, engine="endpoint", server=command(str(tmp_path / "pid"), when), tries=2)


def test_a_server_that_wants_a_key_is_known_to_be_there(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"engine": "endpoint", "server": command(str(tmp_path / "pid"), "wants-key")}
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with refused("http://127.0.0.1", "lists no models", "401"):
        case.make(tmp_path, **settings)
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert case.make(tmp_path, **settings)["ends"]["answered"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_ends_ends_its_server(case: Case, tmp_path: Path, number: signal.Signals) -> None:
    """One that a shell has started: killed with -9, or by the end of its terminal, the job has no time to do it itself."""
    pid = tmp_path / "pid"
    server = f"sh -c '{command(str(pid), 'stalls')}; true'"
    settings = {"new_tokens": 12, "cut": "keep", "engine": "endpoint", "server": server}
    files = ["--raw", case.raw, "--target", case.target, "--tokenizer", case.tokenizer, "--out", tmp_path / "shard.json"]
    job = [sys.executable, "-m", "longspec.answers", "shard", *map(str, files), "--settings", json.dumps(settings)]
    process = popen(job)
    until(pid.with_suffix(".asked").exists, 60, "a request to the server")
    process.send_signal(number)
    assert process.wait(30) != 0
    until(lambda: not is_running(int(pid.read_text())), 30, "the server's end")


@pytest.fixture
def thinking(case: Case, tmp_path: Path) -> Case:
    """The case with a target whose tokenizer has such special tokens, which it likes to write; of a shape that vLLM has."""
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    tokenizer.add_special_tokens({"additional_special_tokens": [OPENER, CLOSER, OTHER]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    torch.manual_seed(8)
    shape = SHAPES | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    with torch.no_grad():
        for token in range(len(tokenizer)):
            text = tokenizer.decode([token])
            if not (text.isascii() and text.isprintable()):
                model.lm_head.weight[token] = 0
        for name, factor in {OPENER: 3, CLOSER: 3, OTHER: 1, "<|im_end|>": 3}.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(name)] *= factor
    folder = tmp_path / "thinking"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target, made_with = (tmp_path / f"{name}_manifest.json" for name in ("target", "tokenizer"))
    for manifest in (target, made_with):
        fetch.write_manifest(manifest, folder, "test", files_below(folder))
    return replace(case, target=target, tokenizer=made_with)


@pytest.mark.serve
@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is missing: make test-serve")
def test_answers_of_vllm_are_those_of_transformers(thinking: Case, tmp_path: Path) -> None:
    """Greedy, in float32. A special token that is no thought's mark drops an answer; what a tool lacks is null to vLLM."""
    found: list[dict[Any, Any]] = []
    for name, tool, settings in (
        ("local", {"name": "sum", "description": None, "parameters": None}, {"precision": "fp32"}),
        ("vllm", {"returns": "a sum", "name": "sum"}, {"engine": "endpoint", "server": SERVER, "requests": 4}),
    ):
        offered = turns("why?") | {"tools": [{"type": "function", "function": tool}]}
        asked = replace(thinking, raw=write_chats(tmp_path / name / "chats", offered))
        asked.make(tmp_path / name, temperature=0, new_tokens=24, **settings)
        found.append(journal_of(tmp_path / name))
    ours, theirs = found
    assert theirs == ours
    said = [line.get("reason", "") + str(line.get("messages", "")) for line in ours.values()]
    assert all(any(name in text for text in said) for name in (OPENER, CLOSER, OTHER))
