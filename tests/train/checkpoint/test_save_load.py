"""Slots survive a crash at any moment of their rotation, and any damage is seen; shards are read by any reader."""

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longspec.atomic_files import describe_files
from longspec.distributed import ALONE
from longspec.jsonl import whole_lines
from longspec.train.checkpoint import checkpoint_dir, save_load, zero_state
from longspec.train.metrics import Metrics
from tests.refusals import refused


def write_slot(slot: Path, step: int, identity: Any = None, *, damaged: bool = False) -> None:
    slot.mkdir(parents=True)
    (slot / "weights.pt").write_text(f"weights of step {step}")
    identity = identity or {"recipe": {"lr": 1}}
    content = {"step": step, "steps": 100, "identity": identity, "files": describe_files(slot, ["weights.pt"])}
    (slot / checkpoint_dir.MANIFEST).write_text(json.dumps(checkpoint_dir.seal(content)))
    if damaged:
        (slot / "weights.pt").write_text("x")


@pytest.mark.parametrize("crash_at", range(1, 5))
@pytest.mark.parametrize("newest_damaged", [False, True])
def test_a_whole_slot_is_left_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int, newest_damaged: bool
) -> None:
    write_slot(tmp_path / "last_2", 10)
    write_slot(tmp_path / "last", 20, damaged=newest_damaged)
    best = 10 if newest_damaged else 20
    assert checkpoint_dir.find_slot(tmp_path)[1]["step"] == best  # as a resuming job does
    write_slot(tmp_path / ".saving-30", 30)
    rename, calls = Path.rename, []

    def crashing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == crash_at:
            raise InterruptedError
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crashing)
        try:
            checkpoint_dir.rotate(tmp_path, tmp_path / ".saving-30")
        except InterruptedError:
            pass
        else:
            best = 30
    assert checkpoint_dir.find_slot(tmp_path)[1]["step"] == best
    checkpoint_dir.remove_unfinished(tmp_path)
    assert not list(tmp_path.glob(".saving*"))


@pytest.mark.parametrize("name", ["weights.pt", checkpoint_dir.MANIFEST])
def test_any_changed_byte_of_a_slot_is_seen(tmp_path: Path, name: str) -> None:
    write_slot(tmp_path / "last", 20)
    path = tmp_path / "last" / name
    whole = path.read_bytes()
    for index in range(len(whole)):
        for damaged in (whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :], whole[:index]):
            path.write_bytes(damaged)
            with refused(path):
                checkpoint_dir.read_slot(tmp_path / "last")
    path.write_bytes(whole)
    assert checkpoint_dir.read_slot(tmp_path / "last")["step"] == 20
    path.unlink()
    with refused(path):
        checkpoint_dir.read_slot(tmp_path / "last")


def test_a_slot_on_a_lost_part_of_a_disk_gives_way_to_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, step in (("last_2", 10), ("last", 20)):
        write_slot(tmp_path / name, step)
    read, fault = checkpoint_dir.read_slot, list[int]()

    def lost(slot: Path) -> dict[str, Any]:
        if slot.name == "last":
            raise OSError(fault[-1], os.strerror(fault[-1]), str(slot / "weights.pt"))
        return read(slot)

    monkeypatch.setattr(checkpoint_dir, "read_slot", lost)
    fault.append(errno.ESTALE)  # which may pass, so that nothing is given up
    with pytest.raises(OSError, match=r"weights\.pt"):
        checkpoint_dir.find_slot(tmp_path)
    fault.append(errno.EIO)
    assert checkpoint_dir.find_slot(tmp_path)[1]["step"] == 10
    assert (tmp_path / "damaged_last/weights.pt").read_text() == "weights of step 20"


def write_shards(folder: Path, cuts: list[int]) -> dict[str, torch.Tensor]:
    """Two parameters, each cut at these elements over as many ranks."""
    whole = {"a": torch.randn(3, 4), "b": torch.randn(12)}
    for rank, (start, end) in enumerate(zip([0, *cuts], [*cuts, 12], strict=True)):
        tensors = {save_load.shard_key("fp32", name, start): tensor.flatten()[start:end] for name, tensor in whole.items()}
        sizes = {key: tensor.numel() for key, tensor in tensors.items()}
        begin = save_load.header(sizes)
        entry = save_load.write_shard(folder / save_load.shard_name(rank), begin, tensors.values())
        assert {save_load.shard_name(rank): entry} == describe_files(folder, [save_load.shard_name(rank)])
    return whole


def test_shards_are_safetensors_and_come_back_whole_or_what_is_missing_is_named(tmp_path: Path) -> None:
    whole = write_shards(tmp_path, [5, 7])
    names = sorted(path.name for path in tmp_path.iterdir())
    read = [load_file(tmp_path / save_load.shard_name(rank)) for rank in range(3)]
    assert torch.equal(torch.cat([read[0]["fp32|b|0"], read[1]["fp32|b|5"], read[2]["fp32|b|7"]]), whole["b"])
    reader = save_load.Shards(tmp_path, names)
    for start in range(12):
        for end in range(start + 1, 13):
            part = torch.zeros(end - start)
            reader.fill(part, "fp32", "b", start)
            assert torch.equal(part, whole["b"][start:end])
    with refused(f"{tmp_path}: fp32 of a: elements 5 to 12"):
        save_load.Shards(tmp_path, [names[0], names[2]]).fill(torch.zeros(12), "fp32", "a", 0)


@pytest.mark.parametrize("damaged", [b'{"step": 1\xff}', b'{"step" 1}'])
def test_a_damaged_line_of_metrics_is_named_and_may_be_removed(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(damaged + b'\n{"step": 2}\n{"st')
    with refused(f"{path}: line 1", "damaged", "remove"):
        Metrics(path, 5)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    assert whole_lines(Metrics(path, 5).path) == [{"step": 2}]
    path.write_bytes(b'{"step": 1}\n' + b"\0" * 40 + b'\n{"step": 3}\n')  # a page that did not reach the disk
    assert whole_lines(Metrics(path, 1).path) == [{"step": 1}]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.append({"step": 1, "loss": math.nan, "held_out": {"loss": math.inf, "acceptance_1": 0.5}})
    metrics.sync()
    metrics.publish(tmp_path / "final.jsonl")
    assert whole_lines(tmp_path / "final.jsonl") == [{"step": 1, "loss": None, "held_out": {"loss": None, "acceptance_1": 0.5}}]


def test_checkpoints_without_room_end_a_stage_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots and the one that is made beside them; fewer where fewer are to come or some are there."""
    monkeypatch.setattr(zero_state, "owned", lambda _: [SimpleNamespace(name="w", start=0, numel=1000)])
    monkeypatch.setattr(save_load, "_together", lambda work, _: [work()])
    folder, free = tmp_path / "checkpoints", 10**9
    monkeypatch.setattr(save_load.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    size = save_load.check_room(None, folder, 9, ALONE)
    assert 12_000 < size < 13_000
    for saves, slots, times in ((9, 0, 3), (1, 0, 1), (9, 2, 1)):
        for name in checkpoint_dir.SLOTS[:slots]:
            (folder / name).mkdir(parents=True)
        free = times * size + save_load.RESERVE
        save_load.check_room(None, folder, saves, ALONE)
        free -= 1
        with refused(folder, f"{size} bytes", f" {free} are"):
            save_load.check_room(None, folder, saves, ALONE)
