"""Replayed rows beside a stage's own: each row is found where it lies, and what cannot be replayed is refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from longspec.atomic_files import read_json, write_json
from longspec.data.pack.arrow_shards import PackedRows, count_labels
from longspec.data.schedule import TrainedRows, open_alike
from tests.corpus import Corpus


def test_rows_are_numbered_through_and_counted_by_their_stages(corpus: Corpus) -> None:
    own, other = PackedRows(corpus.answers), PackedRows(corpus.packed)
    rows = TrainedRows(own, replayed={"long": own, "base": other})
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
    of_all = rows.labels_by_source(np.arange(len(rows)))
    assert of_all == {"replayed_labels": {"base": other.manifest["labels"], "long": own.manifest["labels"]}}


@pytest.mark.parametrize("mixed", [False, True])
def test_trained_tokens_come_in_the_shares_asked_for(corpus: Corpus, mixed: bool) -> None:
    """Rows of answers hold fewer labels than whole texts, and come the more often."""
    own, other = PackedRows(corpus.answers), PackedRows(corpus.packed)
    own.manifest["dataset"], other.manifest["dataset"] = "chats", "base"
    rows = TrainedRows(own, other) if mixed else TrainedRows(own, replayed={"base": other})
    schedule = rows.schedule([0.6, 0.4], 4, 7)
    seen = np.concatenate([schedule.batch(step) for step in range(3000)])
    [counted] = rows.labels_by_source(seen).values()
    assert counted["base"] / count_labels(rows.find, seen) == pytest.approx(0.4, abs=0.005)


def test_in_an_epoch_of_a_mix_one_data_set_is_cut_and_the_other_repeats(corpus: Corpus) -> None:
    """As many rows as both have together, in shares of the trained tokens."""
    large, small = PackedRows(corpus.packed), PackedRows(corpus.answers)
    large.manifest["dataset"], small.manifest["dataset"] = "large", "small"
    rows = TrainedRows(large, small)
    schedule = rows.schedule([0.2, 0.8], 2, 7)
    seen = np.concatenate([schedule.batch(step) for step in range(schedule.steps(1))])
    assert len(seen) == (len(large) + len(small)) // 2 * 2
    times = np.bincount(seen, minlength=len(rows))
    assert set(times[: len(large)]) == {0, 1}
    assert times[len(large) :].min() >= 1 < times[len(large) :].max()
    [counted] = rows.labels_by_source(seen).values()
    assert counted["large"] / sum(counted.values()) == pytest.approx(0.2, abs=0.02)


def test_rows_made_otherwise_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    own = PackedRows(corpus.answers)
    with pytest.raises(ValueError, match=re.escape(f"{corpus.packed}: collation: ")):
        open_alike([corpus.packed], own)
    for name in ("rows.arrow", "manifest.json"):
        (tmp_path / name).write_bytes((corpus.answers.parent / name).read_bytes())
    copy = tmp_path / "manifest.json"
    whole = read_json(copy)
    write_json(copy, whole | {"tokenizer": "u"})
    with pytest.raises(ValueError, match=re.escape(f"{copy}: tokenizer: ")):
        open_alike([copy], own)
    write_json(copy, whole | {"labels": 0})
    with pytest.raises(ValueError, match=r"no token of it is trained"):
        TrainedRows(own, *open_alike([copy], own)).schedule([0.5, 0.5], 1, 0)
