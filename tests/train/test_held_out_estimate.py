"""Acceptance on held-out text while training: the right figures, on any ranks, and not a bit of the weights changed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longspec import jsonl
from longspec.atomic_files import describe_files, read_json, write_json
from longspec.config import compose
from longspec.data import tokenize
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.methods.glide.trainer import Qwen2Glide
from tests.corpus import LENGTH, Corpus, questions, sentences, write_raw
from tests.jobs import RECIPE, finish, start, torchrun
from tests.train.checkpoint.test_elastic import name_of, overrides

STEPS, LAGS, ROWS = 4, 4, 3
# ZeRO stage, where the optimizer is, precision
FP32 = [(0, "none", "fp32"), (3, "none", "fp32")]
SETTINGS = [*FP32, (1, "cpu", "bf16")]


def make_packed(folder: Path, corpus: Corpus, collation: str, train: list[Any], held_out: list[Any]) -> Path:
    """Packed rows of records, others of which are held out; their manifest."""
    raw = write_raw(folder / "raw", train)
    jsonl.write(raw.parent / "held_out.jsonl", held_out)
    write_json(raw, read_json(raw) | {"files": describe_files(raw.parent, ["train.jsonl", "held_out.jsonl"])})
    tokenize.make(raw, corpus.tokenizer, 0, 1, folder / "tokens/000.json")
    packing.make([folder / "tokens/000.json"], LENGTH, collation, "split", folder / "packed/manifest.json")
    return folder / "packed/manifest.json"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Rows whose held-out records are shorter than a row, as long, and longer."""
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30, 2, 9)]
    return make_packed(tmp_path_factory.mktemp("held_out"), corpus, "base", sentences(200), held_out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target: Path, packed: Path) -> Path:
    """All settings on two ranks, with and without estimates; three rows, so that one rank has one too few."""
    folder = tmp_path_factory.mktemp("trained")
    cases = []
    for setting in SETTINGS:
        for every in (0, 2):
            asked = [f"runtime.held_out_every={every}", f"runtime.held_out_rows={ROWS}"]
            cases.append({"name": name_of(every, *setting), "overrides": [*overrides(*setting), *asked], "steps": STEPS})
    plan = {"target": read_json(target)["path"], "data": str(packed), "folder": str(folder), "cases": cases}
    (folder / "plan.json").write_text(json.dumps(plan))
    text, code = finish(start([*torchrun(2), "-m", "tests.train.checkpoint.resume_program", str(folder / "plan.json")], folder))
    assert code == 0, text[-5000:]
    return folder


@pytest.mark.parametrize("setting", SETTINGS)
def test_estimates_change_no_bit_of_the_weights(trained: Path, setting: tuple[int, str, str]) -> None:
    names = [name_of(every, *setting) for every in (0, 2)]
    without, with_them = (load_file(trained / f"{name}.safetensors") for name in names)
    assert without.keys() == with_them.keys()
    assert all(torch.equal(without[name], with_them[name]) for name in without)
    results = [json.loads((trained / f"{name}.json").read_text()) for name in names]
    assert results[0]["losses"] == results[1]["losses"]
    assert "held_out" not in results[0]
    assert list(results[1]["held_out"]) == ["2", "4"]


@pytest.mark.parametrize("setting", FP32)
def test_the_figures_are_those_of_single_forwards(
    trained: Path, packed: Path, target: Path, corpus: Corpus, setting: tuple[int, str, str]
) -> None:
    """One process, one lag at a time, over the tokens of the records themselves."""
    name = name_of(2, *setting)
    told = json.loads((trained / f"{name}.json").read_text())["held_out"]
    recipe = compose("train", RECIPE).recipe
    glide = Qwen2Glide.from_pretrained(read_json(target)["path"], dtype=torch.float32, draft=recipe.draft)
    weights = load_file(trained / f"{name}.safetensors")
    glide.draft_model.load_state_dict({name.removeprefix("draft_model."): value for name, value in weights.items()})
    tokenizer = load_tokenizer(corpus.tokenizer)[0]
    records = list(jsonl.read(packed.parents[1] / "raw/held_out.jsonl"))
    texts = [tokenize.encode(tokenizer, records[place])[0][:LENGTH].tolist() for place in (0, 2, 4)]
    shares, loss, labels = [], 0.0, sum(len(text) - 1 for text in texts)
    with torch.no_grad():
        for lag in range(1, LAGS + 1):
            agreed = 0.0
            for text in texts:
                ids = torch.tensor([text])
                output = glide(ids, ids, lag=lag)
                assert output.agreement is not None
                agreed += float(output.agreement) * (len(text) - 1)
                loss += float(output.loss) * (len(text) - 1) * (lag == 1)
            shares.append(agreed / labels)
    found = told["4"]
    assert [found[f"acceptance_{lag}"] for lag in range(1, LAGS + 1)] == pytest.approx(shares)
    assert found["loss"] == pytest.approx(loss / labels, rel=1e-5)
    a, b, c, d = shares
    assert found["expected_tokens"] == pytest.approx(1 + a + a * b + a * b * c + a * b * c * d)


def test_rows_are_laid_out_as_the_packed_ones(tmp_path: Path, corpus: Corpus) -> None:
    """Of answers-only rows the answers are labels; a record whose answer lies behind the row's end makes none."""
    far = {"problem": "the red fox " * 40, "qwq": "no"}
    near = {"problem": "count the fox", "qwq": "the fox meets the cat. "}
    manifest = make_packed(tmp_path, corpus, "longcot", questions(50), [far, near, near])
    rows = held_out_rows(PackedRows(manifest), 2)
    assert len(rows) == 2
    tokenizer = load_tokenizer(corpus.tokenizer)[0]
    ids_N, mask_N = tokenize.encode(tokenizer, near)
    for row in rows:
        assert row.input_ids_S[: len(ids_N)].tolist() == ids_N.tolist()
        assert row.loss_mask_S.nonzero()[0].tolist() == mask_N.nonzero()[0].tolist()


def test_records_that_were_made_again_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    """What is held out now may have been trained on."""
    manifest = make_packed(tmp_path, corpus, "base", sentences(50), [{"text": "the fox"}])
    raw = tmp_path / "raw/manifest.json"
    content = read_json(raw)
    write_json(raw, content | {"name": "another"})
    with pytest.raises(ValueError, match=r"raw/manifest\.json: is missing, or not what .*packed was made of"):
        held_out_rows(PackedRows(manifest), 1)
    write_json(raw, content)
    (tmp_path / "raw/held_out.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"held_out\.jsonl: 0 bytes, its manifest says"):
        held_out_rows(PackedRows(manifest), 1)
    empty = make_packed(tmp_path / "empty", corpus, "base", sentences(50), [])
    with pytest.raises(ValueError, match=r"held_out\.jsonl: no record of it makes a row; raise data\.raw\.held_out"):
        held_out_rows(PackedRows(empty), 1)
