"""Answers stay as long as the files that decide them do, whatever else their manifests say."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspec.answers.merge import merge
from longspec.atomic_files import describe_files, read_json, write_json
from longspec.data.tokenize import make as tokenize
from tests.answers.chat_server import echo, serving
from tests.answers.conftest import Case, ask, journal_of
from tests.refusals import refused

MANIFESTS = ("target", "tokenizer")
OTHER = "0" * 64  # a hash of nothing here


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_files(manifest: Path) -> str:
    """The hash of the files themselves. If its form changes, finished answers are asked again."""
    listed = json.loads(manifest.read_text())
    contents = {name: (Path(listed["path"]) / name).read_bytes() for name in listed["files"]}
    files = {name: {"bytes": len(content), "sha256": sha256(content)} for name, content in contents.items()}
    return sha256(json.dumps(files, sort_keys=True).encode())


def hashes_in(made: dict[str, Any]) -> dict[str, str]:
    """The hashes by which a journal or a manifest knows target and tokenizer."""
    return {name: made[name] for name in MANIFESTS}


def copied(case: Case, folder: Path, **said: Any) -> Case:
    """The same files in another folder, and manifests that say more of them."""
    found = {}
    for name in MANIFESTS:
        manifest = read_json(getattr(case, name))
        shutil.copytree(manifest["path"], folder / name)
        found[name] = folder / f"{name}_manifest.json"
        write_json(found[name], manifest | {"path": str(folder / name)} | said)
    return replace(case, **found)


def make_older(case: Case, out: Path, kept: int | None = None, **made_with: Any) -> None:
    """Rewrite a shard as an older longspec made it, with hashes of the manifests' texts; kept: records before it was killed."""
    older = {name: sha256(getattr(case, name).read_bytes()) for name in MANIFESTS} | made_with
    journal, shard = out / "journal.jsonl", out / "shard.json"
    first, *lines = journal.read_text().splitlines(keepends=True)
    identity = json.loads(first)["identity"] | older
    journal.write_text(json.dumps({"identity": identity}) + "\n" + "".join(lines[:kept]))
    manifest = read_json(shard) | older | {"files": describe_files(out, ["journal.jsonl"])}
    del manifest["hashes"]
    write_json(shard, manifest)
    if kept is not None:
        shard.unlink()


def test_other_words_of_the_same_files_ask_nothing_again(case: Case, tmp_path: Path) -> None:
    """A mirror's files, in another folder. The server goes on under its name, and what is made of the answers stays."""
    out, answers = tmp_path / "out", tmp_path / "merged/manifest.json"
    other = copied(case, tmp_path / "mirror", source="hf:a/mirror", commit="0" * 40)
    with serving(echo) as server:
        made = ask(case, out, server)
        merge([out / "shard.json"], case.raw, answers)
        journal, merged, asked = (out / "journal.jsonl").read_bytes(), answers.read_bytes(), len(server.asked)
        assert asked == made["answers"] > 0
        ask(other, out, server)
        assert len(server.asked) == asked
    assert (out / "journal.jsonl").read_bytes() == journal
    merge([out / "shard.json"], case.raw, answers)
    assert answers.read_bytes() == merged
    wanted = {name: of_files(getattr(case, name)) for name in MANIFESTS}
    for identity in (json.loads(journal.splitlines()[0])["identity"], read_json(answers)["answered_by"]):
        assert hashes_in(identity) == wanted
    for number, each in enumerate((case, other)):
        tokens = tokenize(answers, each.tokenizer, 0, 1, tmp_path / f"tokens/{number}.json")
        assert tokens["tokenizer"] == wanted["tokenizer"]


@pytest.mark.parametrize(
    ("name", "file"), [("target", "model.safetensors"), ("target", "config.json"), ("tokenizer", "tokenizer.json")]
)
def test_another_file_asks_everything_again(case: Case, tmp_path: Path, name: str, file: str) -> None:
    out, other = tmp_path / "out", copied(case, tmp_path / "other")
    manifest, folder = getattr(other, name), tmp_path / "other" / name
    with (folder / file).open("ab") as handle:
        handle.write(b"\n")
    content = read_json(manifest)
    write_json(manifest, content | {"files": describe_files(folder, list(content["files"]))})
    with serving(echo) as server:
        made = ask(case, out, server)
        (before,) = out.glob("journal*.jsonl")
        lines = before.read_bytes()
        assert ask(other, out, server)["answers"] == made["answers"]
    assert len(server.asked) == 2 * made["answers"]
    (aside,) = out.glob("journal.*.jsonl")
    assert aside.read_bytes() == lines


def test_a_journal_of_an_older_longspec_goes_on(case: Case, tmp_path: Path) -> None:
    """Also under the name of its server. It says nothing of the files, so its manifests must be the same."""
    out = tmp_path / "out"
    with serving(echo) as server:
        made = ask(case, out, server)
    lines = journal_of(out)
    make_older(case, out, kept=6, served_model="alias")
    begun = (out / "journal.jsonl").read_bytes()
    with serving(echo, "alias") as server:
        again = ask(case, out, server)
    assert sum(len(body["messages"]) == 1 for body in server.asked) == len(lines) - 6 > 0
    assert (out / "journal.jsonl").read_bytes().startswith(begun)
    assert journal_of(out) == lines
    assert hashes_in(again) == {name: sha256(getattr(case, name).read_bytes()) for name in MANIFESTS}
    other = copied(case, tmp_path / "other")
    with serving(echo) as server:
        ask(other, out, server)
    assert len(server.asked) == made["answers"]


def test_shards_of_an_older_and_of_this_longspec_merge(case: Case, tmp_path: Path) -> None:
    """Those of other files do not; and shards that an older longspec finished give the bytes that they gave."""
    outs = [tmp_path / f"{part}-of-2" for part in range(2)]
    shards, answers = [out / "shard.json" for out in outs], tmp_path / "merged/manifest.json"
    with serving(echo) as server:
        for part, out in enumerate(outs):
            ask(case, out, server, part=(part, 2))
        merge(shards, case.raw, answers)
        records, asked = (answers.parent / "train.jsonl").read_bytes(), len(server.asked)
        make_older(case, outs[0])
        for order in (shards, shards[::-1]):
            made = merge(order, case.raw, answers)
            assert hashes_in(made["answered_by"]) == hashes_in(read_json(order[0]))
            assert (answers.parent / "train.jsonl").read_bytes() == records
            assert tokenize(answers, case.tokenizer, 0, 1, tmp_path / "tokens/000.json")["raw_records"] == made["records"]
        for name in MANIFESTS:
            whole = read_json(shards[0])
            write_json(shards[0], whole | {name: OTHER})
            with refused(f"{shards[1]}: {name}", OTHER):
                merge(shards, case.raw, answers)
            write_json(shards[0], whole)
        make_older(case, outs[1])
        merge(shards, case.raw, answers)
        merged = answers.read_bytes()
        for again in ((0,), (0, 1)):
            for part in again:
                ask(case, outs[part], server, part=(part, 2))
            merge(shards, case.raw, answers)
            assert answers.read_bytes() == merged
        assert len(server.asked) == asked
