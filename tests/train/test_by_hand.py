"""The published progression by hand: experiments by their names, each of which begins with the draft of the one before."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from longspec.atomic_files import read_json, sha256_file, write_json
from longspec.data import tokenize
from longspec.data.pack import packing
from longspec.distributed import ALONE
from longspec.draft.hub_upload import files_to_push, model_card
from longspec.lease import acquire
from longspec.train.arguments import read_job
from tests.corpus import Corpus, questions, write_raw
from tests.jobs import finish, start
from tests.refusals import check, refused

LENGTH = 48
BASE = "qwq_glide_8gpu_slim6b_sinkpi-slicing"
LONG = f"{BASE}_longv2-32k-zero3_5e-6-ligce-nomask"
SMALL = [f"recipe.data.sequence_length={LENGTH}", "recipe.global_batch=4", "recipe.steps=2", "recipe.optimizer.lr=1e-2"]
ROWS = [("slimpajama", "base", "truncate"), ("long-data", "long-nomask", "truncate"), ("longcot", "longcot", "truncate")]


def command(root: Path, name: str, *more: str) -> list[str]:
    return ["-cp", str(root / "config/exp"), "-cn", name, *SMALL, *more]


@pytest.fixture
def workplace(tmp_path: Path, target: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with target and rows where the workflow leaves them."""
    shutil.copytree(target.parent / "target", tmp_path / "models/qwq-32b-preview/target")
    for path in corpus.tokenizer.parent.glob("tokenizer/*"):
        shutil.copy(path, tmp_path / "models/qwq-32b-preview/target")
    write_json(
        tmp_path / "models/qwq-32b-preview/target_manifest.json",
        {"path": "models/qwq-32b-preview/target", "source": "test", "files": {}},
    )
    shard = tmp_path / "tokens/000.json"
    tokenize.make(write_raw(tmp_path / "raw", questions(60)), corpus.tokenizer, 0, 1, shard)
    for dataset, collation, overlong in ROWS:
        packed = tmp_path / f"data/packed/qwq-32b-preview/{dataset}-{collation}-{LENGTH}-{overlong}/manifest.json"
        packing.make([shard], LENGTH, collation, overlong, packed)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_each_stage_finds_the_draft_of_the_one_before_and_no_path_is_typed(workplace: Path, root: Path) -> None:
    out, of_next = (workplace / "results" / name for name in (BASE, LONG))
    for name, folder, more in ((BASE, out, []), (LONG, of_next, ["runtime.extract_at_end=false"])):
        text, code = finish(start([sys.executable, "-m", "longspec.train", *command(root, name, *more)], folder))
        assert code == 0, text
    lease, recipe = acquire(out), (out / "recipe.yaml").read_bytes()
    text, code = finish(start([sys.executable, "-m", "longspec.train", *command(root, BASE, "recipe.seed=7")], out))
    lease.release()
    check(text, f"error: {out}", "another job")
    assert (code, (out / "recipe.yaml").read_bytes()) == (1, recipe), "the files of the job that has the folder"
    assert set(files_to_push(out / "draft")) >= {"provenance.json", "model.safetensors"}  # without a detour
    assert "base" in model_card(out / "draft", "owner/name", "main", None, None)
    sections = yaml.safe_load((out / "draft/training_config.yaml").read_text())
    assert sections == {"base": {each: yaml.safe_load((out / f"{each}.yaml").read_text()) for each in ("recipe", "runtime")}}
    of_target = workplace / "models/qwq-32b-preview/target/tokenizer.json"
    assert (out / "draft/tokenizer.json").read_bytes() == of_target.read_bytes()
    begun = [read_json(folder / "checkpoint.json")["identity"]["init_weights"] for folder in (out, of_next)]
    assert begun == [None, sha256_file(out / "draft/model.safetensors")]


def test_a_missing_draft_before_it_is_named(workplace: Path, root: Path) -> None:
    with refused(f"results/{BASE}/draft/model.safetensors", "--init-weights"):
        read_job(command(root, LONG), ALONE)
