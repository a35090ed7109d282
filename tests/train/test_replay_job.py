"""A stage that replays an earlier one's rows: the same stage from its own target and from stored states, killed or not."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import read_json
from longspec.config import compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.replay import TrainedRows
from longspec.distributed import Ranks
from longspec.train.arguments import read_job
from longspec.train.setup import open_rows
from tests.corpus import Corpus, questions
from tests.jobs import RECIPE, Job, finish
from tests.states.stored import Stored
from tests.train.test_held_out_estimate import make_packed
from tests.train.test_job import assert_same

ONE = Ranks(0, 0, 1)
STEPS = ["recipe.steps=12", "runtime.save_every=4", "recipe.draft.anchors=off"]
LATER = "recipe.stage=later"
REPLAY = "+recipe.data.replay={base: 0.4}"
OFFLINE = ["recipe.states.source=offline", "recipe.states.dtype=float32"]


@dataclass
class ReplayJob(Job):
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
    job = read_job(options(corpus, tmp_path), ONE)
    told = r"--replay: recipe\.data\.replay names base; give --replay base=PATH, the manifest\.json of its rows"
    with pytest.raises(ValueError, match=told):
        open_rows(job)
    by_name = read_job(options(corpus, tmp_path, f"+files.replay.base={earlier}"), ONE)
    frozen = [f"--{name}={tmp_path}/{name}.yaml" for name in ("recipe", "runtime")]
    files = [*frozen, "--target=t.json", f"--data={corpus.packed}", f"--out={tmp_path}"]
    by_file = read_job([*files, "--replay", f"base={earlier}"], ONE)
    assert by_name.replay == by_file.replay == {"base": earlier}
    rows = open_rows(by_file)
    assert list(rows.replayed) == ["base"]
    assert len(rows) == len(PackedRows(corpus.packed)) + len(PackedRows(earlier))
    other = read_job([*files, "--replay", f"base={earlier}", f"long={earlier}"], ONE)
    with pytest.raises(ValueError, match=re.escape(f"--replay: long={earlier}: recipe.data.replay does not name long")):
        open_rows(other)


def stored_states(folder: Path, job: Job, data: Path) -> Path:
    """The manifest of the states of some rows."""
    return Stored(folder, [*RECIPE, *job.overrides], job.target, data).manifest()


@pytest.mark.slow
def test_killed_and_from_stored_states_it_trains_the_same(
    corpus: Corpus, earlier: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and losses bit by bit; its metrics count what was replayed; another share is refused by its name."""
    monkeypatch.setattr("longspec.lease.SETTLE", 0)
    replay = ["--replay", f"base={earlier}"]
    whole = ReplayJob(tmp_path / "whole", target, corpus.packed, [LATER, REPLAY, *STEPS], more=replay)
    whole.run()
    killed = ReplayJob(tmp_path / "killed", target, corpus.packed, whole.overrides, more=replay)
    process = killed.start()
    killed.wait_for(6, process)
    process.kill()
    finish(process)
    other = ReplayJob(killed.out, target, corpus.packed, [LATER, "+recipe.data.replay={base: 0.2}", *STEPS], more=replay)
    assert "recipe.data.replay.base: 0.4 -> 0.2" in other.refusal()
    assert "starting at step" in killed.run()
    assert_same(whole, killed)
    assert [row["replayed_labels"] for row in killed.rows()] == (counted := counted_labels(corpus, earlier, whole))
    assert sum(each["base"] for each in counted) / sum(row["labels"] for row in killed.rows()) == pytest.approx(0.4, abs=0.05)
    offline = ReplayJob(tmp_path / "offline", target, corpus.packed, [*whole.overrides, *OFFLINE], more=replay)
    offline.more += ["--states", str(stored_states(tmp_path / "own", offline, corpus.packed))]
    offline.more += ["--replay-states", f"base={stored_states(tmp_path / 'earlier', offline, earlier)}"]
    assert "target weights" not in offline.run()
    assert_same(whole, offline)
    identity = read_json(offline.out / "checkpoint.json")["identity"]
    assert identity["replayed"] == {"base": PackedRows(earlier).data_hash}
    assert identity["replayed_states"]["base"]["declaration"] != identity["states"]["declaration"]


def counted_labels(corpus: Corpus, earlier: Path, job: Job) -> list[dict[str, Any]]:
    """Replayed labels of each step, counted in the rows themselves."""
    own, replayed = PackedRows(corpus.packed), PackedRows(earlier)
    recipe = compose("train", [*RECIPE, *job.overrides]).recipe
    schedule = TrainedRows(own, {"base": replayed}).schedule(recipe.data.replay, recipe.global_batch, recipe.seed)
    batches = [[int(row) - len(own) for row in schedule.batch(step)] for step in range(recipe.steps)]
    return [{"base": sum(int(replayed[row].loss_mask_S.sum()) for row in batch if row >= 0)} for batch in batches]
