"""Trackers: their files read back after kills and resumes, no network offline, failures that cost no training."""

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from longspec.config import Runtime
from longspec.distributed import ALONE
from longspec.train import trackers as services
from longspec.train.trackers import Trackers, chosen, scalars
from tests.jobs import MakeJob, finish
from tests.refusals import refused

Curves = dict[str, list[tuple[int, float]]]


def tensorboard_curves(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy for everything that would leave this machine: its address, and what was asked of it."""
    asked: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            asked.append(connection.recv(200))
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
    server.close()


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_one_curve_and_stays_offline(
    tmp_path: Path, make_job: MakeJob, listener: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind a checkpoint, then stopped by Ctrl-C, which SwanLab takes for itself; no key and no network."""
    proxy, asked = listener
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SWANLAB_"))]:
        monkeypatch.delenv(name)
    proxies = dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"], proxy)
    for name, value in (proxies | {"HOME": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}).items():
        monkeypatch.setenv(name, value)
    job = make_job("job", ["runtime.report_to=[tensorboard,wandb,swanlab]", "runtime.tracker_mode=offline", "recipe.steps=400"])
    for steps, number in ((6, signal.SIGKILL), (12, signal.SIGINT)):
        process = job.start()
        job.wait_for(steps, process)
        process.send_signal(number)
        log, _ = finish(process)
    assert re.search(r"starting at step [1-9]\d*\b", log)
    assert "WARNING" not in log, "a tracker has failed"
    assert job.status()["reason"] == "signal SIGINT"
    assert asked == []
    folder, rows = job.out / "trackers", [scalars(row) for row in job.written()]
    curves = tensorboard_curves(only(folder / "tensorboard", "*"))
    assert {"train/loss", "train/lr"} < curves.keys() == rows[0].keys()
    for name, found in curves.items():
        assert [step for step, _ in found] == list(range(1, job.status()["step"] + 1))
        assert [value for _, value in found] == pytest.approx([row[name] for row in rows])
    for kept in ("wandb/offline-run-*/*.wandb", "swanlab/run-*/*.swanlab"):  # one folder, which was sent all steps
        assert only(folder, kept).stat().st_size


class Standin:
    """A service that lists what it was sent."""

    def __init__(self, run: dict[str, Any], step: int, known: int = 0, fails: tuple[int, ...] = ()) -> None:
        self.run, self.step, self.known, self.fails = run, step, known, fails
        self.sent: list[int] = []
        self.finished: list[bool] = []

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if step in self.fails:
            raise ConnectionError("no route to host")
        self.sent.append(step)

    def finish(self, *, failed: bool) -> None:
        self.finished.append(failed)


def runtime_of(**settings: Any) -> Any:
    return OmegaConf.structured(Runtime(**settings))


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": float(step)} for step in range(first, last + 1)]


def use(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    monkeypatch.setitem(services.TRACKERS, "tensorboard", lambda run, folder, step: Standin(run, step, **arguments))


def test_a_tracker_gets_what_it_lacks_and_nothing_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its server stopped listening at 3 while the job went on to 7, and holds 6 steps of an attempt that was killed."""
    for known in (3, 6):
        use(monkeypatch, known=known)
        with Trackers(runtime_of(report_to=["tensorboard"]), tmp_path, ALONE, {}, {"tensorboard": "id1"}, rows(1, 4)) as all_of:
            tracker: Any = all_of.trackers["tensorboard"]
            for row in rows(5, 8):
                all_of.log(row)
        assert tracker.sent == list(range(known + 1, 9))
        assert (tracker.run["id"], tracker.step, tracker.finished) == ("id1", 4, [False])


def test_a_failing_tracker_costs_its_numbers_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, fails=(2, 3))
    all_of = Trackers(runtime_of(report_to=["tensorboard"]), tmp_path, ALONE, {})
    tracker: Any = all_of.trackers["tensorboard"]

    def train() -> None:
        with all_of:
            for row in rows(1, 5):
                all_of.log(row)
            raise KeyError("the training itself fails")

    with pytest.raises(KeyError):
        train()
    assert (tracker.sent, tracker.finished) == ([1, 4, 5], [True])
    assert capsys.readouterr().out.count("ConnectionError: no route to host") == 1  # the first


def test_a_service_that_is_down_ends_the_first_start_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of days goes on without it, and knows the run's name the next time."""

    def down(*_: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(services.TRACKERS, "tensorboard", down)
    with refused("runtime.report_to: tensorboard", "ConnectionError", "runtime.tracker_mode: offline") as told:
        Trackers(runtime_of(report_to=["tensorboard"]), tmp_path, ALONE, {})
    assert type(told.value) is ValueError, "the next try may reach it"
    with Trackers(runtime_of(report_to=["tensorboard"]), tmp_path, ALONE, {}, {"tensorboard": "id1"}, rows(1, 4)) as all_of:
        all_of.log(rows(5, 5)[0])
        assert (all_of.trackers, all_of.ids) == ({}, {"tensorboard": "id1"})
    assert "no route to host" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["FINISH_SECONDS", "FINISH_AFTER_FAULT"])
def test_an_upload_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    use(monkeypatch)
    monkeypatch.setattr(services, limit, 0.2)
    monkeypatch.setattr(Standin, "finish", lambda self, failed: time.sleep(60))
    began = time.monotonic()
    with suppress(KeyError), Trackers(runtime_of(report_to=["tensorboard"]), tmp_path, ALONE, {}):
        if limit == "FINISH_AFTER_FAULT":
            raise KeyError("the training itself fails")
    assert time.monotonic() - began < 30
    assert "TimeoutError: not done after 0.2 s" in capsys.readouterr().out


def fake_wandb(monkeypatch: pytest.MonkeyPatch, *, key: bool) -> list[dict[str, Any]]:
    """The documented surface of wandb that is used, whose server holds 6 steps; what init was called with."""
    calls: list[dict[str, Any]] = []

    def init(**arguments: Any) -> Any:
        run = SimpleNamespace(id=arguments["id"], url="https://server/run", starting_step=7, sent=[])
        run.log = lambda numbers, step: run.sent.append(step)
        run.finish = lambda exit_code: None
        calls.append(arguments | {"run": run})
        return run

    module: Any = ModuleType("wandb")
    module.init, module.Settings = init, lambda **settings: settings
    module.login = lambda *, prompt, verify: key and not prompt
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_online_resumes_its_run_behind_the_servers_last_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server holds steps 1..6, the checkpoint is of 4: 5 and 6 are not sent again, for it takes steps in order alone."""
    calls = fake_wandb(monkeypatch, key=True)
    with Trackers(
        runtime_of(report_to=["wandb"]), tmp_path / "a/b/c/d", ALONE, {"x": 1}, {"wandb": "id1"}, rows(1, 4)
    ) as all_of:
        for row in rows(5, 8):
            all_of.log(row)
    (call,) = calls
    assert (call["id"], call["resume"], call["mode"]) == ("id1", "allow", "online")
    assert (call["project"], call["name"], call["config"]) == ("longspec", "b/c/d", {"x": 1})
    assert call["run"].sent == [7, 8]


def test_no_key_ends_the_start_and_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_wandb(monkeypatch, key=False)
    with refused("runtime.report_to: wandb", "WANDB_API_KEY", "runtime.tracker_mode: offline"):
        Trackers(runtime_of(report_to=["wandb"]), tmp_path, ALONE, {})
    assert calls == []


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of that name in the working directory is no package."""
    monkeypatch.setattr(services, "is_installed", lambda name: name != "wandb")
    with refused("runtime.report_to: wandb", "pip install -c constraints.txt -e '.[track]'"):
        chosen(runtime_of(report_to=["wandb", "tensorboard"]))
    monkeypatch.undo()
    (tmp_path / "nothing_of_this_name").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not services.is_installed("nothing_of_this_name")


def test_what_was_not_measured_or_is_not_finite_is_left_out() -> None:
    parts = {"data": 1, "save": None}
    row = {"step": 3, "loss": 1.5, "llm_loss": None, "grad_norm": float("nan"), "note": "x", "phases": parts}
    assert scalars(row) == {"train/loss": 1.5, "phases/data": 1.0}
