"""`longspec try` on a small target with its tokenizer: both texts, what they say of each other, and what is refused."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspec.atomic_files import write_json, write_text
from longspec.chain_length import ChainAcceptance, TreeAcceptance, write_acceptance
from longspec.cli.side_by_side import asked_of, outcome
from longspec.decode import chain_costs
from longspec.decode.autoregressive import Plain
from longspec.decode.fallback import NoDraft
from longspec.decode.lookup import LookupDrafter
from longspec.decode.texts import Row
from longspec.methods.draft_files import find_target
from tests.cli import small_draft
from tests.corpus import Corpus
from tests.refusals import check

QUESTION = "Which number comes behind seven?"


@pytest.fixture
def draft(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random draft's folder beside its target, in whose parent the test runs."""
    monkeypatch.chdir(tmp_path)
    small_draft.save(Path("target"), tmp_path / "draft", corpus)
    return tmp_path / "draft"


def test_both_texts_are_transformers_own(draft: Path, longspec: Any) -> None:
    code, told = longspec("try", str(draft), QUESTION, "--new-tokens", "24")
    assert code == 0
    target = AutoModelForCausalLM.from_pretrained(draft.parent / "target")
    tokenizer = AutoTokenizer.from_pretrained(draft.parent / "target")
    asked = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    new = target.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :]
    text, printed = ("".join(re.findall(r"[A-Za-z0-9]", each)) for each in (tokenizer.decode(new), told))
    assert len(text) > 5
    assert printed.count(text) == 2
    assert re.search(r"plain [\d.]+ tokens/s, with the draft [\d.]+ tokens/s: [\d.]+ times", told)
    assert re.search(r"[\d.]+ tokens a round, \d+ of \d+ tokens drafted", told)
    assert "texts equal" in told


def test_a_draft_is_tried_from_any_folder(draft: Path, longspec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target's path is that of the folder in which it was made, which lies above it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert longspec("try", str(draft), QUESTION, "--new-tokens", "4")[0] == 0
    shutil.copytree(tmp_path / "target", "target")  # another clone's, which may be another model of the same shapes
    assert find_target(draft / "config.json", "target") == tmp_path / "target"
    (tmp_path / "target").rename(tmp_path / "moved")
    assert find_target(draft / "config.json", "target") == Path("target")


def test_the_draft_drafts_where_another_way_is_faster_and_that_is_said(
    draft: Path, longspec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_acceptance(draft, [ChainAcceptance(0.0, ((9, 10),)), TreeAcceptance(0.0, (), 15, 10, copied=3)])
    for fastest, told in ((NoDraft, "leave it out"), ((NoDraft, LookupDrafter), "take prompt lookup alone"), (object, "")):
        seconds = partial(lambda fastest, _, drafter, *__: 1.0 if isinstance(drafter, fastest) else 9.0, fastest)
        monkeypatch.setattr(chain_costs, "_round_seconds", seconds)
        chain_costs._known.clear()
        code, text = longspec("try", str(draft), QUESTION, "--new-tokens", "8")
        assert (code, "generate would" in text) == (0, bool(told))
        assert f"{told}, which is faster on this machine" in text or not told


def test_texts_that_differ_are_said_with_their_margin() -> None:

    def lines(margin: float) -> list[str]:
        logits_V = torch.tensor([1.0, 1.0 - margin])
        return outcome(Plain([0, 0], [logits_V, logits_V]), 1.0, Row([0, 1], [1]), 1.0)

    assert lines(1e-7)[-1] == "texts equal up to token 1, where two tokens tie within rounding (1.2e-07 apart)"
    assert lines(0.5)[-1].startswith("TEXTS DIFFER at token 1 by 0.5")
    assert lines(0.5)[1] == "2.00 tokens a round, 1 of 2 tokens drafted"


def test_without_a_question_a_held_out_record_is_asked(draft: Path) -> None:
    """Of the last stage's data: a question, or the beginning of a text. A later stage is not the draft's."""
    for record, text, is_question in (
        ({"problem": QUESTION, "qwq": "Eight."}, QUESTION, True),
        ({"text": "x" * 900}, "x" * 400, False),
    ):
        stages = {name: {"recipe": {"data": {"name": data}}} for name, data in (("first", "mine"), ("short", "other"))}
        write_text(draft / "training_config.yaml", str(stages))
        for name, held_out in (("mine", record), ("other", {"text": "of another stage"})):
            Path(f"data/raw/{name}").mkdir(parents=True, exist_ok=True)
            Path(f"data/raw/{name}/held_out.jsonl").write_text(json.dumps(held_out) + "\n")
        write_json(draft / "provenance.json", {"order": ["short", "first", "unpublished"]})
        assert asked_of(draft) == (text, is_question)
        (draft / "provenance.json").unlink()  # a stage's own draft has none
        assert asked_of(draft) == ("of another stage", False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], ("nowhere", "no config.json", "results/<run>/<variant>/final_draft")),
        (["draft"], ("draft", "held-out record", "(seen from", "in quotes")),
        (["draft", "x", "--target", "draft/custom_generate"], ("--target: draft/custom_generate", "no config.json")),
    ],
)
def test_what_cannot_be_tried_is_one_line(draft: Path, longspec: Any, arguments: list[str], told: tuple[str, ...]) -> None:
    code, text = longspec("try", *arguments)
    check(text, f"error: {told[0]}", *told[1:])
    assert (code, text.count("\n")) == (1, 1)


def test_a_target_that_has_gone_is_asked_for(draft: Path, longspec: Any) -> None:
    shutil.move("target", "moved")
    code, text = longspec("try", "draft", QUESTION)
    assert code == 1
    check(text, "error: draft", "target, target,", "--target FOLDER")
    assert longspec("try", "draft", QUESTION, "--target", "moved", "--new-tokens", "4")[0] == 0
