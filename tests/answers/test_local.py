"""Answers through transformers: those of its own `generate`, prompt by prompt, however often the job was killed."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspec import jsonl
from longspec.answers import local
from longspec.answers.local import decode
from longspec.answers.merge import merge
from longspec.answers.settings import parse
from longspec.atomic_files import read_json, write_json
from longspec.data.layout_tally import cut_warning
from longspec.data.tokenize import make as tokenize
from longspec.decode.sampling import Sampler
from tests.answers.conftest import Case, journal_of, turns
from tests.corpus import write_raw
from tests.jobs import finish, start, torchrun
from tests.refusals import refused
from tests.targets import save_target


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    """Target and tokenizer as transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def generated(case: Case, messages: list[dict[str, str]], new_tokens: int) -> tuple[str, bool]:
    """The next answer by transformers' own means, and whether it was cut."""
    model, tokenizer = loaded(case.folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    out = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=0)
    found = out[0, ids["input_ids"].shape[1] :].tolist()
    ended = found[-1] in ends
    return tokenizer.decode(found[:-1] if ended else found), not ended


def expected(case: Case, record: dict[str, Any], new_tokens: int) -> tuple[str, list[dict[str, str]]]:
    """How a conversation ends, and its messages, asked turn by turn."""
    messages: list[dict[str, str]] = []
    for message in record["messages"]:
        if message["role"] == "user":
            messages.append(message)
            continue
        text, cut = generated(case, messages, new_tokens)
        if not text.strip() or "<|" in text or "\0" in text:
            return ("shortened" if len(messages) > 1 else "dropped"), messages[:-1]
        messages.append({"role": "assistant", "content": text.rstrip("\ufffd") if cut else text})
        if cut:
            return "cut", messages
    return "answered", messages


def test_greedy_answers_are_those_of_generate_for_each_prompt_alone(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path, batch=5)
    lines = journal_of(tmp_path)
    ends = []
    for name in ("train", "held_out"):
        for number, record in enumerate(jsonl.read(case.raw.parent / f"{name}.jsonl"), 1):
            line = lines.pop((name, number))
            end, messages = expected(case, record, 12)
            assert (line["end"], line.get("messages", [])) == (end, messages)
            ends.append(end)
    assert not lines
    assert {"answered", "cut", "dropped", "shortened"} == set(ends), "each way to end is compared"


@pytest.mark.slow
def test_a_target_split_over_ranks_gives_the_same_answers(case: Case, tmp_path: Path) -> None:
    temperature = 0.8
    case.make(tmp_path / "whole", temperature=temperature)
    settings = json.dumps({"new_tokens": 12, "temperature": temperature, "cut": "keep"})
    files = ["--raw", str(case.raw), "--target", str(case.target), "--tokenizer", str(case.tokenizer)]
    out = ["--settings", settings, "--out", str(tmp_path / "split/shard.json")]
    text, code = finish(start([*torchrun(2), "-m", "longspec.answers", "shard", *files, *out], tmp_path))
    assert code == 0, text
    assert journal_of(tmp_path / "split") == journal_of(tmp_path / "whole")
    manifests = [read_json(tmp_path / name / "shard.json") for name in ("whole", "split")]
    assert manifests[0]["files"] == manifests[1]["files"]


def test_rows_of_a_batch_are_decoded_as_alone_in_every_kind_of_attention(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_target("qwen3-tied-sliding-first", tmp_path), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (3, 19, 11)]
    ends = range(0, 97, 9)
    found = decode(model, prompts, 16, set(ends), [Sampler()] * 3)
    for prompt, tokens in zip(prompts, found, strict=True):
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=list(ends), pad_token_id=0
        )
        assert tokens == out[0, len(prompt) :].tolist()


def test_sampled_answers_hang_on_seed_record_and_turn_and_not_on_the_batch(case: Case, tmp_path: Path) -> None:
    for name, settings in (("one", {"batch": 1}), ("many", {"batch": 7}), ("other", {"batch": 7, "seed": 1})):
        case.make(tmp_path / name, temperature=0.7, top_p=0.9, **settings)
    one, many, other = (journal_of(tmp_path / name) for name in ("one", "many", "other"))
    assert one == many
    assert sum(one[key] != other[key] for key in one) > len(one) // 2


def test_draws_follow_the_targets_distribution(case: Case) -> None:
    """Rows of one prompt, each with a seed of its own, against the softmax that transformers computes."""
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    rows, prompt = 4000, [5, 9, 70]
    samplers = [Sampler(1.0, 0, 1.0, torch.Generator().manual_seed(row)) for row in range(rows)]
    tokens = torch.tensor(decode(model, [prompt] * rows, 1, {0}, samplers))[:, 0]
    p_V = model(torch.tensor([prompt])).logits[0, -1].detach().softmax(-1)
    seen_V = torch.bincount(tokens, minlength=len(p_V)) / rows
    assert float((seen_V - p_V).abs().max()) < 5 * (0.25 / rows) ** 0.5


def killed(case: Case, out: Path, monkeypatch: pytest.MonkeyPatch, after: int, **settings: Any) -> None:
    """Answer until so many batches are done, then die."""
    left, answer = [after], local.answer

    def counted(*given: Any) -> None:
        if left[0] == 0:
            raise InterruptedError
        left[0] -= 1
        answer(*given)

    with monkeypatch.context() as patch:
        patch.setattr(local, "answer", counted)
        with pytest.raises(InterruptedError):
            case.make(out, **settings)
    assert not (out / "shard.json").exists()


def test_killed_and_resumed_equals_undisturbed(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    settings = {"batch": 3, "temperature": 1.0}
    whole = case.make(tmp_path / "whole", **settings)
    killed(case, tmp_path / "cut", monkeypatch, 2, **settings)
    path = tmp_path / "cut/journal.jsonl"
    kept = path.read_bytes()[:-300]  # a torn line
    path.write_bytes(kept)
    killed(case, tmp_path / "cut", monkeypatch, 1, **settings)
    again = case.make(tmp_path / "cut", **settings)
    assert journal_of(tmp_path / "cut") == journal_of(tmp_path / "whole")
    assert {key: value for key, value in again.items() if key != "files"} == {
        key: value for key, value in whole.items() if key != "files"
    }
    whole_lines = kept.count(b"\n") - 1
    assert f"{whole_lines} lines of chats's answers" in capfd.readouterr().out


def test_other_settings_are_never_mixed_in_but_a_batch_of_another_size_goes_on(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    killed(case, tmp_path, monkeypatch, 2, batch=3)
    case.make(tmp_path, batch=4)
    assert "4 lines of chats's answers\n" in capfd.readouterr().out, "of a batch of one and one of three"
    case.make(tmp_path, new_tokens=5)
    assert "14 lines of chats's answers are left out, made otherwise: settings: {" in capfd.readouterr().out
    assert {line["tokens"] <= 10 for line in journal_of(tmp_path).values()} == {True}


def test_all_records_are_counted_and_those_that_ask_nothing_are_told(case: Case, tmp_path: Path) -> None:
    odd = [
        {"text": "running text"},
        turns("why?"),
        {"messages": [*turns("who?")["messages"], {"role": "assistant", "content": "and"}]},
        turns("a long question " * 40),
        turns("why?", "a long question " * 40),
    ]
    raw = write_raw(tmp_path / "odd", odd)
    made = Case(raw, case.target, case.tokenizer).make(tmp_path / "out", longest_prompt=100, new_tokens=40)
    assert made["records"] == 5 == sum(made["ends"].values())
    assert made["reasons"]["skipped"] == {
        "a prompt of more than N tokens": 1,
        "running text, which asks nothing": 1,
        "two answers in a row": 1,
    }
    lines = journal_of(tmp_path / "out")
    assert lines["train", 5]["messages"] == lines["train", 2]["messages"], "up to its last question that could be asked"


def test_cut_answers_are_kept_or_dropped_and_counted_in_the_report(case: Case, tmp_path: Path) -> None:
    """Unless `cut` says otherwise such an answer is dropped: a draft would learn an end behind it."""
    assert parse("d", {"new_tokens": 9}).cut == "drop"
    kept, dropped = (case.make(tmp_path / cut, cut=cut) for cut in ("keep", "drop"))
    assert kept["ends"]["cut"] > 0 == dropped["ends"]["cut"]
    assert sum(dropped["reasons"][end].get("cut by new_tokens", 0) for end in ("dropped", "shortened")) == kept["ends"]["cut"]
    first, second = journal_of(tmp_path / "keep"), journal_of(tmp_path / "drop")
    for key, line in first.items():
        if line["end"] == "cut":
            assert second[key].get("messages", []) == line["messages"][:-2]
        else:
            assert second[key] == line
    case.make(tmp_path / "long", cut="drop", new_tokens=200)
    made = {
        name: merge([tmp_path / name / "shard.json"], case.raw, tmp_path / name / "merged/manifest.json")
        for name in ("keep", "drop", "long")
    }
    assert [bool(cut_warning(manifest)) for manifest in made.values()] == [True, True, False]


def test_merged_shards_are_a_raw_folder_in_the_raw_order(case: Case, tmp_path: Path) -> None:
    whole = case.make(tmp_path / "whole")
    parts = [case.make(tmp_path / f"{number}-of-3", (number, 3)) for number in range(3)]
    assert sum(part["records"] for part in parts) == whole["records"]
    paths = [tmp_path / f"{number}-of-3/shard.json" for number in (2, 0, 1)]
    made = merge(paths, case.raw, tmp_path / "merged/manifest.json")
    lines = journal_of(tmp_path / "whole")
    for name in ("train", "held_out"):
        wanted = [(key[1], line["messages"]) for key, line in sorted(lines.items()) if key[0] == name and "messages" in line]
        records = list(jsonl.read(tmp_path / f"merged/{name}.jsonl"))
        assert [(record["line"], record["messages"]) for record in records] == wanted
        assert made["records"][name] == len(wanted)
    assert made["answers"]["ends"] == whole["ends"]
    tokens = tokenize(tmp_path / "merged/manifest.json", case.tokenizer, 0, 1, tmp_path / "tokens/000.json")
    assert tokens["documents"] + tokens["skipped"]["count"] == made["records"]["train"]
    assert tokens["answer_tokens"] > 0
    for change, told in (
        ({}, (paths[0], "3 shards", "them once")),
        ({"served_model": "other"}, (f"{paths[1]}: served_model", "other")),
    ):
        write_json(paths[0], read_json(paths[0]) | change)
        with refused(*told):
            merge(paths if change else paths[:2], case.raw, tmp_path / "merged/manifest.json")
    journal = paths[1].with_name("journal.jsonl")
    journal.write_bytes(journal.read_bytes()[:-9])
    with refused(journal, f"{journal.stat().st_size} bytes", paths[1]):
        merge(paths[1:], case.raw, tmp_path / "merged/manifest.json")


def test_a_target_that_computes_no_numbers_is_refused(case: Case) -> None:
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with refused("the target's logits", "inf or NaN"):
        decode(model, [[1, 2]], 3, {0}, [Sampler()])
