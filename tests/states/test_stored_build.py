"""Building a shard: goes on where it was, and takes nothing for done that is not."""

import itertools
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import describe_files, read_json, write_json
from longspec.data.pack.arrow_shards import PackedRows
from longspec.distributed import ALONE
from longspec.states import build as building
from longspec.states.load import StoredStates, find_rows
from tests.refusals import refused
from tests.states.conftest import StatesOf
from tests.states.stored import Stored
from tests.states.test_stored_states import FLOAT32, target_of


@pytest.fixture
def glide(tmp_path: Path, states_of: StatesOf, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Six rows in a file, two in a forward."""
    monkeypatch.setattr(building, "PART_BYTES", 64_000)
    return states_of("glide", tmp_path / "states", "runtime.micro_batch=2", "recipe.states.dtype=float32")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*-of-*/[rs][oh][wa]*")}


def read_all(stored: Stored, *shards: Path) -> None:
    path, config = target_of(stored)
    rows = find_rows([stored.declaration()], shards)
    StoredStates(path, config, FLOAT32, "sdpa", rows).read(range(len(rows)))


@pytest.mark.parametrize("after", [0, 2])
def test_a_killed_builder_computes_again_only_what_was_in_work(
    glide: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed before a part has its name; what lies under another name counts for nothing."""
    glide.build()
    whole, original, calls = files(glide.folder), building.save, itertools.count()
    killed = glide.like(tmp_path / "killed")

    def dying(*arguments: Any) -> bytes:
        if next(calls) == after:
            raise InterruptedError
        return original(*arguments)

    monkeypatch.setattr(building, "save", dying)
    with pytest.raises(InterruptedError):
        killed.build()
    out = killed.folder / "0-of-1"
    assert not (out / "shard.json").exists()
    assert len(list(out.glob("*.safetensors"))) == after
    (out / ".rows-000000-000004.safetensors.99.tmp").write_bytes(b"torn")
    (out / "rows-000000-000004.part").write_bytes(b"of the version before")
    monkeypatch.setattr(building, "save", original)
    killed.batches = 0
    killed.build()
    assert files(killed.folder) == whole
    assert len(list(out.glob("*rows-*"))) == len(whole) - 1
    assert killed.batches == glide.batches - 3 * after


def test_rows_of_another_machines_precision_are_removed_with_their_folder_alone(glide: Stored) -> None:
    """A node without bfloat16 must not undo days of one that has it."""
    out, other = glide.build().parent, copy(glide.computation())
    rows, before = building.rows_of(out, PackedRows(glide.data))[1], files(glide.folder)
    other.declaration = other.declaration | {"computed_in": "torch.bfloat16"}
    with refused(out, "torch.float32", "torch.bfloat16", f"rm -r {out}"):
        building.build(out, other, rows, ALONE)
    assert files(glide.folder) == before
    shutil.rmtree(out)
    assert read_json(building.build(out, other, rows, ALONE))["declaration"] == other.declaration


def test_missing_and_cut_parts_are_named_and_they_alone_are_made_again(glide: Stored) -> None:
    glide.rows()
    before, glide.batches = files(glide.folder), 0
    glide.rows()
    assert (glide.batches, files(glide.folder)) == (0, before), "a whole shard is not computed again"
    first, second = sorted(glide.folder.glob("*/*.safetensors"))[:2]
    damages: dict[Path, Callable[[], Any]] = {first: first.unlink, second: lambda: second.write_bytes(second.read_bytes()[:-1])}
    for path, damage in damages.items():
        damage()
        with refused(path, f"rm -f {path} {path.parent}/shard.json"):
            read_all(glide, path.with_name("shard.json"))
        glide.batches = 0
        glide.rows()
        assert glide.batches == 3
        assert files(glide.folder) == before


def test_shards_of_another_target_or_version_or_too_few_are_refused(glide: Stored, tmp_path: Path) -> None:
    """A dataset may be tokenized in more parts than its rows are: some shards are empty."""
    with refused(f"--out {glide.folder}/4-of-4", ".../0-of-4"):
        glide.build(4, 4)
    number, wanted = len(glide.computation().source.rows) + 3, glide.declaration()
    shards = [glide.build(shard, number) for shard in range(number)]
    assert [place for _, place in find_rows([wanted, wanted], shards[::-1])] == [0] * 2 * (number - 3)
    with refused(shards[0], f"{number - 4} of {number - 3} rows"):
        find_rows([wanted], shards[:-1])
    target = read_json(glide.target)
    glide.target, glide.batches = tmp_path / "target.json", 0
    write_json(glide.target, target | {"files": describe_files(Path(target["path"]), ["config.json", "model.safetensors"])})
    other = glide.build(number - 1, number)
    assert glide.batches == 1, "nothing is kept of another target's"
    with refused(other, "reads: target: "):
        find_rows([wanted], [other])
    write_json(other, {"declaration": wanted, "files": {}})
    with refused(other, "version", f"rm -f {glide.folder}/*/shard.json", "snakemake"):
        find_rows([wanted], shards)


def test_a_shape_that_no_layer_has_is_refused_before_states_are_stored(tmp_path: Path, states_of: StatesOf) -> None:
    with refused("recipe.method.num_key_value_heads: 3", "4 heads"):
        states_of("eagle3", tmp_path, "recipe.method.num_key_value_heads=3").computation()
