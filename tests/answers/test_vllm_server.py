"""Answers by a real vLLM that the job starts: token by token those of transformers, special tokens within them too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from longspec.atomic_files import files_below, read_json
from longspec.target import fetch
from tests.answers.conftest import Case, journal_of, turns, write_chats
from tests.targets import SHAPES

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-serve/vllm/bin/python"
pytestmark = [pytest.mark.serve, pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is missing: make test-serve")]
SERVER = (
    f"env OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 {PYTHON} -m "
    "vllm.entrypoints.openai.api_server --model {model} --port {port} --generation-config vllm --dtype float32 "
    "--enforce-eager --max-model-len 512"
)
OPENER, CLOSER, OTHER = "[THINK]", "[/THINK]", "<|other|>"  # a thought's marks, and one that no answer may hold


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


def test_answers_of_vllm_are_those_of_transformers(thinking: Case, tmp_path: Path) -> None:
    """Greedy, in float32. An answer that holds a special token which is no thought's mark is dropped by both.

    A tool that lacks fields is one with nulls to vLLM's template.
    """
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
