"""A stage of several data sets that replays an earlier one's rows: from its target and from stored states, killed or not."""

import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspec.atomic_files import read_json
from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import ALONE
from longspec.train.arguments import freeze, read_job
from longspec.train.setup import declared_states, open_rows
from tests.corpus import Corpus, questions, sentences
from tests.jobs import PLAIN, RECIPE, Job, finish, kill_all, torchrun
from tests.refusals import refused
from tests.states.stored import Stored
from tests.train.test_held_out_estimate import make_packed
from tests.train.test_job import assert_same

STEPS = ["recipe.steps=12", "runtime.save_every=4", "recipe.draft.anchors=off"]
LATER = "recipe.stage=later"
REPLAY = "+recipe.data.replay={base: 0.4}"
MIX, SHARES = "recipe.data.name={books: 0.7, chats: 0.3}", [0.42, 0.18, 0.4]
OFFLINE = ["recipe.states.source=offline", "recipe.states.dtype=float32"]


@dataclass
class MixJob(Job):
    """A training job with further options."""

    more: list[str] = field(default_factory=list)

    def command(self) -> list[str]:
        return [*super().command(), *self.more]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Rows of another stage, packed like the corpus's."""
    return make_packed(tmp_path_factory.mktemp("earlier"), corpus, "base", questions(30), [])


def options(corpus: Corpus, out: Path, *more: str) -> list[str]:
    files = [f"files.data={corpus.packed}", f"files.out={out}", "files.target=t.json"]
    return ["-cp", "config", "-cn", "train", *RECIPE, LATER, REPLAY, *files, *more]


def test_the_rows_of_each_replayed_stage_are_given_and_no_others(corpus: Corpus, earlier: Path, tmp_path: Path) -> None:
    """By both doors; what a refusal advises works."""
    job = read_job(options(corpus, tmp_path), ALONE)
    with refused("--replay", "recipe.data.replay names base,", "is nothing;", "--replay STAGE=PATH", "manifest.json"):
        open_rows(job)
    by_name = read_job(options(corpus, tmp_path, f"+files.replay.base={earlier}"), ALONE)
    freeze(by_name)
    frozen = [f"--{name}={tmp_path}/{name}.yaml" for name in ("recipe", "runtime")]
    files = [*frozen, "--target=t.json", f"--data={corpus.packed}", f"--out={tmp_path}"]
    by_file = read_job([*files, "--replay", f"base={earlier}"], ALONE)
    assert by_name.replay == by_file.replay == {"base": earlier}
    rows = open_rows(by_file)
    assert list(rows.replayed) == ["base"]
    assert len(rows) == len(PackedRows(corpus.packed)) + len(PackedRows(earlier))
    other = read_job([*files, "--replay", f"base={earlier}", f"long={earlier}"], ALONE)
    with refused("--replay", "recipe.data.replay names base,", "is base, long;"):
        open_rows(other)
    mixed = options(corpus, tmp_path, MIX, f"files.data=[{earlier},{corpus.packed}]", f"+files.replay.base={earlier}")
    with refused("--data", "raw, tiny;", "recipe.data.name is books 70%, chats 30%", "manifest.json", "order: books, chats"):
        open_rows(read_job(mixed, ALONE))
    none = read_job([*mixed, *OFFLINE, "recipe.draft.anchors=off"], ALONE)
    with refused("--states: missing", "shard.json"):
        declared_states(none, TrainedRows(PackedRows(earlier), PackedRows(corpus.packed)), [], torch.float32, None)


@pytest.mark.slow
def test_from_stored_states_and_killed_it_trains_the_same(corpus: Corpus, earlier: Path, target: Path, tmp_path: Path) -> None:
    """Weights, losses and estimates bit by bit, on two ranks, of a mix with a replayed one on top; then what is refused."""
    held_out = [{"text": "the old cat meets the lazy dog. " * 3}]
    mix = [
        make_packed(tmp_path / "books", corpus, "base", questions(9), held_out, "books"),
        make_packed(tmp_path / "chats", corpus, "base", sentences(60), held_out, "chats"),
    ]
    overrides = [LATER, MIX, REPLAY, *STEPS, "runtime.held_out_every=6"]
    more = ["--data", *map(str, mix), "--replay", f"base={earlier}"]
    whole = MixJob(tmp_path / "whole", target, mix[0], overrides, torchrun(2), more=more)
    whole.run()
    killed = MixJob(tmp_path / "killed", target, mix[0], [*overrides, *OFFLINE], torchrun(2), more=more)
    stored = [Stored(tmp_path / f"states-{n}", [*RECIPE, *killed.overrides], target, path) for n, path in enumerate(mix)]
    shards = [each.build(held_out=held_out) for each in stored for held_out in (True, False)]
    shards.append(replace(stored[0], folder=tmp_path / "earlier", data=earlier).build())
    killed.more = [*more, "--states", *map(str, shards)]
    alone = replace(killed, launcher=PLAIN)  # one rank refuses what two do
    assert "holds other states than this job reads" in replace(alone, more=[*more, "--states", *map(str, shards[2:])]).refusal()
    part = next(shards[1].parent.glob("rows-*"))
    part.unlink()
    assert f"{part}: missing; have it made again after: rm -f {part} {shards[1]}" in alone.refusal()
    stored[0].build()
    process = killed.start()
    killed.wait_for(6, process)
    kill_all(process)
    finish(process)
    alone.overrides = [*overrides, *OFFLINE, "recipe.data.replay={base: 0.2}", "recipe.data.name={books: 0.6, chats: 0.4}"]
    told = alone.refusal()
    assert all(each in told for each in ("recipe.data.replay.base: 0.4 -> 0.2", "recipe.data.name.books: 0.7 -> 0.6"))
    assert re.search(r"starting at step [48]\b", log := killed.run())
    assert "target weights" not in log
    assert_same(whole, killed)
    assert [{name: row[name] for name in ("mixed_labels", "replayed_labels")} for row in killed.rows()] == (
        counted := counted_labels([*mix, earlier], whole)
    )
    labels = sum(row["labels"] for row in killed.rows())
    for of, name, share in (("mixed_labels", "books", 0.42), ("mixed_labels", "chats", 0.18), ("replayed_labels", "base", 0.4)):
        assert sum(each[of][name] for each in counted) / labels == pytest.approx(share, abs=0.05)
    for path in mix:
        raw = path.parents[1] / read_json(path)["dataset"]
        rows, lines = PackedRows(path), (raw / "train.jsonl").read_bytes()
        trained = {lines[at:].splitlines()[0] for row in range(len(rows)) for at in rows[row].records}
        assert trained.isdisjoint((raw / "held_out.jsonl").read_bytes().splitlines())
    estimates = [[row["held_out"]["loss"] for row in job.rows() if "held_out" in row] for job in (whole, killed)]
    assert len(estimates[0]) == 2
    assert estimates[0] == estimates[1]
    assert "states" not in read_json(whole.out / "checkpoint.json")["identity"]
    identity = read_json(killed.out / "checkpoint.json")["identity"]
    assert identity["data"] == {path.parents[1].name: PackedRows(path).data_hash for path in mix}
    assert identity["replayed"] == {"base": PackedRows(earlier).data_hash}
    declared = [identity["replayed_states"]["base"], *identity["states"].values()]
    assert len({each["declaration"] for each in declared}) == len(identity["states"]) + 1 == 3
    # Dates alone ask for it again, when its states are gone.
    for shard in shards:
        shutil.rmtree(shard.parent)
    (killed.out / "checkpoint.json").unlink()
    assert "is trained already, 12 steps" in killed.run()
    assert_same(whole, killed)


def counted_labels(sources: list[Path], job: Job) -> list[dict[str, Any]]:
    """Labels of each step by their sources, counted in the rows themselves."""
    rows = list(map(PackedRows, sources))
    recipe = compose("train", [*RECIPE, *job.overrides]).recipe
    schedule = TrainedRows(*rows[:2], replayed={"base": rows[2]}).schedule(SHARES, recipe.global_batch, recipe.seed)
    found, edges = [], np.cumsum([0, *map(len, rows)])
    for step in range(recipe.steps):
        counts = [0, 0, 0]
        for row in schedule.batch(step):
            source = int(np.searchsorted(edges, row, side="right")) - 1
            counts[source] += int(rows[source][row - edges[source]].loss_mask_S.sum())
        found.append(
            {"mixed_labels": dict(zip(("books", "chats"), counts, strict=False)), "replayed_labels": {"base": counts[2]}}
        )
    return found
