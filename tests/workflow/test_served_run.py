"""`longspec serve` beside a stand-in for vLLM: what it is started with, asked and what its counters are read as; which engine
it takes.
"""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longspec import jsonl
from longspec.atomic_files import write_json
from longspec.cli import serve
from longspec.cli.__main__ import main
from longspec.cli.engine_choice import choose, llama_cpp_commands
from longspec.cli.serve import counted, measured, show
from longspec.engines import ENGINES
from longspec.measure.lines import key_of
from longspec.measure.tasks import Prompt, Setting
from longspec.methods.glide import settings as glide
from tests.workflow.planning import Settings

# Keeps two of three drafted tokens in each of five rounds of a completion; counts from a start that is not zero.
SERVER = """#!{python}
import http.server, json, sys
words = sys.argv[1:]
port = int(words[words.index("--port") + 1])
asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(json.dumps({{"data": [{{"id": "the target"}}]}}))
        assert self.path == "/metrics"
        lines = ["# HELP vllm:spec_decode_num_drafts_total rounds"]
        lines += ['vllm:spec_decode_num_drafts_total{{engine="0",model_name="x"}} %.1f' % (7 + 5 * len(asked))]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        for place, kept in enumerate((5, 5, 0)):
            value = 3 + kept * len(asked)
            lines += ['%s{{engine="0",model_name="x",position="%d"}} %.1f' % (name, place, value)]
        self.reply("\\n".join(lines) + "\\n")

    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        with open("asked.json", "w") as file:
            json.dump({{"words": words, "asked": asked}}, file)
        self.reply(json.dumps({{"choices": []}}))

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
GREEDY = Setting(0.0, 3)
OLDER = "results/demo/sinkpi-slicing/final_draft"  # from before vLLM's layout was made with it
DRAFT, TARGET = Path("results/demo-eagle3/ttt/final_draft"), "models/demo/target"
PROMPTS = [Prompt("short", number, number, [1, 2, 3], 8) for number in range(2)]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An interpreter of vLLM's environment that is none."""
    path = tmp_path / "python"
    path.write_text(SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def finished(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a finished demo-eagle3 leaves, as far as `serve` reads it; its prompts are two of a task."""
    write_json(
        Path("results/demo-eagle3/ttt/final_draft/config.json"), {"draft": "eagle3", "target_path": "models/demo/target"}
    )
    write_json(Path("results/demo-eagle3/report.json"), {"final": {"ttt": {"stage": "long"}}})
    settings.edit("config/workflow.yaml", r"shapes: \[4\]", "shapes: [3]")
    monkeypatch.setattr(serve, "first_prompts", lambda *_: PROMPTS)
    monkeypatch.setattr(serve, "_on_this_machine", lambda *_: ["--dtype", "float32"])
    return settings


def write_lines(accepted: list[list[int]]) -> None:
    """Our evaluation of the published stage, and that of another one."""
    lines = [key_of(prompt, GREEDY) | {"accepted": each} for prompt, each in zip(PROMPTS, accepted, strict=True)]
    folder = Path("results/demo-eagle3/ttt/evaluation")
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write(folder / "long.jsonl", lines)
    jsonl.write(folder / "longcot.jsonl", [line | {"accepted": [0]} for line in lines])


def test_it_is_started_asked_and_held_against_our_evaluation(finished: Settings, engine: Path, capsys: Any) -> None:
    write_lines([[2, 2, 1], [3, 2]])
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo-eagle3", "--python", str(engine), "--check", "--", "--seed", "7"])
    assert ended.value.code == 0
    told = json.loads(Path("asked.json").read_text())
    words = told["words"]
    assert words[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", TARGET]
    draft = {"method": "eagle3", "model": str(DRAFT), "num_speculative_tokens": 3}
    assert json.loads(words[words.index("--speculative-config") + 1]) == draft
    assert words[-4:] == ["--dtype", "float32", "--seed", "7"]
    assert told["asked"] == [{"model": "the target", "prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0}] * 2
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["vLLM", "1.00", "1.00", "0.00", "3.00", "10"] in rows
    assert ["our", "evaluation", "1.00", "0.80", "0.20", "3.00", "5"] in rows


def test_only_what_was_measured_is_compared_and_clearly_less_fails_the_check(settings: Settings, capsys: Any) -> None:
    write_json(Path("results/demo-eagle3/report.json"), {"final": {"ttt": {"stage": "long"}}})
    assert measured("demo-eagle3", "ttt", PROMPTS, GREEDY) is None
    assert not show([2, 2, 0, 0], None, PROMPTS)
    assert "there is nothing to compare with" in capsys.readouterr().out
    write_lines([[1], [1]])
    assert measured("demo-eagle3", "ttt", PROMPTS, GREEDY) == [2, 2, 0, 0]
    assert measured("demo-eagle3", "ttt", [*PROMPTS, Prompt("short", 2, 2, [4], 8)], GREEDY) is None
    assert measured("demo-eagle3", "ttt", PROMPTS, None) is None
    assert not show([10, 10, 0, 0], [2, 2, 0, 0], PROMPTS)
    assert show([10, 7, 0, 0], [2, 2, 0, 0], PROMPTS)
    assert "vLLM keeps clearly less than our evaluation: docs/serve.md, 'When less is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo-eagle3"], f"{DRAFT}: there is no draft yet; make it first: longspec train demo-eagle3"),
        (["demo"], f"{OLDER}/vllm: missing; make it by: longspec export {OLDER} --layout vllm"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_type(
    settings: Settings, capsys: Any, arguments: list[str], message: str
) -> None:
    write_json(
        Path("results/demo/sinkpi-slicing/final_draft/config.json"), {"draft": "glide", "target_path": "models/demo/target"}
    )
    with pytest.raises(SystemExit):
        main(["serve", *arguments])
    assert message in capsys.readouterr().err


def test_a_server_that_ends_says_its_last_words(
    finished: Settings, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GLIDE draft, whose plugin wants another model runner than the one that vLLM takes on GPUs."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    write_json(Path(f"{OLDER}/config.json"), {"draft": "glide", "target_path": TARGET})
    Path(f"{OLDER}/vllm").mkdir()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no memory left for V2=$VLLM_USE_V2_MODEL_RUNNER\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SystemExit):
        main(["serve", "demo", "--python", str(broken), "--check", "--port", "1"])
    told = "the server of --python ended with exit code 3: no memory left for V2=0; all it printed: logs/serve/demo.log"
    assert told in capsys.readouterr().err


def test_counters_are_summed_over_engines_and_other_places_are_left_out() -> None:
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\nvllm:spec_decode_num_drafts_total{engine="1"} 1.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0",engine="1"} 1.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="10"} 9.0\n'
        "vllm:spec_decode_num_drafts_created 1.7e+09\n"
    )
    assert counted(text, 2) == [5, 4, 0]
    assert counted("", 2) == [0, 0, 0]


def test_the_engine_that_fits_method_and_machine_is_taken(settings: Settings, tmp_path: Path, monkeypatch: Any) -> None:
    (python := tmp_path / "python").touch(0o755)
    none = dict.fromkeys(ENGINES, "no/python")
    here = {name: none | {name: str(python)} for name in ENGINES}
    taken = [choose("eagle3", None, pythons, "mine", DRAFT).name for pythons in (none, here["vllm"], here["llama.cpp"])]
    assert taken == ["vllm", "vllm", "llama.cpp"]
    assert choose("eagle3", "llama.cpp", here["vllm"], "mine", DRAFT).name == "llama.cpp"
    assert choose("glide", None, here["llama.cpp"], "mine", DRAFT).name == "vllm"
    assert choose("dflash", None, here["llama.cpp"], "mine", DRAFT).name == "llama.cpp"
    with pytest.raises(
        ValueError, match=r"^--engine llama\.cpp: .* loads no glide drafts; type longspec serve mine --engine vllm$"
    ):
        choose("glide", "llama.cpp", none, "mine", DRAFT)
    with pytest.raises(
        ValueError, match=r"without a server; .*: snakemake serves --config 'runs=\[mine\]'; to serve: longspec"
    ):
        choose("eagle3", "openvino", none, "mine", DRAFT)
    monkeypatch.setattr(glide, "SERVED", {})
    with pytest.raises(ValueError, match=f"^{DRAFT}: no engine loads glide drafts; see it at work: longspec try {DRAFT}$"):
        choose("glide", None, none, "mine", DRAFT)


def test_for_llama_cpp_it_prints_what_to_type(finished: Settings, capsys: Any) -> None:
    """The demo's draft has a window of 512 tokens, within which texts are kept."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo-eagle3", "--engine", "llama.cpp"])
    assert ended.value.code == 0
    export, server = map(shlex.split, capsys.readouterr().out.splitlines())
    beside = DRAFT.parent
    assert export[:6] == ["longspec", "export", str(DRAFT), "--layout", "gguf", "--out"]
    assert export[6:] == [str(beside / "draft.gguf"), "--target", str(beside / "target.gguf"), "--context", "512"]
    assert server[:3] == ["llama-server", "-m", str(beside / "target.gguf")]
    assert server[server.index("--spec-draft-n-max") + 1] == "3"
    (own := Path("mine.gguf")).touch()
    write_json(DRAFT / "config.json", {"draft": "eagle3", "target_path": TARGET, "target_source": str(own)})
    with pytest.raises(SystemExit):
        main(["serve", "demo-eagle3", "--engine", "llama.cpp"])
    export, server = map(shlex.split, capsys.readouterr().out.splitlines())
    assert "--target" not in export
    assert server[:3] == ["llama-server", "-m", str(own)]
    windowed = SimpleNamespace(method=SimpleNamespace(name="dflash", sliding_window=64))  # which llama.cpp computes
    export, server = llama_cpp_commands(DRAFT, {}, windowed, 4)
    assert "--context" not in export
    assert "--spec-type draft-dflash" in server
    with pytest.raises(SystemExit):
        main(["serve", "demo-eagle3", "--engine", "llama.cpp", "--check"])
    assert "--engine llama.cpp: --check: is for vLLM, which is started here; leave it out" in capsys.readouterr().err
