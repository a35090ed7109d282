"""`longspec new`, `plan`, `train` and `report` call Snakemake as a user would, and say what came out."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import write_json
from longspec.cli import new, runs
from longspec.cli.__main__ import OWN, PASSED_ON, PLANNED, parser
from longspec.config import compose_stage, plain, to_yaml
from longspec.lease import acquire
from longspec.models.attention import backends
from longspec.train.checkpoint.checkpoint_dir import seal
from longspec.train.stage_folder import STATUS
from tests.refusals import check
from tests.workflow.calls import begun
from tests.workflow.planning import Workflow

CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "vocab_size": 1000, "max_position_embeddings": 512}
ROW = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}

P = "results/demo/sinkpi-slicing"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[[Workflow], None]:
    """Have a copy be where the command is typed, and Snakemake be called as elsewhere in these tests."""

    def within(copy: Workflow) -> None:
        monkeypatch.chdir(copy.folder)
        monkeypatch.setattr(runs, "compose_stage", partial(compose_stage, config_dir=copy.folder / "config"))
        monkeypatch.setattr(runs.subprocess, "run", lambda command, **_: copy.call(*command[3:], shown=False))

    return within


def test_a_new_run_is_written_and_planned(
    workflow: Workflow, called: Any, longspec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called(workflow)
    for name in ("inputs", "my-llama"):
        (workflow.folder / name).mkdir()
    (workflow.folder / "inputs/chats.jsonl").write_text(json.dumps(ROW) + "\n")
    (workflow.folder / "my-llama/config.json").write_text(json.dumps(CONFIG))
    asked = ("new", "mine.yaml", "--target", "my-llama", "--data", "inputs/*.jsonl")
    code, text = longspec(*asked)
    assert code == 0, text
    assert "results/mine/ttt/train: is trained\n" in text
    *_, jobs, target, data, time, memory, disk, command = text.splitlines()
    assert "by the rules " in jobs
    assert target == "target: llama, 8 layers, 1,000 tokens, 512 positions"
    assert data == "data: about 23 tokens, at 4 bytes each: 8 rows of 512 tokens"
    assert re.fullmatch(r"time: \d+ steps, about .* on [12] threads of this processor \(\d+\.\d\d TFLOP/s measured\); .*", time)
    assert re.fullmatch(r"memory: \S+ GiB of each process, of \S+ GiB that this machine has: (fits|DOES NOT FIT: .*)", memory)
    assert (disk.startswith("disk: "), command) == (True, "train it: longspec train mine.yaml")
    assert re.match(
        r"# yaml-language-server: \$schema=/.*/config/run\.schema\.json\n", (workflow.folder / "mine.yaml").read_text()
    )
    assert (
        "target: my-llama\ndata: {mine-data: inputs/*.jsonl}\nmethod: eagle3\n" in (workflow.folder / "mine.yaml").read_text()
    )
    code, text = longspec(*asked)
    check(text, "error: mine.yaml", "edit it", "another name")
    code, text = longspec("new", "other.yaml", "--target", "demo", "--data", "inputs/*.jsonl")
    check(text, "error: --target: demo", "config/model/")
    assert (code, text.count("\n"), (workflow.folder / "other.yaml").exists()) == (1, 1, False)
    Path("chats.jsonl.gz").touch()
    assert new.cost_lines(Path("mine.yaml"), "my-llama", "chats.jsonl.gz")[-2].startswith("time and disk: not known bef")
    monkeypatch.setattr(new, "memory_of", lambda device: 2**40)
    monkeypatch.setattr(backends, "has_triton", lambda: False)  # it asks a GPU, where torch is built for one
    for gpus, ranks in ((1, 1), (6, 4), (16, 8)):  # of the eight rows of a step
        monkeypatch.setattr(new.torch.cuda, "device_count", partial(int, gpus))
        *_, time, _, _, told = new.cost_lines(Path("mine.yaml"), "my-llama", "inputs/*.jsonl")
        assert f" on {ranks} of {gpus} GPUs" in time
        assert told == command + f" --set-resources train:ranks={ranks}" * (ranks > 1)
    (workflow.folder / "mine.yaml").write_text("target: my-llama\ndtaa: {}\n")
    code, text = longspec("plan", "mine.yaml")
    assert (code, len(text.splitlines())) == (1, 1)
    assert re.search(r"mine\.yaml: dtaa: unknown key; .*'data'\?", text)


def test_a_plan_says_which_keys_train_a_stage_again(built: Workflow, called: Any, longspec: Any) -> None:
    called(built)
    for stage in ("base", "long", "longcot"):
        path = built.folder / f"results/demo/sinkpi-slicing/{stage}/recipe.yaml"
        path.write_text(to_yaml(compose_stage("demo", "sinkpi-slicing", stage).recipe))
    build = compose_stage("demo", "sinkpi-slicing", "base").build
    (built.folder / "models/demo/build.yaml").write_text(to_yaml(build))
    built.output("--touch", "--forceall", "--cores=1", "--quiet")
    assert longspec("plan", "demo") == (0, "nothing to be done: all files are there and up to date\n")
    built.edit("config/run/demo.yaml:long", r"\blr: [^,}]+", "lr: 2.0e-3")
    rows = [json.dumps({"step": step, "seconds": 2.0}) for step in (1, 2, 3)]
    (built.folder / "results/demo/sinkpi-slicing/long/metrics.jsonl").write_text("\n".join(rows) + "\n")
    code, text = longspec("plan", "demo")
    assert code == 0
    assert "results/demo/sinkpi-slicing/long: is trained again: optimizer.lr: 0.003 -> 0.002; 36 steps, about 72 s\n" in text
    assert "results/demo/sinkpi-slicing/longcot: is trained again: what it begins with has changed; 104 steps\n" in text
    assert "results/demo/sinkpi-slicing/base: stays as it is\n" in text
    # Half a training goes on, and is not thrown away by an edit; a whole one whose beginning changed is made anew.
    for stage, step in (("long", 20), ("longcot", 104), ("base", 7)):
        slot = built.folder / f"results/demo/sinkpi-slicing/{stage}/checkpoints/last/manifest.json"
        content = {"step": step, "steps": {"long": 36, "longcot": 104, "base": 320}[stage], "files": {}, "identity": {}}
        write_json(slot, seal(content))
    aside = Path(f"{P}/long/checkpoints.0123abcd")
    identity = {"recipe": plain(runs.compose_stage("demo", "sinkpi-slicing", "long").recipe)}
    write_json(aside / "last/manifest.json", seal({"step": 36, "steps": 36, "files": {}, "identity": identity}))
    assert f"{P}/long: goes back to the checkpoints of these settings, which {aside} keeps\n" in longspec("plan", "demo")[1]
    shutil.rmtree(aside)
    Path("results/demo/sinkpi-slicing/base/checkpoint.json").unlink()
    _, text = longspec("plan", "demo")
    refusal = f"would be refused at step 20: optimizer.lr: 0.003 -> 0.002; undo that, or train anew after: rm -r {P}/long/"
    told = f"{P}/long: {refusal}checkpoints\n", f"{P}/longcot: is trained again: what", f"{P}/base: goes on behind step 7; 313 "
    assert [line for line in told if line not in text] == []
    frozen = Path(f"{P}/base/recipe.yaml")  # of the same target or precision in other words
    frozen.write_text(re.sub(r"\nprecision: \S+", "\nprecision: bf16", frozen.read_text()))
    told = f"{P}/base: stays or goes on if it is the same by its hash, else it would be refused: precision: bf16 -> "
    assert told in longspec("plan", "demo")[1]
    assert runs._is_told(Path("results/demo"))
    os.utime(f"{P}/long/checkpoint.json", (2**32, 2**32))
    assert not runs._is_told(Path("results/demo")), "a stage was trained behind it"
    shutil.rmtree(built.folder / ".snakemake/metadata")
    check(longspec("plan", "demo")[1], "results/", ".snakemake/")
    Path("results/demo/report.json").unlink()
    code, text = longspec("report", "demo")
    check(text, "error: results/demo/report.json")
    assert (code, text.endswith(": longspec train demo\n"), text.count("\n")) == (1, True, 1)


def test_help_names_every_verb_and_verbs_of_other_rooms_are_there() -> None:
    whole = parser().format_help()
    assert [verb for verb in (*PLANNED, *OWN, *PASSED_ON) if f"\n    {verb} " not in whole] == []
    assert Path(sys.executable).with_name("longspec").is_file()
    done = subprocess.run([sys.executable, "-m", "longspec.cli", "status", "--help"], capture_output=True, text=True)
    assert done.stdout.startswith("usage: "), done.stderr


@pytest.mark.parametrize(
    ("given", "others", "settings"),
    [
        ([], [], []),
        (["--config", "a=1", "b=2", "--cores", "2"], ["--cores", "2"], ["a=1", "b=2"]),
        (["-n", "-C", "a=1", "--config=b=2"], ["-n"], ["a=1", "b=2"]),
        (["--configfile", "more.yaml", "-c", "2"], ["--configfile", "more.yaml", "-c", "2"], []),
    ],
)
def test_however_settings_are_given_the_run_is_among_them(
    monkeypatch: pytest.MonkeyPatch, given: list[str], others: list[str], settings: list[str]
) -> None:
    called: list[str] = []
    monkeypatch.setattr(runs, "snakemake", lambda *arguments, look: called.extend(arguments) or 1)
    assert runs.train(Namespace(run="mine.yaml", snakemake=given)) == 1
    assert called == ["final_draft", *others, "--config", "run=mine.yaml", *settings]


@pytest.mark.slow
def test_ctrl_c_ends_snakemake_first_which_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text('rule final_draft:\n    output: "it"\n    shell: "touch begun; sleep 60; touch it"\n')
    with begun([sys.executable, "-m", "longspec.cli", "train", "x", "--cores=1"], tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate()
    assert (process.returncode, "the same command goes on\nstopped by you\n" in text, "Traceback" in text) == (130, True, False)
    assert list((tmp_path / ".snakemake").glob("locks/*")) == []


def test_a_stage_that_trains_has_a_line_with_steps_speed_and_time_left(tmp_path: Path) -> None:
    """Once for each step that is reached; stages that are done or wait have none."""
    folder = tmp_path / "demo/base/chat"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml").touch()
    rows = [{"step": step, "seconds": 2.0, "tokens_per_second": 1234.5} for step in (1, 2, 3)]
    (folder / "checkpoints/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / STATUS).write_text(json.dumps({"state": "running", "steps": 40}))
    told: dict[str, int] = {}
    assert runs.progress(tmp_path / "demo", told) == [], "nobody holds its folder"
    lease = acquire(folder)
    try:
        assert runs.progress(tmp_path / "demo", told) == ["demo/base/chat: step 3 of 40, 1,234 tokens/s, 74 s left"]
        assert runs.progress(tmp_path / "demo", told) == []
        (folder / "checkpoints/metrics.jsonl").write_text(json.dumps(rows[0] | {"step": 4}) + "\n")
        assert runs.progress(tmp_path / "demo", told) == ["demo/base/chat: step 4 of 40, 1,234 tokens/s, 72 s left"]
    finally:
        lease.release()


def test_rows_unlike_what_the_target_writes_are_told_while_it_trains_each_once(tmp_path: Path) -> None:
    """Not on a report's page alone, days later."""
    rows, told = [str(tmp_path / f"{name}.json") for name in ("like", "unlike", "missing")], set[str]()
    for path, unlike in zip(rows, (1, 5), strict=False):
        write_json(Path(path), {"dataset": "chats", "documents": 20, "unlike_served": unlike})
    (line,) = runs.unlike_served(rows, told)
    assert line.startswith("chats: 5 of 20 documents")
    assert runs.unlike_served(rows, told) == []
