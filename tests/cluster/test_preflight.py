"""Preflight: each check's failing case; two ranks that find all well; a rank that falls silent; the rule."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config

from longspec.atomic_files import read_json, write_json, write_text
from longspec.cluster import preflight
from longspec.cluster.preflight import FAIL, OK, WARN, Facts, Finding, check_gpus, check_versions, host_memory
from longspec.config import Recipe, Runtime, compose, plain, to_yaml, typed
from longspec.distributed import Ranks
from longspec.train.estimate.memory import estimate, peak, setup_of
from tests.jobs import RECIPE, Job, torchrun
from tests.warm_jobs import popen
from tests.workflow.planning import copy_to

MIB = 2**20
CPU = torch.device("cpu")
HERE = Facts("n1", {"torch": "1"}, host_memory=host_memory(0))
H100 = replace(HERE, gpus=1, gpu="H100", memory=80 * 2**30)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a stage's frozen files and a target without its weights."""
    folder = tmp_path / "job"
    Job(folder, folder, folder).freeze()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    Qwen2Config(vocab_size=300, num_key_value_heads=2, **shape).save_pretrained(folder / "target")
    write_json(folder / "target_manifest.json", {"path": str(folder / "target"), "files": {}})
    return folder


@pytest.fixture
def needs(job: Path) -> Callable[..., dict[str, Finding]]:
    """The checks of memory and disk for the stage with other settings; one rank unless told else."""

    def check(*overrides: str, facts: list[Facts] | None = None) -> dict[str, Finding]:
        config = compose("train", [*RECIPE, *overrides])
        recipe, runtime = typed(to_yaml(config.recipe), Recipe, job), typed(to_yaml(config.runtime), Runtime, job)
        target = str(job / "target_manifest.json")
        return preflight.check_needs(target, facts or [HERE], {"a/base": (recipe, runtime)}, CPU, job / "out")

    return check


def preflight_of(job: Path, out: Path, *options: str, launcher: tuple[str, ...] = (sys.executable,)) -> tuple[int, str]:
    """Exit code of the program and all that it prints."""
    files = [f"--{section}={job / section}.yaml" for section in ("recipe", "runtime")]
    files += [f"--target={job / 'target_manifest.json'}", f"--out={out}"]
    command = [*launcher, "-m", "longspec.cluster", "preflight", *files, *options]
    process = popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text, _ = process.communicate(timeout=200)
    return process.returncode, text


@pytest.mark.slow
def test_two_ranks_find_all_well(job: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, text = preflight_of(job, tmp_path / "out", f"--report={report}", launcher=tuple(torchrun(2)))
    assert code == 0, text
    told = json.loads(report.read_text())
    levels = {check["name"]: check["level"] for check in told["checks"]}
    no_gpu = 0 if torch.cuda.is_available() else 1  # which is a warning
    assert levels == dict.fromkeys(("versions", "all-reduce", "memory", "disk"), OK) | {"gpus": WARN if no_gpu else OK}
    assert re.search(r"^ok +all-reduce +(gloo|nccl) over 2 ranks, sums exact; \d+ MiB in .* GB/s$", text, re.MULTILINE)
    assert told["summary"] in text
    assert f"{5 - no_gpu} ok, {no_gpu} warnings, 0 failed" in told["summary"]
    assert len(told["ranks"]) == 2


@pytest.mark.slow
def test_without_a_launcher_all_is_checked_though_one_fails(job: Path, tmp_path: Path) -> None:
    code, text = preflight_of(job, tmp_path / "out", "--gpus-expected=99")
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
    groups: list[str | None] = []
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: backend)
    monkeypatch.setattr(dist, "all_reduce", lambda vector, group=None: groups.append(group))  # adds nothing up
    found = preflight.all_reduce(Ranks(1, 1, 2), 1)
    assert groups == ["gloo", None]  # that of what ranks agree on too
    assert (found.level, found.found) == (FAIL, "999 of 1000 sums over all ranks are wrong")


def test_an_all_reduce_that_hangs_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(preflight, "all_reduce", lambda *_: ended.wait())
    found = preflight.tried_all_reduce(Ranks(0, 0, 2), 0.1)
    ended.set()
    assert (found.level, found.fix) == (FAIL, preflight.NETWORK)
    assert "0.1 s" in found.found


def test_a_stage_that_does_not_fit(needs: Callable[..., dict[str, Finding]], job: Path) -> None:
    assert needs("runtime.micro_batch=4")["memory"].level == OK
    found = needs("runtime.micro_batch=4", facts=[replace(HERE, host_memory=MIB)])["memory"]
    assert found.level == FAIL
    assert "runtime.micro_batch" in found.found
    offload = "runtime.deepspeed.offload_optimizer=cpu"
    config = compose("train", [*RECIPE, offload])
    target = Qwen2Config.from_pretrained(job / "target")
    items = estimate(setup_of(target, config.recipe, config.runtime, 1, 1, torch.float32, CPU))
    needed = peak(items) + peak(items, on_host=True)
    for memory, level in ((needed, OK), (needed - 1, FAIL)):
        assert needs(offload, facts=[replace(HERE, host_memory=memory)])["memory"].level == level


def test_a_stage_is_judged_by_the_processes_that_it_will_have(
    needs: Callable[..., dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks cannot share its batch, the two that it asks for can; Slurm's job of two has two thirds of the memory."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    two = "runtime.ranks=2"
    found = needs(two, facts=[replace(HERE, host_memory=3072 * MIB)] * 3)["memory"]
    assert (found.level, "of 1.50 GiB" in found.found) == (OK, True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "of 1.00 GiB" in needs(two, facts=[replace(HERE, host_memory=3072 * MIB)] * 3)["memory"].found


def test_a_stage_that_trains_again_wants_its_room_again(needs: Callable[..., dict[str, Finding]], job: Path) -> None:
    def left() -> str:
        return needs()["disk"].found.partition("leave up to ")[2]

    whole, recipe = left(), plain(compose("train", RECIPE).recipe)
    write_json(job / "out/a/base/checkpoint.json", {"identity": {"recipe": recipe, "init_weights": None}})
    assert left() != whole
    recipe["seed"] += 1
    write_json(job / "out/a/base/checkpoint.json", {"identity": {"recipe": recipe, "init_weights": None}})
    assert left() == whole


def test_what_no_stage_can_have(needs: Callable[..., dict[str, Finding]], job: Path) -> None:
    assert "cannot be shared equally by 3 processes" in needs(facts=[HERE] * 3)["memory"].found
    config = read_json(job / "target/config.json")
    write_json(job / "target/config.json", config | {"model_type": "gpt2"})
    found = needs()
    assert found["memory"].level == FAIL
    assert "gpt2" in found["memory"].found
    assert found["disk"].level == OK


@pytest.mark.slow
def test_the_rule_checks_all_stages_of_a_run_as_they_will_be_started_and_each_time_again(tmp_path: Path, root: Path) -> None:
    """A stand-in for the launcher writes down what it is told; a second call runs the job again."""
    workflow = copy_to(tmp_path, root)
    (tmp_path / "src/longspec/cluster/launch.py").write_text(
        "from pathlib import Path\n\n\ndef main(argv):\n    Path(argv[-1]).write_text(' '.join(argv))\n    return 0\n"
    )
    write_text(tmp_path / "models/demo/target_manifest.json", "{}")
    until = ["--allowed-rules", "preflight", "preflight_run", "stage_config"]
    gres = ["--set-resources", "preflight_run:gres='gpu:a100_80gb:2'"]
    report = tmp_path / "results/demo/preflight.json"
    for more, gpus in (([], 0), (gres, 2)):
        assert "rule preflight_run:" in workflow.output("preflight", "--cores=1", *until, *more)
        stages = [f"results/demo/sinkpi-slicing/{stage}" for stage in ("base", "long", "longcot")]
        for section in ("recipe", "runtime"):
            assert f"--{section} {' '.join(f'{stage}/{section}.yaml' for stage in stages)} --" in report.read_text()
        for part in (
            "--nodes 1 --ranks 1 ",
            "--log logs/preflight/demo.log -- longspec.cluster preflight ",
            f"--gpus-expected {gpus} --node-mem 8000 --out results/demo --report results/demo/preflight.json",
        ):
            assert part in report.read_text()
