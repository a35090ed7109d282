"""Held-out rows that acceptance is estimated on while a stage trains; test_elastic.py has the estimates themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspec.atomic_files import read_json, write_json
from longspec.config import compose
from longspec.data import tokenize
from longspec.data.chat.encoding import Encoder, load_tokenizer
from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.distributed import ALONE
from longspec.methods.contract import DraftOutput
from longspec.models.losses import NO_LABEL
from longspec.train.held_out_estimate import HeldOut
from tests.corpus import LENGTH, Corpus, questions, sentences, write_raw
from tests.refusals import refused


def make_packed(folder: Path, corpus: Corpus, collation: str, train: list[Any], held_out: list[Any], name: str = "raw") -> Path:
    """Packed rows of a data set's records, others of which are held out; their manifest."""
    tokenize.make(write_raw(folder / name, train, held_out), corpus.tokenizer, 0, 1, folder / "tokens/000.json")
    packing.make([folder / "tokens/000.json"], LENGTH, collation, "split", folder / "packed/manifest.json")
    return folder / "packed/manifest.json"


def test_rows_are_laid_out_as_the_packed_ones(tmp_path: Path, corpus: Corpus) -> None:
    """Of answers-only rows the answers are labels; a record whose answer lies behind the row's end makes none."""
    far = {"problem": "the red fox " * 40, "qwq": "no"}
    near = {"problem": "count the fox", "qwq": "the fox meets the cat. "}
    manifest = make_packed(tmp_path, corpus, "longcot", questions(50), [far, near, near])
    rows = held_out_rows(PackedRows(manifest), 2)
    assert len(rows) == 2
    [made] = Encoder(load_tokenizer(corpus.tokenizer)[0]).documents(near)
    for row in rows:
        assert row.input_ids_S[: len(made.ids)].tolist() == made.ids.tolist()
        assert row.loss_mask_S.nonzero()[0].tolist() == made.answer_mask.nonzero()[0].tolist()


def test_records_that_were_made_again_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    """What is held out now may have been trained on."""
    manifest = make_packed(tmp_path, corpus, "base", sentences(50), [{"text": "the fox"}])
    raw = tmp_path / "raw/manifest.json"
    content = read_json(raw)
    write_json(raw, content | {"name": "another"})
    with refused(raw, manifest.parent):
        held_out_rows(PackedRows(manifest), 1)
    write_json(raw, content)
    (tmp_path / "raw/held_out.jsonl").write_text("")
    with refused(f"{tmp_path}/raw/held_out.jsonl: 0 bytes"):
        held_out_rows(PackedRows(manifest), 1)
    empty = make_packed(tmp_path / "empty", corpus, "base", sentences(50), [])
    with refused(f"{tmp_path}/empty/raw/held_out.jsonl", "data.raw.held_out"):
        held_out_rows(PackedRows(empty), 1)


class Right:
    """Stands for an engine whose draft is right wherever its chain still stands in a row's labels, at a loss of 2."""

    device, training = torch.device("cpu"), False

    def __call__(self, labels: torch.Tensor, **_: Any) -> DraftOutput:
        reached_K = ((labels != NO_LABEL).sum() - torch.arange(6.0)).clamp_min(0)
        right_K = (reached_K > 0).float()
        return DraftOutput(2 * right_K, None, right_K, {}, reached_K, reached_K)

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...


class Unreached(Right):
    """Its step reaches no label, as of an answer of one token."""

    def __call__(self, labels: torch.Tensor, **_: Any) -> DraftOutput:
        return DraftOutput(*[torch.zeros(6), None, torch.zeros(6), {}, torch.zeros(6), torch.zeros(6)])


def test_a_row_counts_in_steps_that_reach_its_labels(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is always right has shares of one, however short the rows' answers are."""
    monkeypatch.setattr(dist, "all_reduce", lambda sums: None)
    answers = [{"problem": "count", "qwq": answer} for answer in ("fox", "the fox meets the cat. ")]
    rows = PackedRows(make_packed(tmp_path, corpus, "longcot", questions(50), answers))
    config = compose("train", ["run=demo-eagle3", "recipe.draft.steps=6", "runtime.held_out_every=1"])
    held_out = HeldOut([rows], config.recipe, config.runtime, ALONE, 10)
    assert min(row.loss_mask_S.sum() for row in held_out.rows) < 6
    found = held_out.estimate(Right(), 1) or {}
    assert [found[f"acceptance_{step}"] for step in range(1, 7)] == 6 * [1]
    assert (found["expected_tokens"], found["loss"]) == (7, 2)
    found = held_out.estimate(Unreached(), 2) or {}
    assert (found.keys(), found["expected_tokens"]) == ({"expected_tokens", "seconds"}, 1)
