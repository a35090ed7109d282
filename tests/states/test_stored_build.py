"""Building a shard: goes on where it was, and takes nothing for done that is not."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import describe_files, read_json, write_json
from longspec.states import build as building
from longspec.states.stored_states import StoredRows, merge
from tests.states.conftest import Sources
from tests.states.stored import Stored


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows in a file."""
    monkeypatch.setattr(building, "PART_BYTES", 64_000)


@pytest.fixture
def glide(tmp_path: Path, sources: Sources) -> Stored:
    return sources.glide(tmp_path / "states", "runtime.micro_batch=2", "recipe.states.dtype=float32")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*-of-*/[rs][oh][wa]*")}


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("moment", ["save", "describe_files"])
def test_a_killed_builder_computes_again_only_what_was_in_work(
    glide: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed before or after a part has its name; what lies under another name counts for nothing."""
    glide.build()
    whole, batches, original = files(glide.folder), glide.batches, getattr(building, moment)
    for after in (0, 2):
        killed = glide.like(tmp_path / f"killed-{after}")
        calls = itertools.count()

        def dying(*arguments: Any, after: int = after, calls: Iterator[int] = calls) -> Any:
            if next(calls) == after:
                raise KilledError
            return original(*arguments)

        monkeypatch.setattr(building, moment, dying)
        with pytest.raises(KilledError):
            killed.build()
        out = killed.folder / "0-of-1"
        assert not (out / "shard.json").exists()
        there = len(list(out.glob("*.safetensors")))
        assert there == after + (moment == "describe_files")
        (out / ".rows-000000-000004.safetensors.99.tmp").write_bytes(b"torn")
        (out / "rows-000000-000004.part").write_bytes(b"of the version before")
        monkeypatch.setattr(building, moment, original)
        killed.batches = 0
        killed.build()
        assert files(killed.folder) == whole
        assert len(list(out.glob("*rows-*"))) == len(whole) - 1
        assert killed.batches <= batches - 5 * there // 2  # five rows make a part, two a batch


def test_damaged_and_missing_parts_are_named_and_they_alone_are_made_again(glide: Stored) -> None:
    manifest = glide.manifest()
    before, glide.batches = files(glide.folder), 0
    glide.manifest()
    assert (glide.batches, files(glide.folder)) == (0, before), "a whole shard is not computed again"
    StoredRows.open(manifest)
    first, second, third = sorted(glide.folder.glob("*/*.safetensors"))[:3]
    content = bytearray(second.read_bytes())
    content[-100] ^= 16

    def cut() -> None:
        third.write_bytes(third.read_bytes()[:-1])

    for path, damage in ((first, first.unlink), (second, lambda: second.write_bytes(content)), (third, cut)):
        damage()
        with pytest.raises(ValueError, match=rf"^{path}: .*: build --shard 0$"):
            StoredRows.open(manifest)
        glide.batches = 0
        glide.manifest()
        assert glide.batches <= 3  # five rows, two in a batch
        assert files(glide.folder) == before
        StoredRows.open(manifest)


def test_what_another_version_stored_is_refused_with_what_builds_it_again(glide: Stored) -> None:
    manifest = glide.manifest()
    shard = glide.folder / "0-of-1/shard.json"
    content = read_json(shard)
    write_json(shard, {name: content[name] for name in content.keys() - {"files"}})
    with pytest.raises(ValueError, match=rf"^{shard}: .* build it again: build --shard 0$"):
        StoredRows.open(shard)
    write_json(manifest, {"shards": []})
    with pytest.raises(ValueError, match=rf"^{manifest}: .* remove {glide.folder}, and build them"):
        StoredRows.open(manifest)
    glide.manifest()
    assert read_json(shard) == content


def test_another_target_makes_all_rows_anew_and_is_not_mixed_up(glide: Stored, tmp_path: Path) -> None:
    glide.build(0, 2)
    old = glide.build(1, 2)
    other = tmp_path / "target.json"
    manifest = read_json(glide.target)
    write_json(other, manifest | {"files": describe_files(Path(manifest["path"]), ["config.json", "model.safetensors"])})
    glide.target, glide.batches = other, 0
    new = glide.build(0, 2)
    assert glide.batches >= len(StoredRows.open(new).shards[0].rows) / 2
    with pytest.raises(ValueError, match="holds other states than"):
        merge([new, old], glide.folder / "manifest.json")
    new_too = glide.build(1, 2)
    with pytest.raises(ValueError, match=rf"give each shard once: {new} 0 to"):
        merge([new], glide.folder / "manifest.json")
    merge([new_too, new], glide.folder / "manifest.json")
    write_json(new, read_json(new) | {"bytes": 1})
    with pytest.raises(ValueError, match=rf"^{new}: .*merge the shards again"):
        StoredRows.open(glide.folder / "manifest.json")


def test_more_shards_than_rows_leave_some_empty(glide: Stored) -> None:
    """A dataset may be tokenized in more parts than its rows are."""
    shards = len(glide.source()) + 3
    paths = [glide.build(shard, shards) for shard in range(shards)]
    content = merge(paths[::-1], glide.folder / "manifest.json")
    assert len(content["files"]) == shards
    stored = StoredRows.open(glide.folder / "manifest.json")
    assert [len(shard.rows) for shard in stored.shards].count(0) == 3
    for row in range(len(glide.source())):
        stored.read([row], pinned=False)
