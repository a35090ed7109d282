"""The verb: a killed evaluation ends in the lines of an undisturbed one, and nothing made otherwise is among them."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspec import jsonl
from longspec.atomic_files import sha256_file, write_json, write_text
from longspec.config import compose_stage, to_yaml
from longspec.decode.autoregressive import Plain, decode_plain
from longspec.decode.lookup import WithLookup
from longspec.distributed import ALONE
from longspec.draft_vocabulary import DraftVocabulary
from longspec.engines import ENGINES, VLLM
from longspec.journal import Journal
from longspec.measure import engine_files, measurer
from longspec.measure import evaluate as verb
from longspec.measure.lines import Comparison, judge, verdict_of
from longspec.measure.measurer import gap_of
from longspec.measure.tasks import Prompt, Setting
from longspec.methods.glide.settings import Draft
from tests.cli import small_draft
from tests.corpus import Corpus
from tests.jobs import finish, start, torchrun
from tests.methods.test_attach import save_draft
from tests.refusals import refused

pytestmark = pytest.mark.slow  # half a minute and more as a whole

SETTINGS = {"prompts": 4, "new_tokens": 8, "temperatures": [0, 0.7], "shapes": [2, [2, 3]], "repeats": 2, "seed": 3}
TASKS = {"file": {"source": "in.jsonl", "chat": False, "new_tokens": 5}, "held": {"data": "d", "context": [4, 12]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """A tiny target, prompts in a file and held-out records."""
    path = tmp_path_factory.mktemp("evaluate")
    small_draft.save(path / "target", path / "draft", corpus)
    write_json(path / "target_manifest.json", {"path": str(path / "target"), "source": "test", "files": {}})
    write_text(path / "recipe.yaml", to_yaml(compose_stage("demo", "sinkpi-slicing", "base").recipe))
    jsonl.write(path / "in.jsonl", ({"prompt": f"the red fox {n}"} for n in range(9)))
    jsonl.write(path / "raw/held_out.jsonl", ({"text": "the old cat meets the red fox. " * 9} for _ in range(5)))
    write_json(path / "raw/manifest.json", {"name": "d"})
    return path


@pytest.fixture
def arguments(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The verb's command line for a drafter, with some settings changed."""
    monkeypatch.chdir(folder)

    def make(drafter: str, name: str, **changes: Any) -> list[str]:
        settings = json.dumps(SETTINGS | {"tasks": TASKS} | changes)
        made = ["--settings", settings, "--target", "target_manifest.json", "--raw", "d=raw/manifest.json"]
        return [*made, "--drafter", drafter, "--recipe", "recipe.yaml", "--out", str(tmp_path / name)]

    return make


def told(path: Path) -> list[dict[str, Any]]:
    """The lines without their seconds."""
    return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in jsonl.read(path)]


def evaluate(arguments: list[str]) -> Path:
    """Run the verb here; its output."""
    options = verb.read_arguments(arguments)
    verb.evaluate(options)
    return Path(options.out)


def test_a_killed_evaluation_goes_on_where_it_was(
    arguments: Any, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, the last line torn: 2 tasks x 4 prompts x 2 temperatures in the end, as undisturbed."""
    kept: list[bytes] = []
    call, left, measure = arguments("lookup", "killed.jsonl", shapes=[2]), [7], measurer.Measurer.measure
    journal = tmp_path / "killed.unfinished.jsonl"

    def killed(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            kept.extend(journal.read_bytes().splitlines(keepends=True))  # what SIGKILL would leave
            raise InterruptedError
        return measure(*given)

    with monkeypatch.context() as patch:
        patch.setattr(measurer.Measurer, "measure", killed)
        with pytest.raises(InterruptedError):
            evaluate(call)
    assert 4 <= len(kept) < 16
    journal.write_bytes(b"".join(kept)[:-20])
    capfd.readouterr()
    out = evaluate(call)
    assert f"{len(kept) - 2} lines of an unfinished evaluation, the torn one behind them left out" in capfd.readouterr().out
    assert not journal.exists()
    lines = told(out)
    assert len(lines) == 16
    assert lines == told(evaluate(arguments("lookup", "undisturbed.jsonl", shapes=[2])))
    reused = [json.loads(line)["seconds_plain"] for line in kept[1:-1]]
    assert [line["seconds_plain"] for line in jsonl.read(out)][: len(reused)] == reused


def test_a_target_split_over_ranks_is_measured_as_a_whole_one(arguments: Any, tmp_path: Path) -> None:
    few: dict[str, Any] = {"repeats": 1, "prompts": 2, "shapes": [[2, 3]]}
    whole, call = evaluate(arguments("untrained", "whole.jsonl", **few)), arguments("untrained", "split.jsonl", **few)
    text, code = finish(start([*torchrun(2), "-m", "longspec.measure", "evaluate", *call], Path.cwd()))
    assert code == 0, text
    assert told(tmp_path / "split.jsonl") == told(whole)
    assert not (tmp_path / "split.unfinished.jsonl").exists()


def test_an_untrained_draft_is_measured_once(arguments: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    texts: list[Plain] = []

    def counted(*given: Any, **named: Any) -> Plain:
        texts.append(decode_plain(*given, **named))
        return texts[-1]

    monkeypatch.setattr(measurer, "decode_plain", counted)
    evaluate(arguments("untrained", "untrained.jsonl", repeats=3, temperatures=[0], prompts=2))
    assert "untrained: 4 prompts, 2 settings, torch.float32, cpu" in capfd.readouterr().out
    assert len(texts) == 2 + 4  # before anything is measured each of two shapes is tried once


def test_a_gpu_without_room_says_what_to_set(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(verb, "place_target", full)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with refused("CUDA", "allocate 2.00 GiB. ", "--set-resources evaluate:ranks=2", "docs/large-targets.md", kind=SystemExit):
        verb.main(arguments("untrained", "full.jsonl"))


def test_lines_tell_what_was_decoded(arguments: Any) -> None:
    lines = told(evaluate(arguments("lookup", "lookup.jsonl")))
    greedy = [line for line in lines if line["temperature"] == 0]
    for line in greedy:
        assert line["tokens_compared"] == len(line["tokens"]) <= {"file": 6, "held": 9}[line["task"]]
        assert line["new_tokens"] == sum(line["accepted"]) + line["rounds"]
    by_shape = [[line["tokens"] for line in greedy if line["shape"] == shape] for shape in (2, [2, 3])]
    assert by_shape[0] == by_shape[1]
    assert {line["tokens_compared"] for line in lines if line["temperature"]} == {0}
    assert [line["prompt"] for line in lines if line["task"] == "file"][::4] == [0, 1, 2, 3]


def test_other_settings_measure_anew_and_are_named(arguments: Any, tmp_path: Path, capfd: Any) -> None:
    """A further temperature keeps the lines; another drafter's or repeats' are left out."""
    few = {"temperatures": [0], "shapes": [2], "prompts": 2}
    whole = list(jsonl.read(evaluate(arguments("lookup", "a.jsonl", **few))))
    identity = {"identity": verb.identity_of(*identity_arguments(arguments("lookup", "b.jsonl", **few)))}
    of_draft = verb.identity_of(*identity_arguments(arguments("untrained", "b.jsonl", **few)))
    assert (of_draft["recipe"], identity["identity"]["recipe"]) == (sha256_file(Path("recipe.yaml")), None)
    marked = [line | {"tokens": ["kept"], "reference": "of another day", "record": -1} for line in whole]
    journal = tmp_path / "b.unfinished.jsonl"
    jsonl.write(journal, [identity, *marked, marked[0] | {"prompt_hash": "another"}])
    lines = told(evaluate(arguments("lookup", "b.jsonl", **few | {"temperatures": [0, 1]})))
    assert [line["tokens"] == ["kept"] for line in lines] == [True, False] * 4
    assert "1 lines of other prompts or settings are left out" in capfd.readouterr().out
    assert not [line for line in lines if line["reference"] == "of another day" or line["record"] < 0]
    assert {"code", "transformers", "flash-attn", "repeats"} <= identity["identity"].keys()
    for name, of in (("c.unfinished.jsonl", "an unfinished"), (".c.measured.jsonl", "a finished")):
        jsonl.write(tmp_path / name, [{"identity": identity["identity"] | {"code": "other"}}, *marked[:3]])
        assert not [line for line in told(evaluate(arguments("lookup", "c.jsonl", **few))) if line["tokens"] == ["kept"]]
        assert f"3 lines of {of} evaluation are left out, made otherwise: code: other then" in capfd.readouterr().out


def test_a_further_task_decodes_its_own_prompts_alone(arguments: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Lines of a finished evaluation stay, their seconds too, though Snakemake has removed the file; asked again, none does."""
    decoded: list[str] = []
    measure = measurer.Measurer.measure

    def counted(self: Any, prompt: Prompt, settings: list[Setting]) -> Any:
        decoded.extend([prompt.task] * len(settings) * self.repeats)
        return measure(self, prompt, settings)

    monkeypatch.setattr(measurer.Measurer, "measure", counted)

    def lines(**changes: Any) -> list[dict[str, Any]]:
        """Evaluate with some settings changed; the drafted texts are counted in `decoded`."""
        decoded.clear()
        out = Path(evaluate(arguments("lookup", "grown.jsonl", temperatures=[0], **changes)))
        found = list(jsonl.read(out))
        out.unlink()
        return found

    first = lines(tasks={"file": TASKS["file"]}, prompts=3)
    assert decoded == ["file"] * (2 + 3 * 2 * 2)  # each of two shapes is tried once; 3 prompts, 2 shapes, 2 repeats
    one = lines(tasks={"file": TASKS["file"]})
    assert decoded == ["file"] * (2 + 1 * 2 * 2)
    assert [line for line in one if line["prompt"] < 3] == first
    both = lines()
    assert decoded == ["held"] * (2 + 4 * 2 * 2)
    assert [line for line in both if line["task"] == "file"] == one
    assert len(both) == 16
    assert "8 lines of a finished evaluation" in capfd.readouterr().out
    assert lines(tasks={"held": TASKS["held"]}) == both[8:]
    assert decoded == [], "a task less needs nothing"
    again = lines(tasks={"held": TASKS["held"]})
    assert len(decoded) == 2 + 4 * 2 * 2
    assert [line["tokens"] for line in again] == [line["tokens"] for line in both[8:]]
    assert "asked again for the same lines: they are measured anew" in capfd.readouterr().out


def test_a_glide_draft_proposes_from_a_vocabulary_alone(arguments: Any, corpus: Corpus, tmp_path: Path) -> None:
    """What it drafts comes from these tokens, greedy text stays the target's own, and prompt lookup does not ask for it."""
    path, ids = tmp_path / "v.json", tuple(range(5, corpus.build.vocabulary, 7))
    DraftVocabulary(ids, corpus.build.vocabulary, "t", {"all": 0.5}).write(path)
    few: dict[str, Any] = {"prompts": 2, "temperatures": [0], "shapes": [3], "repeats": 1}
    lines = told(evaluate([*arguments("untrained", "v.jsonl", **few), "--vocabulary", str(path)]))
    whole = told(evaluate(arguments("untrained", "w.jsonl", **few)))
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in whole]
    assert all(line["mismatches"] == line["near_ties"] for line in lines)
    options = verb.read_arguments([*arguments("untrained", "x.jsonl"), "--vocabulary", str(path)])
    target, recipe = AutoModelForCausalLM.from_pretrained("target", dtype=torch.float32), verb.load(options.recipe, verb.Recipe)
    vocabulary = verb.read_vocabulary(options, target, recipe)
    assert verb.make_drafter(options, target, recipe, vocabulary, None).proposed == len(ids)
    options.drafter = "lookup"
    assert verb.read_vocabulary(options, target, recipe) is None


def test_a_draft_is_measured_with_prompt_lookup_beside_it(arguments: Any, tmp_path: Path) -> None:
    """Greedy text stays the target's own; the draft is what its folder says, whatever the recipe's stage was trained with."""
    save_draft("target", tmp_path / "draft", Draft(window=33, anchors="off", lag_mode="fixed"))
    few: dict[str, Any] = {"prompts": 3, "temperatures": [0], "shapes": [1, [2, 4]], "repeats": 1}
    draft = ["--draft", str(tmp_path / "draft")]
    call = [*arguments("with-lookup", "both.jsonl", **few, with_lookup=5), *draft]
    lines = told(evaluate(call))
    assert [line["drafter"] for line in lines] == ["with-lookup"] * 12
    assert all(line["mismatches"] == line["near_ties"] for line in lines)
    options = verb.read_arguments(call)
    target, recipe = AutoModelForCausalLM.from_pretrained("target", dtype=torch.float32), verb.load(options.recipe, verb.Recipe)
    drafter: Any = verb.make_drafter(options, target, recipe, None, 5)
    assert (type(drafter), drafter.copied, drafter.drafter.window) == (WithLookup, 5, 33)
    with refused("--drafter with-lookup: evaluation.with_lookup: null", "such as 8"):
        evaluate([*arguments("with-lookup", "none.jsonl", **few), *draft])


def test_a_draft_that_the_recipe_did_not_train_is_refused(arguments: Any, tmp_path: Path) -> None:
    """By key with both values, though its tensors have the layer's shapes; nothing is measured."""
    save_draft("target", tmp_path / "draft", Draft(window=33, anchors="off", lag_mode="random"))
    call = [*arguments("base", "d.jsonl"), "--draft", str(tmp_path / "draft")]
    with refused(call[-1], "recipe.draft.window", "run has 512", "trained with 33", "give one"):
        evaluate(call)
    save_draft("target", tmp_path / "draft", Draft(anchors="off", lag_mode="fixed"))  # how it was trained is no matter
    lines = list(jsonl.read(evaluate([*arguments("base", "d.jsonl", prompts=2, repeats=1), *call[-2:]])))
    assert len(lines) == 16


def test_the_published_draft_is_measured_as_its_folder_says(arguments: Any, tmp_path: Path) -> None:
    """It may be of another stage than the recipe at hand, which a drafter without a stage takes from the first one."""
    save_draft("target", tmp_path / "draft", Draft(window=33, anchors="off", lag_mode="random"))
    call = [*arguments("vllm", "p.jsonl", prompts=2, repeats=1), "--draft", str(tmp_path / "draft")]
    assert len(list(jsonl.read(evaluate(call)))) == 16
    options = verb.read_arguments(call)
    target, recipe = AutoModelForCausalLM.from_pretrained("target", dtype=torch.float32), verb.load(options.recipe, verb.Recipe)
    drafter: Any = verb.make_drafter(options, target, recipe, None, None)
    assert (drafter.window, recipe.draft.window) == (33, 512)
    served = engine_files.served_target("target", torch.float32, torch.device("cpu"))
    with engine_files.loaded(ENGINES[VLLM], options, served, recipe, None, 64) as given:
        assert given["method"] == "draft_model"


def identity_arguments(call: list[str]) -> tuple[Any, Any, Any, None]:
    """What decides the identity, as the verb has it."""
    options = verb.read_arguments(call)
    target = AutoModelForCausalLM.from_pretrained("target", dtype=torch.float32)
    return options, target, verb.tasks.parse(options.settings), None


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.unfinished.jsonl"
    path.write_text('{"identity": {"a": 1}}\n{"task": \n{"task": "t"}\n')
    with refused(f"{path}: line 2", "JSON", "remove"):
        Journal(path, {"a": 1}, ALONE)


def test_a_journal_gives_the_keys_that_are_asked_for_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "x.unfinished.jsonl"
    path.write_text('{"identity": {"a": 1}}\n{"task": "t", "ids": [1, 2]}\n{"task": "to')
    with Journal(path, {"a": 1}, ALONE, keys=("task",)) as journal:
        assert journal.lines == [{"task": "t"}]
    assert path.read_text().endswith("[1, 2]}\n")


def test_a_changed_text_is_a_fault_and_a_near_tie_is_none() -> None:
    """Token 2 of 3 differs; its logit is the best one's but for one rounding, then 0.125 below.

    64 roundings of 2 ** -23 at the size of the largest logit, 3, are allowed: 2.29e-05.
    """
    prompt, setting = Prompt("short", 7, 0, [1], 3), Setting(0.0, (4, 2))
    logits_V = torch.tensor([0.0, 3.0, 3.0, 0.1])
    for gap, fault in ((2**-22, False), (0.125, True)):
        plain = Plain([0, 1, 1], [logits_V, logits_V - gap * torch.tensor([0.0, 0, 1, 0]), logits_V])
        compared = (plain.ids, [0, 2, 3], gap_of(plain))
        verdict = judge(*compared)
        assert (verdict.tokens_compared, verdict.mismatches, verdict.near_ties) == (2, 1, 0 if fault else 1)
        assert (verdict.margin, verdict.margin_allowed) == (gap, 3 * 2**-17)
        assert verdict_of(prompt, Setting(0.7, 4), *compared) == Comparison(0, 0, 0)
        if not fault:
            assert verdict_of(prompt, setting, *compared) == verdict
            continue
        told = ("at token 2 ([1] became [2]", "0.125 apart", "tie's 2.29e-05")
        with refused("short, prompt 7, temperature 0, tree 4-2", *told):
            verdict_of(prompt, setting, *compared)
