"""Datasets of the hub: which files a name stands for, what is pinned, and what happens without the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import check_files, read_json
from longspec.data import hub as fetch
from longspec.data.read.source_files import KNOWN
from tests.data.hub_standin import Hub
from tests.refusals import refused

TOKEN = "hf_secretOfNobody"
CARD = b"""---
configs:
- config_name: default
  default: true
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: [data/test-*, extra/test.jsonl]
- config_name: small
  data_files: small.jsonl
- config_name: folder
  data_dir: other
---
# Some text
"""


def lines(word: str, count: int = 40) -> bytes:
    return b"".join(json.dumps({"text": f"{word} {number}"}).encode() + b"\n" for number in range(count))


FILES = {
    "README.md": CARD,
    "data/train-00000-of-00002.jsonl": lines("a"),
    "data/train-00001-of-00002.jsonl": lines("b"),
    "data/test-00000-of-00001.jsonl": lines("c", 1),
    "extra/test.jsonl": lines("d"),
    "small.jsonl": lines("e", 1),
    "other/train.jsonl": lines("f"),
    "other/validation.jsonl": lines("g"),
}
TRAIN = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]


@pytest.fixture
def server(hub: Hub) -> Hub:
    """A hub with one repository."""
    hub.add("o/n", FILES)
    return hub


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data/hub/d/manifest.json"


def fetched(manifest: dict, out: Path) -> list[str]:
    """The names in a manifest, which must be right."""
    check_files(out.parent, manifest["files"])
    assert read_json(out) == manifest
    return [name.removeprefix("files/") for name in manifest["files"]]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("hf:o/n", TRAIN),
        ("hf:o/n:default:test", ["data/test-00000-of-00001.jsonl", "extra/test.jsonl"]),
        ("hf:o/n:small", ["small.jsonl"]),
        ("hf:o/n:folder:validation", ["other/validation.jsonl"]),
        ("hf:o/n/extra/test.jsonl", ["extra/test.jsonl"]),
        ("hf:o/n/data/t*-0000?-of-*", ["data/test-00000-of-00001.jsonl", *TRAIN]),
    ],
)
def test_only_the_files_a_name_stands_for_are_downloaded(server: Hub, out: Path, source: str, names: list[str]) -> None:
    manifest = fetch.make(source, "main", out)
    assert fetched(manifest, out) == names
    assert manifest["commit"] == server.repositories["o/n"].refs["main"]
    assert {name: (out.parent / "files" / name).read_bytes() for name in names} == {name: FILES[name] for name in names}
    sent = {path.partition("/resolve/")[2].partition("/")[2] for _, path, _ in server.asked_for("jsonl")}
    assert sent == set(names)


def test_without_a_card_the_names_of_files_tell_the_splits(server: Hub, out: Path) -> None:
    server.add("o/plain", {"train.jsonl": lines("a"), "dev.jsonl": lines("b"), "docs/how.md": b"text"})
    assert fetched(fetch.make("hf:o/plain", "main", out), out) == ["train.jsonl"]
    assert fetched(fetch.make("hf:o/plain:validation", "main", out), out) == ["dev.jsonl"]


def test_a_later_fetch_downloads_nothing_and_asks_nothing_of_a_commit(server: Hub, out: Path) -> None:
    first = fetch.make("hf:o/n", "main", out)
    before = len(server.asked_for("jsonl"))
    assert fetch.make("hf:o/n", "main", out) == first
    assert len(server.asked_for("jsonl")) == before
    pinned = fetch.make("hf:o/n", first["commit"], out)
    assert {**pinned, "revision": "main"} == first
    server.requests.clear()
    assert fetch.make("hf:o/n", first["commit"], out) == pinned
    assert server.requests == []


def test_a_branch_that_moved_is_refused_and_accepted_by_its_commit(server: Hub, out: Path) -> None:
    first = fetch.make("hf:o/n", "main", out)
    kept = out.read_bytes()
    other = server.commit("o/n", FILES | {TRAIN[1]: lines("new")})
    advice = f"`revision: {first['commit']}` to stay, or `revision: {other}` to accept"
    with refused(f"hf:o/n: revision 'main' is commit {other} now", f"{out} keeps {first['commit']}", advice):
        fetch.make("hf:o/n", "main", out)
    assert out.read_bytes() == kept
    assert fetched(fetch.make("hf:o/n", first["commit"], out), out) == TRAIN
    server.requests.clear()
    assert fetched(fetch.make("hf:o/n", other, out), out) == TRAIN
    assert (out.parent / "files" / TRAIN[1]).read_bytes() == lines("new")
    assert not server.asked_for(TRAIN[0])


def test_bytes_that_are_not_the_kept_ones_are_refused(server: Hub, out: Path) -> None:
    fetch.make("hf:o/n", "main", out)
    path = out.parent / "files" / TRAIN[0]
    path.write_bytes(lines("z"))
    with refused(f"{path}: its SHA-256", "remove"):
        fetch.make("hf:o/n", "main", out)
    path.unlink()
    server.requests.clear()
    assert fetched(fetch.make("hf:o/n", "main", out), out) == TRAIN
    assert len(server.asked_for("jsonl")) == 1


def test_a_commit_whose_bytes_changed_is_refused(server: Hub, out: Path) -> None:
    commit = fetch.make("hf:o/n/small.jsonl", "main", out)["commit"]
    (out.parent / "files/small.jsonl").unlink()
    server.repositories["o/n"].commits[commit] = FILES | {"small.jsonl": lines("y", 1)}
    with refused("hf:o/n/small.jsonl: the hub", "other bytes", f"{out} keeps"):
        fetch.make("hf:o/n/small.jsonl", "main", out)


def test_files_of_another_size_never_take_their_place(server: Hub, out: Path) -> None:
    server.repositories["o/n"].damaged = b"???"
    commit = f"commit {server.repositories['o/n'].refs['main']}"
    with refused("hf:o/n: README.md:", commit):
        fetch.make("hf:o/n", "main", out)
    with refused(f"hf:o/n/data/train-*: {TRAIN[0]}:", commit):
        fetch.make("hf:o/n/data/train-*", "main", out)
    assert not list((out.parent / "files").rglob("*.jsonl"))
    server.repositories["o/n"].damaged = b""
    assert fetched(fetch.make("hf:o/n", "main", out), out) == TRAIN


def test_the_token_comes_from_the_environment_and_goes_nowhere_else(
    server: Hub, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.add("o/closed", FILES, token=TOKEN)
    with refused("hf:o/closed:", "RepositoryNotFoundError", "HF_TOKEN"):
        fetch.make("hf:o/closed", "main", out)
    assert {token for _, _, token in server.requests} == {None}
    server.requests.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    caplog.set_level("DEBUG")
    assert fetched(fetch.make("hf:o/closed", "main", out), out) == TRAIN
    assert {token for _, path, token in server.requests if "o/closed" in path} == {f"Bearer {TOKEN}"}
    assert TOKEN not in caplog.text
    for path in out.parents[2].rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


FAULTS: dict[str, tuple[Any, ...]] = {
    "no answer": ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "hf:o/n/data/train-*", "main", "(ConnectError"),
    "offline": ({"HF_HUB_OFFLINE": "1"}, "hf:o/n/data/train-*", "main", "HF_HUB_OFFLINE"),
    "gated": ({}, "hf:o/n/data/train-*", "main", "(GatedRepoError"),
    "no revision": ({}, "hf:o/n/data/train-*", "v9", "(RevisionNotFoundError"),
    "no split": ({}, "hf:o/n:trail", "main", "'default'", "'trail'; its splits: test, train;"),
    "no config": ({}, "hf:o/n:large:train", "main", "(BuilderConfig 'large'"),
    "a split offline": ({"HF_HUB_OFFLINE": "1"}, "hf:o/n:test", "main", "HF_HUB_OFFLINE"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_without_the_hub_it_says_where_to_get_the_files(
    server: Hub, out: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    environment, source, revision, *facts = FAULTS[case]
    server.repositories["o/n"].gated = case == "gated"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused(f"{source}:", *facts, f"copy {out.parent}/ here") as error:
        fetch.make(source, revision, out)
    assert "\n" not in str(error.value)
    assert not out.exists()


def test_a_fault_of_the_hubs_storage_is_told_as_one_of_the_hub(server: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: Any, **__: Any) -> None:  # hf_xet's Rust code raises no class of its own
        raise RuntimeError("Data processing error: CAS service error")

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", fault)
    monkeypatch.setattr("huggingface_hub.HfApi.snapshot_download", fault)
    with refused("hf:o/n:", "CAS service error", f"copy {out.parent}/ here"):
        fetch.make("hf:o/n", "main", out)


def test_files_that_are_kept_are_taken_without_the_hub(server: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch.make("hf:o/n", "main", out)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch.make("hf:o/n", "main", out) == first
    (out.parent / "files" / TRAIN[0]).unlink()
    with refused("hf:o/n:", "HF_HUB_OFFLINE"):
        fetch.make("hf:o/n", "main", out)


def test_a_name_that_leads_out_of_the_repository_is_refused(server: Hub, out: Path) -> None:
    server.add("o/out", {"../../x.jsonl": lines("a")})
    with refused("hf:o/out: the name '../../x.jsonl'"):
        fetch.make("hf:o/out", "main", out)


def test_a_file_of_no_known_kind_is_refused(server: Hub, out: Path) -> None:
    server.add("o/table", {"train.csv": lines("a")})
    with refused("train.csv:", KNOWN):
        fetch.make("hf:o/table", "main", out)
    assert not server.asked_for("csv")
