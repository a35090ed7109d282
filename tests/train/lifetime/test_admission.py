"""A stage's folder speaks against a job: checkpoints of other settings, a status of a failure that stays."""

import json
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspec.distributed import GPUS_GIVEN, Ranks, of_first_rank
from longspec.process_group import own_device
from longspec.train.preemption import SkippedSteps
from longspec.train.stage_folder import NonRetryableError, Status, find_resumable, non_retryable, non_retryable_reason
from tests.refusals import refused
from tests.train.checkpoint.test_save_load import write_slot

BEGAN = 1000.0


def test_another_identity_is_refused_until_the_stage_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert find_resumable(folder, {"recipe": {"lr": 1}}) is None
    write_slot(folder / "last", 20)
    assert find_resumable(folder, {"recipe": {"lr": 1}})[1]["step"] == 20
    with refused(folder, "step 20 of 100", "recipe.lr: 1 -> 2", f"rm -r {folder}"):
        find_resumable(folder, {"recipe": {"lr": 2}})
    write_slot(folder / "damaged", 100)
    (folder / "last").rename(folder / "last_2")
    (folder / "damaged").rename(folder / "last")
    assert find_resumable(folder, {"recipe": {"lr": 2}}) is None
    assert len(list(tmp_path.glob("checkpoints.*/last"))) == 1
    # An edit that is undone takes them back, also from under what was trained meanwhile, which is kept as well.
    write_slot(folder / "last", 30, {"recipe": {"lr": 2}})
    assert find_resumable(folder, {"recipe": {"lr": 1}})[1]["step"] == 100
    assert find_resumable(folder, {"recipe": {"lr": 2}})[1]["step"] == 30
    (folder / "last").rename(tmp_path / "gone")
    assert find_resumable(folder, {"recipe": {"lr": 1}})[1]["step"] == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "gone"]


@pytest.mark.parametrize(
    ("key", "of"),
    [("model.source", "target"), ("init", "init_weights"), ("method.vocabulary_from", "vocabulary"), ("precision", "dtype")],
)
def test_the_same_target_or_draft_from_another_place_is_no_other_setting(tmp_path: Path, key: str, of: str) -> None:
    made: dict[str, Any] = {"recipe": {"init": "hf:a/b", "precision": "auto", "model": {}, "method": {}}, of: "1f"}
    moved = json.loads(json.dumps(made))
    *section, name = key.split(".")
    (moved["recipe"][section[0]] if section else moved["recipe"])[name] = "elsewhere"
    write_slot(tmp_path / "last", 20, made)
    assert find_resumable(tmp_path, moved)[1]["step"] == 20
    for identity in (moved | {of: "2e"}, moved | {of: None}):
        with refused(tmp_path, f"recipe.{key}: "):
            find_resumable(tmp_path, identity)


def test_a_node_of_another_precision_leaves_the_checkpoints_to_the_next_one(tmp_path: Path) -> None:
    """One whose GPU is missing computes in float32; another try may find what this one lacks. Finished is finished."""
    made = {"recipe": {"lr": 1}, "dtype": "torch.bfloat16", "states": {"declaration": "1f"}, "replayed_states": {"a": "2"}}
    other = made | {"dtype": "torch.float32", "states": {"declaration": "2e"}, "replayed_states": {"a": "3"}}
    write_slot(tmp_path / "last", 20, made)
    with refused(tmp_path, "step 20 of 100", "dtype: torch.bfloat16 -> torch.float32") as told:
        find_resumable(tmp_path, other)
    assert not isinstance(told.value, NonRetryableError)
    assert "rm -r" not in str(told.value)
    with refused(tmp_path, "recipe.precision", "rm -r"):
        find_resumable(tmp_path, other | {"recipe": {"lr": 1, "precision": "fp32"}})
    write_slot(tmp_path / "done/last", 100, made)
    assert find_resumable(tmp_path / "done", other)[1]["step"] == 100


def test_a_job_that_was_given_gpus_does_not_train_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert own_device(Ranks(0, 0, 1)).type == "cpu"
    monkeypatch.setenv(GPUS_GIVEN, "gpu:8")
    with refused(socket.gethostname(), "(gpu:8)") as told:
        own_device(Ranks(0, 0, 1))
    assert not isinstance(told.value, NonRetryableError)


def test_what_rank_0_alone_finds_ends_the_other_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they wait for it: a rank that trains takes torchrun's SIGTERM for a request to stop."""
    sent: list[bytes] = []
    write_slot(tmp_path / "last", 20)
    for rank, broadcast in enumerate(
        [lambda held: sent.append(pickle.dumps(held)), lambda held: held.__setitem__(slice(None), pickle.loads(sent[0]))]
    ):
        monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
        with refused(tmp_path, "recipe.lr: 1 -> 2", kind=NonRetryableError):
            of_first_rank(lambda: find_resumable(tmp_path, {"recipe": {"lr": 2}}), Ranks(rank, rank, 2))


def test_a_fault_of_a_node_ends_a_stage_for_good_only_before_it_has_begun() -> None:
    for begun, kind in ((False, NonRetryableError), (True, ValueError)):
        with refused("disk full", kind=kind) as told, non_retryable(unless=begun):
            raise ValueError("disk full")
        assert type(told.value) is kind
        with refused("lr", kind=NonRetryableError), non_retryable(unless=begun):
            raise NonRetryableError("lr")


def test_steps_that_were_skipped_before_are_no_sick_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of a streak it is: an attempt may have saved within it. A last line may be torn."""
    monkeypatch.setattr(dist, "all_gather_object", lambda held, own: held.__setitem__(0, own))
    (tmp_path / "skipped.jsonl").write_text('{"step": 7, "rows": []}\n{"st')
    for first, kind in ((7, NonRetryableError), (9, ValueError)):
        skips = SkippedSteps(tmp_path / "skipped.jsonl", Ranks(0, 0, 1), 1)
        skips.check_step(first, [([0], torch.tensor(torch.nan))], skipped=True)
        with refused(f"step {first + 1}", "2 steps", kind=kind) as told:
            skips.check_step(first + 1, [([0], torch.tensor(torch.nan))], skipped=True)
        assert type(told.value) is kind


def test_a_failure_that_would_come_again_is_told_where_it_is_of_this_attempt(tmp_path: Path) -> None:
    status = Status(tmp_path, lambda: None)
    status.fail(NonRetryableError("wandb is not installed"))
    os.utime(tmp_path / "status.json", (BEGAN, BEGAN))
    assert (non_retryable_reason(tmp_path, BEGAN), non_retryable_reason(tmp_path, BEGAN + 1)) == ("wandb is not installed", "")
    status.fail(MemoryError("other processes held 70 GiB"))
    assert non_retryable_reason(tmp_path, 0) == ""
    (tmp_path / "status.json").write_text('{"state": "fai')
    assert non_retryable_reason(tmp_path, 0) == ""
