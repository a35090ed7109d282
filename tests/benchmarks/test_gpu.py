"""`make gpu` where there is no GPU: parts that are killed, fail, lack a package or run out of time, and the page of all."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_page import page
from benchmarks.gpu_parts import Parts, StoppedError
from benchmarks.gpu_tests import outcomes
from longspec import jsonl
from tests.warm_jobs import popen


def kill_when(command: list[str], root: Path, path: Path, lines: int) -> None:
    """Start a command and kill it, it alone, when a file has so many lines."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{root / 'src'}"}
    process = popen(command, cwd=root, env=environment)
    while process.poll() is None and (not path.is_file() or path.read_text().count("\n") < lines):
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_part_goes_on_where_it_was(root: Path, tmp_path: Path) -> None:
    kept = tmp_path / "gpu_decode.jsonl"
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--out", str(tmp_path), "decode"]
    kill_when(command, root, kept, 2)
    time.sleep(1)  # what it had started has ended with it
    before = rows(kept)
    assert "unfinished" in json.loads((tmp_path / "gpu.json").read_text())["decode"]
    assert popen(command, cwd=root).wait() == 0
    cells = [(row["prompt"], row["method"]) for row in rows(kept)]
    assert rows(kept)[: len(before)] == before
    assert len(before) < 6
    assert cells == [(prompt, method) for prompt in (64, 128) for method in ("dflash", "eagle3", "glide")]
    assert gpu.is_done(json.loads((tmp_path / "gpu.json").read_text())["decode"])
    assert (tmp_path / "gpu.html").read_text().count("<td>128</td>") == 3


@pytest.mark.slow
def test_a_test_with_an_outcome_is_not_run_again(root: Path, tmp_path: Path) -> None:
    """One passed, and pytest was killed twice in another; the last line is torn."""
    kept, ran = tmp_path / "kept.jsonl", tmp_path / "ran"
    (tmp_path / "test_made.py").write_text(f"""import pathlib, pytest
def note(name):
    with pathlib.Path({str(ran)!r}).open("a") as file: file.write(name + "\\n")
def test_a(): note("a")
def test_b(): note("b"); assert 1 == 2, "one is not two"
def test_c(): pytest.skip("no card")
def test_d(): note("d")
""")
    lines = [("a", "begun"), ("a", "passed"), ("d", "begun"), ("d", "begun")]
    jsonl.write(kept, [{"test": f"test_made.py::test_{name}", "outcome": outcome, "why": ""} for name, outcome in lines])
    with kept.open("a") as file:
        file.write('{"test": "te')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", f"--kept={kept}", str(tmp_path)]
    command += ["-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}"}
    assert popen(command, cwd=root, env=environment).wait() == 1
    assert ran.read_text().split() == ["b"]
    assert {name.partition("::")[2]: found for name, found in outcomes(kept).items()} == {
        "test_d": ("failed", "pytest was killed twice while it ran"),
        "test_a": ("passed", ""),
        "test_b": ("failed", "AssertionError: one is not two"),
        "test_c": ("skipped", "Skipped: no card"),
    }


def test_no_part_stops_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def stands(name: str, result: dict[str, Any] | Exception) -> None:
        def part(_: Parts) -> dict[str, Any]:
            ran.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setitem(gpu.PARTS, name, (part, ()))

    def main() -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(tmp_path)])
        gpu.main()
        return dict(json.loads((tmp_path / "gpu.json").read_text()))

    stands("tests", RuntimeError("no <card>"))
    stands("attention", StoppedError())
    stands("steps", {})
    stands("decode", {})
    monkeypatch.setitem(gpu.NEEDED, "demo", ("yaml", "no_such_module", "nor_this"))
    found = main()  # no demo, so the real `resume` fails
    assert found["tests"]["failed_with"] == "no <card>"
    assert found["demo"]["missing"] == ["no_such_module", "nor_this"]
    assert found["resume"]["failed_with"] == "there is no demo yet: its part comes first"
    assert "unfinished" in found["attention"]
    text = (tmp_path / "gpu.html").read_text()
    assert "no &lt;card&gt;" in text
    assert "not installed there: no_such_module, nor_this" in text
    assert text.count('<li class="no">') == 2
    assert text.count('<li class="open">') == 2
    stands("attention", {})
    main()
    assert ran == ["tests", "attention", "steps", "decode", "tests", "attention"]


def test_what_torch_lacks_is_left_out_of_the_copy(tmp_path: Path) -> None:
    parts = Parts(tmp_path, tmp_path, tiny=True)
    gpu.copy_code(parts, list(gpu.LACKING))
    launch, flex = (parts.copy / "src/longspec" / path for path, _, _ in gpu.LACKING.values())
    assert "--shutdown-timeout" not in launch.read_text()
    assert "recompile_limit" not in flex.read_text()


def test_the_page_of_what_is_kept(root: Path, tmp_path: Path) -> None:
    """RESULTS.md's table was written by hand from the first measurements."""
    for path in (root / "benchmarks/results").glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    page(tmp_path)
    text = re.sub(r"<small>[^<]*</small>|<[^>]*>", " ", (tmp_path / "gpu.html").read_text())
    named = {"GLIDE": "glide", "EAGLE-3": "eagle3"}
    written = (root / "benchmarks/RESULTS.md").read_text()
    table = re.findall(r"^\| (\S+?)(?: of seven steps)?, ([\d,]+) \| ([\d,]+) \| (\d+) \| ([\d.]+) \|", written, re.MULTILINE)
    assert len(table) == 6
    for method, tokens, speed, tflops, floor in table:
        row = re.search(rf"{named[method]}\s+{tokens}\s+flash_attention_2\s+\S+\s+([\d,]+)\s+(\d+)\s+\S+\s+\S+\s+(\S+)", text)
        assert row, (method, tokens)
        assert (round(int(row[1].replace(",", "")), -1), row[2]) == (int(speed.replace(",", "")), tflops)
        assert f"{float(row[3]):.1f}" == floor
