"""Preflight: each check's failing case; two ranks that find all well; a rank that falls silent; the rule."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longspec.cluster import preflight
from longspec.cluster.preflight import FAIL, OK, WARN, Facts, Finding, check_gpus, check_versions
from longspec.distributed import Ranks
from tests.jobs import torchrun
from tests.warm_jobs import popen
from tests.workflow.planning import copy_to

CPU = torch.device("cpu")
HERE = Facts("n1", {"torch": "1"})
H100 = replace(HERE, gpus=1, gpu="H100", memory=80 * 2**30)


def preflight_of(*options: str, launcher: tuple[str, ...] = (sys.executable,)) -> tuple[int, str]:
    """Exit code of the program and all that it prints."""
    command = [*launcher, "-m", "longspec.cluster", "preflight", *options]
    process = popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text, _ = process.communicate(timeout=200)
    return process.returncode, text


@pytest.mark.slow
def test_two_ranks_find_all_well(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, text = preflight_of(f"--report={report}", launcher=tuple(torchrun(2)))
    assert code == 0, text
    told = json.loads(report.read_text())
    levels = {check["name"]: check["level"] for check in told["checks"]}
    no_gpu = 0 if torch.cuda.is_available() else 1  # which is a warning
    assert levels == dict.fromkeys(("versions", "all-reduce"), OK) | {"gpus": WARN if no_gpu else OK}
    assert re.search(r"^ok +all-reduce +(gloo|nccl) over 2 ranks, sums exact; \d+ MiB in .* GB/s$", text, re.MULTILINE)
    assert told["summary"] in text
    assert f"{3 - no_gpu} ok, {no_gpu} warnings, 0 failed" in told["summary"]
    assert len(told["ranks"]) == 2


@pytest.mark.slow
def test_without_a_launcher_all_is_checked_though_one_fails() -> None:
    code, text = preflight_of("--gpus-expected=99")
    assert code == 1
    assert re.findall(r"^fail +(\S+)", text, re.MULTILINE) == ["gpus", "all-reduce"]
    assert "2 failed" in text.splitlines()[-1]


def test_ranks_of_other_versions() -> None:
    assert check_versions([HERE, HERE]).level == OK
    found = check_versions([HERE, HERE, replace(HERE, host="n2", versions={"torch": "2"})])
    assert (found.level, found.found) == (FAIL, "torch {'n1': '1', 'n2': '2'}")


def test_gpus_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    none = check_gpus([HERE], 8)
    assert (none.level, none.found) == (FAIL, "0 GPUs seen on n1, 8 needed")
    assert "CUDA_VISIBLE_DEVICES is  on n1" in none.fix
    assert check_gpus([HERE], 0).level == WARN
    assert check_gpus([H100, H100], 0).found == "1 GPUs seen on n1, 2 needed"
    mixed = check_gpus([H100, replace(H100, host="n2", gpu="A100")], 1)
    assert (mixed.level, mixed.found) == (WARN, "{'n1': 'H100', 'n2': 'A100'}")
    assert check_gpus([H100], 1) == Finding(OK, "1 x H100, 80.00 GiB each")


def test_sums_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "join", lambda ranks, minutes: CPU)
    monkeypatch.setattr(dist, "all_reduce", lambda vector: None)  # adds nothing up
    found = preflight.all_reduce(Ranks(1, 1, 2), 1)
    assert (found.level, found.found) == (FAIL, "999 of 1000 sums over all ranks are wrong")


@pytest.mark.slow
def test_the_rule_runs_each_time_again(tmp_path: Path, root: Path) -> None:
    """A stand-in for the launcher writes down what it is told."""
    workflow = copy_to(tmp_path, root)
    (tmp_path / "src/longspec/cluster/launch.py").write_text(
        "from pathlib import Path\n\n\ndef main(argv):\n    Path(argv[-1]).write_text(' '.join(argv))\n    return 0\n"
    )
    gres = ["--set-resources", "preflight_run:gres='nvme:2,gpu:a100_80gb:2'"]
    for more, gpus in (([], 0), (gres, 2)):
        assert "rule preflight_run:" in workflow.output("preflight", "--cores=1", *more)
        told = (tmp_path / "results/demo/preflight.json").read_text()
        assert told.startswith("--nodes 1 --ranks 1 ")
        end = f"-- longspec.cluster preflight --gpus-expected {gpus} --report results/demo/preflight.json"
        assert told.endswith(f"--log logs/preflight/demo.log {end}")
