"""The schedule: an epoch is a permutation, replayed sources keep their shares, and a step needs none before it."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from omegaconf import OmegaConf

from longspec.atomic_files import read_json, write_json
from longspec.data.pack.arrow_shards import PackedRows, count_labels
from longspec.data.schedule import Schedule, TrainedRows, open_alike
from longspec.distributed import Ranks, share_global_batch
from longspec.methods.glide.settings import Draft, Method
from longspec.train.micro_batches import StepBatches
from tests.corpus import Corpus
from tests.refusals import refused

DRAFT = OmegaConf.structured(Draft(anchors="off", lag_mode="fixed"))
SOURCES = st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 1)), min_size=1, max_size=4)


def global_batch(num_rows: int, size: int, seed: int, step: int) -> NDArray[np.int64]:
    """The rows of a step of a stage that replays none."""
    return Schedule([num_rows], [1.0], size, seed).batch(step)


@given(
    num_rows=st.integers(24, 400),
    world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    micro=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    step=st.integers(0, 10**6),
)
def test_ranks_share_the_same_global_batch(num_rows: int, world: int, micro: int, seed: int, step: int) -> None:
    """However many processes there are and however many rows each takes at once: together the same rows, none twice."""
    recipe = SimpleNamespace(
        global_batch=24, seed=seed, method=Method(), draft=DRAFT, data=SimpleNamespace(name="a", replay={})
    )
    largest, accumulation = share_global_batch(24, micro, world)
    shares = []
    for rank in range(world):
        rows: Any = SimpleNamespace(schedule=lambda _, size, seed: Schedule([num_rows], [1.0], size, seed))
        taken = StepBatches(rows, recipe, largest, Ranks(rank, rank, world), 1).micro_batches(step)
        assert [len(rows) for rows in taken] == [largest] * accumulation
        shares += [row for rows in taken for row in rows.tolist()]
    assert sorted(shares) == sorted(global_batch(num_rows, 24, seed, step).tolist())


@given(
    sources=SOURCES, own=st.integers(1, 4), size=st.integers(1, 20), seed=st.integers(0, 2**63 - 1), first=st.integers(0, 10**6)
)
def test_every_source_keeps_to_its_chance_and_is_used_up_before_it_repeats(
    sources: list[tuple[int, float]], own: int, size: int, seed: int, first: int
) -> None:
    """Counted row by row over stretches of steps; the rows of each source against plain shuffles, one after another."""
    num_rows = [size + sources[0][0], *(rows for rows, _ in sources[1:])]
    weights = [weight for _, weight in sources]
    wanted = [weight / sum(weights) for weight in weights]
    own = min(own, len(sources))
    schedule, edges = Schedule(num_rows, wanted, size, seed, own), np.cumsum([0, *num_rows])
    for step in (0, first):
        taken = [schedule.taken(step * size), schedule.taken((step + 1) * size)]
        rows = schedule.batch(step)
        assert len(rows) == size
        found = Counter(np.searchsorted(edges, rows, side="right") - 1)
        assert [found[source] for source in range(len(num_rows))] == [b - a for a, b in zip(*taken, strict=True)]
        for counts, total in zip(taken, (step * size, (step + 1) * size), strict=True):
            assert sum(counts) == total
            assert all(abs(count - chance * total) <= 2 for count, chance in zip(counts, wanted, strict=True))
    in_order = np.concatenate([schedule.batch(step) for step in range(20)])
    for source, rows in enumerate(num_rows):
        found_rows = in_order[(in_order >= edges[source]) & (in_order < edges[source + 1])] - edges[source]
        whole = rows if source or own > 1 else rows // size * size
        plain: list[int] = []
        while len(plain) < len(found_rows):
            entropy = [seed, len(plain) // whole, source][: 3 if source else 2]
            words = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(rows).tolist()
            plain += sorted(range(rows), key=words.__getitem__)[:whole]
        assert found_rows.tolist() == plain[: len(found_rows)]
    other = Schedule(num_rows, wanted, size, seed, own)
    assert other.batch(first).tolist() == schedule.batch(first).tolist()


@given(
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    size=st.integers(1, 16),
    epochs=st.integers(1, 5),
    share=st.floats(0, 0.99),
)
def test_an_epoch_has_as_many_own_rows_as_there_are(rows: list[int], size: int, epochs: int, share: float) -> None:
    """Of one data set or several, in whatever shares, with replayed rows on top or none."""
    rows[0], own = rows[0] + size, len(rows)
    parts = [(1 - share) / sum(range(1, own + 1)) * place for place in range(1, own + 1)]
    replayed = [(50, share)] if share else []
    num_rows, wanted = [*rows, *(n for n, _ in replayed)], [*parts, *(part for _, part in replayed)]
    schedule = Schedule(num_rows, wanted, size, 3, own)
    whole, steps = sum(rows) // size * size * epochs, schedule.steps(epochs)
    assert sum(schedule.taken(steps * size)[:own]) <= whole < sum(schedule.taken((steps + 1) * size)[:own])


def test_the_rows_are_pinned() -> None:
    """A resumed run must meet the rows of the run it continues, also after an upgrade of numpy."""
    schedule = Schedule([10, 6, 3], [0.5, 0.3, 0.2], 5, 42)
    assert [schedule.batch(step).tolist() for step in (0, 1, 7)] == PINNED
    assert global_batch(10, 10, 42, 0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


PINNED = [[4, 8, 1, 15, 18], [9, 3, 14, 12, 17], [4, 7, 12, 14, 18]]


def test_own_rows_that_fill_no_batch_are_refused() -> None:
    with refused("recipe.global_batch: 8 rows", "5 packed rows"):
        Schedule([5, 100], [0.5, 0.5], 8, 0)


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
    with refused(f"{corpus.packed}: collation:"):
        open_alike([corpus.packed], own)
    for name in ("rows.arrow", "manifest.json"):
        (tmp_path / name).write_bytes((corpus.answers.parent / name).read_bytes())
    copy = tmp_path / "manifest.json"
    whole = read_json(copy)
    write_json(copy, whole | {"tokenizer": "u"})
    with refused(f"{copy}: tokenizer:"):
        open_alike([copy], own)
    write_json(copy, whole | {"labels": 0})
    [empty] = open_alike([copy], own)
    for sources in ((own, empty), (empty,)):
        with refused(f"{tmp_path / 'rows.arrow'}: no token", "recipe.data.replay"):
            TrainedRows(*sources).schedule([0.5, 0.5], 1, 0)
