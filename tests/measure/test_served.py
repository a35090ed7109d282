"""Evaluation through vLLM, with a stand-in for it: its answers become the lines of any evaluation."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from longspec.atomic_files import write_json
from longspec.decode.texts import Stops, Texts
from longspec.engines import ENGINES, LLAMA_CPP, VLLM
from longspec.measure import engine_files, served
from longspec.measure import evaluate as verb
from longspec.measure.engines import vllm
from longspec.measure.engines.protocol import Answer, Job, Request
from longspec.measure.lines import Comparison, fault_in, judge
from longspec.measure.served import RefusedError, ServedMeasurer, gap_of
from longspec.measure.tasks import Prompt, Setting
from tests.measure.stand_in import VERSIONS
from tests.measure.test_evaluate import arguments, evaluate, folder, told
from tests.refusals import refused
from tests.slurm.cluster import is_running, until
from tests.warm_jobs import popen

__all__ = ["arguments", "folder"]  # fixtures
JOB = Job("target", "ngram", None, 2, "float32", 64, 1, [Request("a", [3, 4], 3, 0.0, 0, [0])])
V2 = "VLLM_USE_V2_MODEL_RUNNER"
CHAINS = {"engine": "vllm", "shapes": [2, 3], "repeats": 1}
ENGINE = ENGINES[VLLM]
MAKE = "`make .venv-serve/vllm/.stamp`"


def answer(tokens: list[int], accepted: list[int], **more: Any) -> Answer:
    return Answer("a", tokens, accepted, [0.75], **more)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, as an interpreter."""
    path = tmp_path / "python"
    script = Path(__file__).with_name("stand_in.py")
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH" exec {sys.executable} {script} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    return path


def asked(folder: Path) -> list[tuple[Any, ...]]:
    """Each request so far: vLLM's method, drafted tokens of a round, and the task and number of the prompt."""
    found = [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]
    return [(method, tokens, *json.loads(key)[:3]) for method, _, tokens, _, key in found]


def test_steps_and_counters_make_the_rounds() -> None:
    """The prompt's step is no round; the last round's text was cut, and the counter says that two were kept in it."""
    assert vllm.rounds_of([1, 1, 4, 1], 5, 2, 2, 1) == [0, 3, 2]
    assert (vllm.rounds_of([1]), vllm.rounds_of([1, 1], 0, 0, 0)) == ([], [0])
    with refused("evaluation.engine: vllm", "counted [2, 1]", "give [1, 1]", MAKE, kind=RuntimeError):
        vllm.rounds_of([1, 1], 3, 2, 1)
    cut = answer([7, 8, 9, 7, 8, 9, 5], [0, 3, 2])
    prompt = Prompt("short", 0, 4, [1, 2, 3], 6)
    measurer = measurer_of_words()
    plain = answer(cut.tokens, [], best=[[(token, 1.0)] for token in cut.tokens])
    line = measurer.line(prompt, Setting(0.0, 3), plain, cut)
    assert (line["engine"], line["rounds"], line["new_tokens"], line["acceptance_length"]) == ("vllm", 3, 8, 8 / 3)
    assert line["positions"] == [(2, 3), (2, 2), (1, 2)]
    assert (line["tokens_compared"], line["mismatches"]) == (7, 0)
    assert line["seconds_plain"] == 0.75 / 6 * 8
    assert (line["seconds_speculative"], line["seconds_draft"], line["seconds_target"]) == (0.75, None, None)
    assert [token["depth"] for token in line["sample"]["tokens"]] == [0, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("tokens", "kept", "accepted", "positions"),
    [
        ([5, 6, 0], [3], [1], [(1, 1), (0, 0), (0, 0)]),
        ([5, 6, 0], [0, 0], [0, 0], [(0, 1), (0, 0), (0, 0)]),
        ([5, 6, 7, 8, 0], [3], [3], [(1, 1), (1, 1), (1, 1)]),
        ([0], [], [], [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_tokens_kept_behind_the_end_of_a_text_are_not_counted(
    tokens: list[int], kept: list[int], accepted: list[int], positions: Any
) -> None:
    """The lines of our own engine for these rounds; an engine's answer has these tokens."""
    texts = Texts([[1]], Stops([0]), 9, None)
    texts.add(0, tokens[:1])
    taken = 1
    for drafted in kept:
        texts.rows[0].accepted.append(texts.add(0, (tokens[taken:] + [9] * 3)[: drafted + 1]))
        taken += drafted + 1
    ours = texts.rows[0]
    plain = answer(tokens, [], best=[[(token, 1.0)] for token in tokens])
    line = measurer_of_words().line(Prompt("short", 0, 1, [1], 8), Setting(0.0, 3), plain, answer(tokens, kept))
    assert (line["accepted"], line["positions"]) == (accepted, positions) == (ours.accepted, ours.position_acceptance(3))
    assert line["new_tokens"] == len(tokens) - 1 == ours.new_tokens


def measurer_of_words() -> ServedMeasurer:
    """A measurer that asks nothing, of a target in float32."""
    target: Any = SimpleNamespace(dtype=torch.float32)
    words = SimpleNamespace(decode=lambda ids: "".join(chr(97 + token) for token in ids))
    return ServedMeasurer(ENGINE, "", target, {}, [0], words, 1, 0)


@pytest.mark.parametrize(
    ("dtype", "gap", "other", "expected"),
    [
        (torch.float32, 0.5e-4, 9, (0.5e-4, 1e-4, 1)),
        (torch.float32, 2e-4, 9, (2e-4, 1e-4, 0)),
        (torch.float32, 0.5e-4, 4, (2e-4, 1e-4, 0)),  # not among the likeliest: no tie, however close the last of these is
        (torch.bfloat16, 0.25, 9, (0.25, 4 * 2**-7 * 16, 1)),  # four roundings of 16
        (torch.bfloat16, 0.75, 9, (0.75, 4 * 2**-7 * 16, 0)),
    ],
)
def test_a_near_tie_is_two_logits_that_rounding_may_swap(
    dtype: torch.dtype, gap: float, other: int, expected: tuple[float, float, int]
) -> None:
    plain = answer([5, 8, 2], [], best=[[(5, 16.0)], [(8, 16.0), (9, 16.0 - gap)], [(2, 16.0)]])
    found = judge(plain.tokens, [5, other, 2], gap_of(plain, dtype))
    margin, allowed, tie = expected
    assert found == Comparison(2, 1, tie, pytest.approx(margin), allowed)
    assert judge(plain.tokens, [6, 8, 2], gap_of(plain, dtype)).near_ties == 1, "where an engine tells of no other token"


def test_a_killed_evaluation_goes_on_without_asking_again(arguments: Any, python: Path, tmp_path: Path) -> None:
    """vLLM ends after 5 of the 16 plain texts (2 tasks x 4 prompts x 2 temperatures), then after 3 of 16 with chains of 2; then
    it refuses, which is the whole result where it is asked for.
    """
    call = [*arguments("lookup", "v.jsonl", **CHAINS), "--serve-python", str(python)]
    for ends_after, done in ((5, 5), (14, 11 + 5 + 3)):
        (tmp_path / "ends_after").write_text(str(ends_after))
        with refused(f"{python} -m longspec.measure.engines.vllm", "exit code 7"):
            verb.evaluate_or_keep_fault(verb.read_arguments([*call, "--keep-fault"]))
        assert not (tmp_path / "v.jsonl").exists()
        if done == 5:
            assert len(asked(tmp_path)) == 5
            begun_with = json.loads((tmp_path / "v.unfinished.jsonl").read_text().splitlines()[0])["identity"]
            assert begun_with["engine"] == VERSIONS  # another version measures all anew
    keeping = verb.read_arguments([*call, "--keep-fault"])
    (tmp_path / "refuses").write_text("Free memory on device cuda:0 (3/80 GiB) on startup is less than desired")
    with refused("evaluation.engine: vllm", "cuda:0") as lack:  # which another try may find
        verb.evaluate_or_keep_fault(keeping)
    assert not isinstance(lack.value, RefusedError)
    (tmp_path / "refuses").write_text("loads no such\ndraft")
    with refused("evaluation.engine: vllm: loads no such draft", kind=RefusedError):
        evaluate(call)
    verb.evaluate_or_keep_fault(keeping)
    assert fault_in(keeping.out) == {"fault": "evaluation.engine: vllm: loads no such draft", "failed": False}
    (tmp_path / "refuses").unlink()
    lines = told(evaluate(call))
    assert fault_in(keeping.out) is None
    requests = asked(tmp_path)
    assert len(requests) == len(set(requests)) == 16 + 32
    assert {(method, tokens) for method, tokens, *_ in requests} == {(None, 0), ("ngram", 2), ("ngram", 3)}
    assert not (tmp_path / "v.unfinished.jsonl").exists()
    assert [(line["task"], line["prompt"], line["temperature"], line["shape"]) for line in lines[:5]] == [
        ("file", 0, 0, 2), ("file", 0, 0, 3), ("file", 0, 0.7, 2), ("file", 0, 0.7, 3), ("file", 1, 0, 2)
    ]  # fmt: skip
    assert {line["engine"] for line in lines} == {"vllm"}
    assert {line["acceptance_length"] for line in lines} == {2.0}
    assert {line["tokens_compared"] for line in lines if line["temperature"] == 0} == {6, 9}
    assert {line["tokens_compared"] for line in lines if line["temperature"] > 0} == {0}


def test_an_engine_of_files_gets_them_for_as_long_as_it_runs(arguments: Any, python: Path, tmp_path: Path) -> None:
    """The target, written in its layout, or a file of a user in its place."""
    by_llama_cpp = CHAINS | {"engine": "llama.cpp", "temperatures": [0]}
    call = [*arguments("lookup", "l.jsonl", **by_llama_cpp), "--serve-python", str(python)]
    assert {line["engine"] for line in told(evaluate(call))} == {"llama.cpp"}
    model, magic = json.loads((tmp_path / "model.json").read_text())
    assert (Path(model).name, magic, Path(model).exists()) == ("target.gguf", "GGUF", False)
    assert {method for method, *_ in asked(tmp_path)} == {None, "ngram-simple"}
    (given := tmp_path / "mine.gguf").write_bytes(b"GGUF")
    evaluate([*call, "--served-target", str(given)])
    assert json.loads((tmp_path / "model.json").read_text())[0] == str(given)
    with refused("--served-draft: none.gguf", "no such"):
        evaluate([*call, "--served-draft", "none.gguf"])
    with refused(f"--served-target: {given}", "evaluation.engine is longspec"):
        evaluate([*arguments("lookup", "o.jsonl", shapes=[2]), "--served-target", str(given)])
    with refused("evaluation.engine: llama.cpp", "glide", "set evaluation.engine: longspec or ", "evaluation.engine: vllm"):
        evaluate([*arguments("untrained", "u.jsonl", **by_llama_cpp), "--serve-python", str(python)])
    with refused("evaluation.temperatures: 0.7", "llama.cpp", "[0]"):
        evaluate([*arguments("lookup", "s.jsonl", **CHAINS | {"engine": "llama.cpp"}), "--serve-python", str(python)])


def test_what_an_engine_makes_of_its_files_is_found_by_its_next_start(arguments: Any, python: Path, tmp_path: Path) -> None:
    """And is gone behind the evaluation."""
    by_openvino = CHAINS | {"engine": "openvino", "temperatures": [0]}
    call = [*arguments("lookup", "o.jsonl", **by_openvino), "--serve-python", str(python)]
    assert {line["engine"] for line in told(evaluate(call))} == {"openvino"}
    assert {method for method, *_ in asked(tmp_path)} == {None, "prompt_lookup"}
    starts = [line.split() for line in (tmp_path / "scratch").read_text().splitlines()]
    assert [made for _, made in starts] == ["0", "1", "1"], "without draft, with chains of 2 and of 3"
    (scratch,) = {name for name, _ in starts}
    assert not Path(scratch).exists()


def test_another_text_with_drafts_is_a_fault(arguments: Any, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = [*arguments("lookup", "v.jsonl", **CHAINS), "--serve-python", str(python)]
    real = ServedMeasurer.ask

    def wrong(measurer: ServedMeasurer, tokens: int | None, requests: list[Request]) -> Any:
        for found in real(measurer, tokens, requests):
            if tokens is not None:
                found.tokens[2] = 1
            yield found

    monkeypatch.setattr(ServedMeasurer, "ask", wrong)
    with refused("file, prompt 0, temperature 0, chain of 2", "at token 3 ", "lie 1.5 apart", "tie's 0.0001"):
        evaluate(call)


def test_an_interpreter_that_is_missing_or_has_no_vllm(arguments: Any) -> None:
    with refused("evaluation.serve_python: none/python", "no such", MAKE):
        evaluate([*arguments("lookup", "v.jsonl", **CHAINS), "--serve-python", "none/python"])
    with refused(f"evaluation.serve_python: {sys.executable}: vllm", "not installed", MAKE):
        evaluate([*arguments("lookup", "v.jsonl", **CHAINS), "--serve-python", sys.executable])


def test_told_to_end_it_ends_vllm_and_leaves_nothing_behind(arguments: Any, tmp_path: Path) -> None:
    """A program in place of vLLM writes its number and answers nothing."""
    (temporary := tmp_path / "tmp").mkdir()
    script, number = tmp_path / "python", tmp_path / "number"
    versions = json.dumps(VERSIONS)
    script.write_text(f"#!/bin/sh\n[ \"$3\" = --versions ] && echo '{versions}' && exit\necho $$ > {number}\nexec sleep 60\n")
    script.chmod(0o755)
    call = [*arguments("lookup", "v.jsonl", **CHAINS), "--serve-python", str(script)]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with popen([sys.executable, "-m", "longspec.measure", "evaluate", *map(str, call)], env=environment) as job:
        until(lambda: number.exists() and number.read_text().strip(), 120, "a start of vLLM")
        assert any(temporary.iterdir())
        job.terminate()
        assert job.wait(30) == 128 + signal.SIGTERM
    until(lambda: not is_running(int(number.read_text())), 10, "vLLM has ended")
    assert [path.name for path in temporary.iterdir() if not path.name.startswith(("torch", "pymp"))] == []


def test_the_other_environment_finds_this_package_and_nothing_beside_it(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of ours, such as another transformers, would come before its own."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere/site-packages")
    with served._environment() as environment:
        (entry,) = environment["PYTHONPATH"].split(os.pathsep)
        assert [path.name for path in Path(entry).iterdir()] == ["longspec"]


def test_no_logits_are_asked_for_in_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take some of plain decoding's time, beside which a draft's would look shorter than it is."""
    params, kinds, asked = ModuleType("vllm"), ModuleType("vllm.sampling_params"), []
    params.SamplingParams = lambda **given: given  # type: ignore[attr-defined]
    kinds.RequestOutputKind = SimpleNamespace(DELTA=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", params)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    places = {3: [{7: SimpleNamespace(logprob=2.5), 5: SimpleNamespace(logprob=1.5)}], None: None}

    class Pretended:
        """An engine that decodes one token."""

        def add_request(self, _name: str, _prompt: Any, settings: dict[str, Any]) -> None:
            asked.append(settings["logprobs"])
            self.left = 1

        def has_unfinished_requests(self) -> int:
            return self.left

        def step(self) -> list[Any]:
            self.left = 0
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=places[asked[-1]])])]

    engine = SimpleNamespace(llm_engine=Pretended(), get_metrics=list)
    found = vllm.answer(engine, replace(JOB.requests[0], best=3), 2)
    assert asked == [None, None, 3]
    assert (len(found.seconds), found.tokens, found.best) == (2, [7], [[(7, 2.5), (5, 1.5)]])
    vllm.answer(engine, JOB.requests[0], 1)
    assert asked[3:] == [None]


def test_a_target_that_an_engines_layout_cannot_hold_is_refused_like_a_draft(tmp_path: Path) -> None:
    """`snakemake serves` then names the engine and goes on with the others; any other error would end it."""
    config = {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": 1}
    write_json(tmp_path / "config.json", config)
    options: Any = SimpleNamespace(drafter="lookup", served_target=None)
    target = SimpleNamespace(path=str(tmp_path), dtype=torch.float32)
    with refused(f"{tmp_path}/config.json: sliding_window", kind=RefusedError):
        engine_files.loaded(ENGINES[LLAMA_CPP], options, target, None, None, 64).__enter__()


def test_what_vllm_computes_wrongly_on_a_cpu_is_refused_with_the_reason(monkeypatch: Any, tmp_path: Path) -> None:
    """vLLM 0.32's kernels sample from a distribution that is not the target's beside a draft, and norm keys by one weight."""
    stand_in = ModuleType("vllm")
    stand_in.LLM = lambda **given: given["speculative_config"]  # type: ignore[attr-defined]
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(vllm, "ENVIRONMENT", {})  # it is set for a process of its own, and would stay in this one
    monkeypatch.setenv(V2, "1")
    monkeypatch.delenv(V2)
    sampled = replace(JOB, requests=[replace(JOB.requests[0], temperature=0.7)])
    with refused("evaluation.temperatures", "longspec-vllm", MAKE):
        vllm.load(sampled)
    with refused("evaluation.engine: vllm", "longspec-vllm", MAKE):
        vllm.load(replace(JOB, method="draft_model"))
    assert vllm.load(replace(sampled, method=None)) is None
    assert vllm.load(JOB) == {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "find_spec", lambda name: name == "longspec_vllm")
        write_json(tmp_path / "config.json", {})
        served = vllm.load(replace(sampled, method="draft_model", draft=str(tmp_path)))
    drafted = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    assert served == drafted | {"draft_sample_method": "probabilistic"}
    assert os.environ[V2] == "0", "the plugin refuses the other runner, which is vLLM's choice on GPUs"
    several = replace(JOB, method="dflash", draft=str(tmp_path))
    write_json(tmp_path / "config.json", {"settings": {"depth": 1, "tied_k_norm": False}})
    assert vllm.load(several)["method"] == "dflash"
    write_json(tmp_path / "config.json", {"settings": {"depth": 2, "tied_k_norm": False}})
    with refused(f"{tmp_path}: recipe.method.tied_k_norm: false", "CPU", "vLLM 0.32", "with true"):
        vllm.load(several)
    platforms.current_platform.is_cpu = lambda: False
    assert vllm.load(several)["method"] == "dflash"
    assert vllm.load(sampled)
