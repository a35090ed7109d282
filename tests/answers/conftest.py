"""A random target that ends its answers now and then, and conversations of one and of several turns."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from longspec import lease
from longspec.answers import shard
from longspec.answers.settings import parse
from longspec.atomic_files import files_below, read_json
from longspec.target import fetch
from tests.answers.chat_server import Server
from tests.corpus import Corpus, write_raw
from tests.targets import SHAPES

ASKED = ["what does the fox meet?", "the cat", "who meets the green bird and the old cat, and the lazy dog, and the red fox?"]
ASKED += ["a bird", "why?"]


@dataclass(frozen=True)
class Case:
    """The manifests that answers are made from."""

    raw: Path
    target: Path
    tokenizer: Path

    @property
    def folder(self) -> Path:
        """The target's own."""
        return Path(read_json(self.target)["path"])

    def make(self, out: Path, part: tuple[int, int] = (0, 1), **settings: Any) -> dict[str, Any]:
        """The manifest of a shard's answers."""
        chosen = parse("chats", {"new_tokens": 12, "cut": "keep", **settings})
        return shard.make(self.raw, self.target, self.tokenizer, chosen, part, out / "shard.json")


def turns(*questions: str) -> dict[str, Any]:
    """A conversation whose answers are to be replaced."""
    messages = []
    for question in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "old"}]
    return {"messages": messages}


def write_chats(folder: Path, *more: dict[str, Any]) -> Path:
    """The raw manifest of twelve conversations to train on, and more, and two held out."""
    chats = [*map(turns, ASKED), *(turns(*pair) for pair in list(permutations(ASKED, 2))[::3]), *more]
    return write_raw(folder, chats, [turns("the old cat?"), turns(*ASKED)])


@pytest.fixture(autouse=True)
def no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else takes a shard's folder: no job waits to see."""
    monkeypatch.setattr(lease, "SETTLE", 0.0)


@pytest.fixture(scope="session")
def case(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Those conversations, and a target."""
    folder = tmp_path_factory.mktemp("answers")
    tokenizer = AutoTokenizer.from_pretrained(read_json(corpus.tokenizer)["path"])
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES | {"vocab_size": len(tokenizer)}))
    with torch.no_grad():
        for token in range(len(tokenizer)):
            text = tokenizer.decode([token])
            if not (text.isascii() and text.isprintable()):
                model.lm_head.weight[token] = 0  # it writes text
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 4  # it ends at once, later, or not
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    fetch.write_manifest(folder / "target_manifest.json", folder / "target", "test", files_below(folder / "target"))
    return Case(write_chats(folder / "chats"), folder / "target_manifest.json", corpus.tokenizer)


def with_template(case: Case, template: str, folder: Path, *, keep: bool = False) -> Case:
    """The case with another chat template, or with one before the tokenizer's own."""
    tokenizer = AutoTokenizer.from_pretrained(read_json(case.tokenizer)["path"])
    tokenizer.chat_template = template + (tokenizer.chat_template if keep else "")
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = folder / "tokenizer_manifest.json"
    fetch.write_manifest(manifest, folder / "tokenizer", "test", files_below(folder / "tokenizer"))
    return replace(case, tokenizer=manifest)


def journal_of(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The lines of a shard by their record."""
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()[1:]]
    assert len({tuple(line["record"]) for line in lines}) == len(lines)
    return {tuple(line["record"]): line for line in lines}


def ask(case: Case, out: Path, server: Server, **settings: Any) -> dict[str, Any]:
    """The manifest of a shard that this server answers."""
    return case.make(out, engine="endpoint", endpoint=server.address, **{"requests": 4, **settings})


def ask_alone(case: Case, folder: Path, server: Server, questions: Iterable[str], **settings: Any) -> dict[str, Any]:
    """The manifest of a shard of these questions, in `folder / "out"`, that this server answers."""
    raw = write_raw(folder / "chats", [turns(each) for each in questions])
    return ask(replace(case, raw=raw), folder / "out", server, **settings)
