"""Packing against a plain reading of the token shards, token by token."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspec.atomic_files import describe_files, sha256_text, write_json
from longspec.config import COLLATIONS, OVERLONG
from longspec.data.pack import bin_packing, packing
from longspec.data.pack.arrow_shards import PackedRows, TokenWriter, count_labels
from tests.refusals import refused

EOS = 2


def write_shards(folder: Path, lengths: list[int], num_shards: int = 2) -> tuple[list[Path], dict[int, list[int]]]:
    """Token shards of documents whose tokens are all different; the manifests and the tokens of each record."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    ids = {n: list(range(sum(lengths[:n]) + 10, sum(lengths[: n + 1]) + 10)) for n in range(len(lengths))}
    paths = []
    for shard in range(num_shards):
        mine = [n for n in ids if n % num_shards == shard]
        arrow = folder / f"{shard:03}.arrow"
        with TokenWriter(arrow) as writer:
            for n in mine:
                mask = rng.integers(0, 2, len(ids[n]), dtype=np.uint8)
                writer.write([(np.array(ids[n], dtype=np.int32), mask)], [n])
        common = {"dataset": "d", "raw": "r", "tokenizer": "t", "template": "c", "eos": EOS, "num_shards": num_shards}
        common |= {"documents": len(mine), "tokens": sum(len(ids[n]) for n in mine), "skipped": {"count": 0, "allowed": 0.01}}
        common |= {"raw_records": {"train": len(lengths)}}
        manifest = {**common, "shard": shard, "files": describe_files(folder, [arrow.name])}
        paths.append(folder / f"{shard:03}.json")
        write_json(paths[-1], manifest)
    return paths, ids


LENGTHS = [1, 2, 3, 16, 17, 18, 31, 33, 5, 7, 9, 40, 2, 2, 11, 64, 15, 1, 14]


def packed(tmp_path: Path, collation: str, overlong: str, length: int = 16) -> tuple[PackedRows, dict[int, list[int]]]:
    tokens, ids = write_shards(tmp_path / "tokens", LENGTHS)
    out = tmp_path / "packed" / "manifest.json"
    packing.make(tokens, length, collation, overlong, out)
    return PackedRows(out), ids


def read_answers(folder: Path) -> dict[int, int]:
    """Answer mask of every token (they are all different), read with pyarrow alone."""
    import pyarrow as pa

    answers: dict[int, int] = {}
    for path in folder.glob("*.arrow"):
        table = pa.ipc.open_file(str(path)).read_all().to_pydict()
        for ids, mask in zip(table["input_ids"], table["answer_mask"], strict=True):
            answers.update(zip(ids, mask, strict=True))
    return answers


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], int, str]:
    """Lengths of documents, a row's length and what becomes of longer documents."""
    size = draw(st.integers(2, 200))
    lengths = draw(st.lists(st.integers(1, 4 * size), min_size=1, max_size=120))
    return lengths, size, draw(st.sampled_from(OVERLONG))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpus=corpora(), collation=st.sampled_from(list(COLLATIONS)))
def test_rows_hold_for_any_corpus(tmp_path: Path, corpus: tuple[list[int], int, str], collation: str) -> None:
    """The written rows against the documents, token by token: values, masks, positions, boundaries, padding, what is cut."""
    lengths, size, overlong = corpus
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    tokens, ids = write_shards(folder / "tokens", lengths)
    answers = read_answers(folder / "tokens")
    out = folder / "packed" / "manifest.json"
    if max(lengths) < 2:
        with refused(f"{tokens[0]}: no document", "2 tokens"):
            packing.make(tokens, size, collation, overlong, out)
        return
    packing.make(tokens, size, collation, overlong, out)
    rows, seen, kept = PackedRows(out), [], [list[int]() for _ in lengths]
    for number in range(len(rows)):
        row = rows[number]
        assert len(row.records) == row.document_ids_S.max() + 1
        for place, record in enumerate(row.records):
            inside = row.document_ids_S == place
            part, mask = row.input_ids_S[inside].tolist(), row.loss_mask_S[inside].tolist()
            start = ids[record].index(part[0])
            assert part == ids[record][start : start + len(part)]
            assert row.position_ids_S[inside].tolist() == list(range(len(part)))
            trained = [answers[token] if COLLATIONS[collation] else 1 for token in part]
            assert mask == [0, *trained[1:]]
            seen += part
            kept[record].append(len(part))
        padding = row.document_ids_S == -1
        assert (row.input_ids_S[padding] == EOS).all()
        assert not row.loss_mask_S[padding].any()
        assert not padding[: len(row.input_ids_S) - padding.sum()].any()
        assert count_labels(rows.find, [number]) == row.loss_mask_S.sum()
    for length, parts in zip(lengths, kept, strict=True):
        whole = min(length, size) if overlong == "truncate" else length - (length % size == 1)
        assert sum(parts) == (whole if whole >= bin_packing.SHORTEST else 0)
        assert length > size or len(parts) <= 1, "what fits a row is never cut"
        assert all(each >= bin_packing.SHORTEST for each in parts)
    assert len(seen) == len(set(seen)) == rows.manifest["tokens"] == sum(lengths) - rows.manifest["cut_tokens"]
    assert rows.manifest["padding_share"] == pytest.approx(1 - len(seen) / (len(rows) * size))
    assert rows.manifest["labels"] == count_labels(rows.find, range(len(rows)))
    empty = sum(not count_labels(rows.find, [number]) for number in range(len(rows)))
    assert rows.manifest.get("rows_without_labels", 0) == empty
    warning = packing.without_labels_warning(rows.manifest)
    assert bool(warning) == (empty > len(rows) / 10) == (f"{empty:,} of {len(rows):,} rows" in warning)


def test_filling_up_takes_what_is_cut_anyway() -> None:
    """Rows of 6 of 10 tokens, and long documents whose rests would stand in rows of their own."""
    pieces, edges_R1 = bin_packing.place(np.array([60] * 20 + [155] * 40), 100, "split")
    assert 1 - pieces.length_P.sum() / (100 * (len(edges_R1) - 1)) < 0.02
    assert all((pieces.document_P == document).sum() == 1 for document in range(20))
    best = bin_packing.best_fit(bin_packing.cut(np.array([60] * 20 + [155] * 40), 100, "split").length_P, 100)
    assert best.max() + 1 == 20 + 40 + 40


def test_golden_rows(tmp_path: Path) -> None:
    """A change of the packing changes every model trained on it, so it is made knowingly."""
    rows, _ = packed(tmp_path, "base", "split")
    content = [
        (row.input_ids_S.tolist(), row.document_ids_S.tolist(), row.records) for row in map(rows.__getitem__, range(len(rows)))
    ]
    assert sha256_text(json.dumps(content)) == GOLDEN


GOLDEN = "17d98cf2439533625f1fb96436d5b5e4a850899a1583dbd1beafbcce25f837e2"


def test_shards_of_different_origin_are_refused(tmp_path: Path) -> None:
    tokens, _ = write_shards(tmp_path / "tokens", LENGTHS)
    with refused("--length:", "2 or more, is 1"):
        packing.make(tokens, 1, "base", "split", tmp_path / "out" / "manifest.json")
    with refused("--tokens: shards [0] of 2"):
        packing.make(tokens[:1], 16, "base", "split", tmp_path / "out" / "manifest.json")
    other, _ = write_shards(tmp_path / "other", LENGTHS, num_shards=1)
    with refused(f"{other[0]}: its num_shards", tokens[0]):
        packing.make([tokens[0], other[0]], 16, "base", "split", tmp_path / "out" / "manifest.json")
    assert not (tmp_path / "out").exists()


def flip(path: Path) -> None:
    """Another value in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_changed_rows_and_shards_are_refused(tmp_path: Path) -> None:
    """A flipped bit leaves a file's size; it would train, or pack, another token."""
    rows, _ = packed(tmp_path, "base", "split")
    flip(rows.path)
    with refused(f"{rows.path}: its SHA-256"):
        PackedRows(rows.path.parent / "manifest.json")
    tokens, _ = write_shards(tmp_path / "changed", LENGTHS)
    flip(changed := tokens[1].with_suffix(".arrow"))
    with refused(f"{changed}: its SHA-256"):
        packing.make(tokens, 16, "base", "split", tmp_path / "out" / "manifest.json")
