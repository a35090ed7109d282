import shutil
from pathlib import Path

import pytest

from longspec.atomic_files import read_json, sha256_file, write_json
from longspec.draft_vocabulary import tokenizer_hash, tokenizer_hash_of
from longspec.target import fetch
from tests.corpus import Corpus
from tests.data.hub_standin import running


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
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json: missing"),
        (
            lambda f: write_json(f / "config.json", {"model_type": "gemma2"}),
            r"config\.json: model_type 'gemma2' is not supported .*; supported are llama, .*, glm4$",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json: missing"),
        (lambda f: (f / "model-2.safetensors").unlink(), r"model-2\.safetensors: missing, though model\.safetensors\.index"),
        (
            lambda f: write_json(f / "model.safetensors.index.json", {"weight_map": {"a": "../model.safetensors"}}),
            r"index\.json: weight_map: must hold",
        ),
        (lambda f: (f / "model.safetensors.index.json").unlink(), r"no weights; expected model\.safetensors"),
        (shutil.rmtree, r"recipe\.model\.source: .*no such folder"),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, tmp_path: Path, spoil, message: str) -> None:
    target, tokenizer = outs(tmp_path)
    write_json(target, {})  # of an earlier fetch
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        fetch.make(str(folder), target, tokenizer)
    assert not target.exists()
    assert not tokenizer.exists()


def test_without_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    target, tokenizer = outs(tmp_path)
    with pytest.raises(ValueError, match=r"^hf:someone/model: cannot be fetched .*recipe\.model\.source in config/model/mine"):
        fetch.make("hf:someone/model", target, tokenizer)
    assert not target.exists()


QUANTIZED = {"model_type": "qwen2", "quantization_config": {"quant_method": "awq", "bits": 4}}


@pytest.mark.parametrize("config", [{"model_type": "qwen2"}, QUANTIZED])
def test_weights_of_the_hub_come_when_the_target_is_supported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    write_json(folder / "config.json", config)
    made = tmp_path / "models/mine/target"
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        commit = hub.add("a/b", {path.name: path.read_bytes() for path in folder.iterdir()})
        if config is QUANTIZED:
            with pytest.raises(ValueError, match=r"^hf:a/b/config\.json: quantization_config: quantized targets .*\(awq\)"):
                fetch.download("a/b", made)
            assert not hub.asked_for(".safetensors")
        else:
            assert fetch.download("a/b", made) == commit
            assert {path.name for path in made.iterdir() if path.is_file()} == {path.name for path in folder.iterdir()}
