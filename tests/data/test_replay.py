"""Replayed rows beside a stage's own: each row is found where it lies, and what cannot be replayed is refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from longspec.atomic_files import read_json, write_json
from longspec.data.pack.arrow_shards import PackedRows, count_labels
from longspec.data.replay import TrainedRows, open_replayed
from tests.corpus import Corpus


def test_rows_are_numbered_through_and_counted_by_their_stages(corpus: Corpus) -> None:
    own, other = PackedRows(corpus.answers), PackedRows(corpus.packed)
    rows = TrainedRows(own, {"long": own, "base": other})
    parts = [own, other, own]  # by the names of the stages
    assert len(rows) == sum(map(len, parts))
    number = 0
    for part in parts:
        for place in range(len(part)):
            assert rows[number].input_ids_S.tolist() == part[place].input_ids_S.tolist()
            assert count_labels(rows.find, [number]) == part[place].loss_mask_S.sum()
            number += 1
    with pytest.raises(IndexError):
        rows[number]
    of_all = rows.labels_by_name(np.arange(len(rows)))
    assert of_all == {"base": other.manifest["labels"], "long": own.manifest["labels"]}


def test_trained_tokens_come_in_the_shares_asked_for(corpus: Corpus) -> None:
    """Rows of answers hold fewer labels than whole texts, and come the more often."""
    own = PackedRows(corpus.answers)
    rows = TrainedRows(own, {"base": PackedRows(corpus.packed)})
    schedule = rows.schedule({"base": 0.4}, 4, 7)
    seen = np.concatenate([schedule.batch(step) for step in range(3000)])
    counted = rows.labels_by_name(seen)["base"] / count_labels(rows.find, seen)
    assert counted == pytest.approx(0.4, abs=0.005)


def test_rows_made_otherwise_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    own = PackedRows(corpus.answers)
    with pytest.raises(ValueError, match=re.escape(f"{corpus.packed}: collation: ")):
        open_replayed({"base": corpus.packed}, own)
    for name in ("rows.arrow", "manifest.json"):
        (tmp_path / name).write_bytes((corpus.answers.parent / name).read_bytes())
    copy = tmp_path / "manifest.json"
    whole = read_json(copy)
    write_json(copy, whole | {"tokenizer": "u"})
    with pytest.raises(ValueError, match=re.escape(f"{copy}: tokenizer: ")):
        open_replayed({"base": copy}, own)
    write_json(copy, whole | {"labels": 0})
    with pytest.raises(ValueError, match=r"no token of it is trained"):
        TrainedRows(own, open_replayed({"base": copy}, own)).schedule({"base": 0.5}, 1, 0)
