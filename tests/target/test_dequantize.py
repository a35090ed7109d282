"""Targets of GGUF files, held against the models that these were made of."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from longspec.atomic_files import read_json, sha256_file, write_json
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.target import dequantize
from tests import gguf_files
from tests.gguf_files import CONFIGS, TOKENS
from tests.refusals import Fact, refused

IDS = torch.arange(40).view(1, 40) * 5


def made(source: Path, folder: Path, sha256: str | None = None) -> Path:
    """The folder that the verb makes of a file."""
    dequantize.make(str(source), sha256, None, folder / "target_manifest.json", folder / "tokenizer_manifest.json")
    return folder / "target"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny llama.gguf", gguf_files.random_model("llama"), "Q8_0")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_float16_gives_the_very_model(tmp_path: Path, architecture: str) -> None:
    model = gguf_files.random_model(architecture)
    folder = made(gguf_files.write(tmp_path / "a.gguf", model, "F16"), tmp_path)
    config = read_target_config(folder)
    assert "quantization_config" not in read_json(folder / "config.json")
    assert config.architectures == [type(model).__name__]
    target = load_target(str(folder), config, torch.float32)
    torch.testing.assert_close(target.state_dict(), model.state_dict(), rtol=0, atol=0)
    with torch.inference_mode():
        assert torch.equal(target(IDS).logits, model(IDS).logits)


def test_tied_weights_are_written_once_and_the_manifests_say_of_what(llama: Path, tmp_path: Path) -> None:
    folder = made(llama, tmp_path, sha256_file(llama))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118, no dict
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
    for name in ("target", "tokenizer"):
        manifest = read_json(tmp_path / f"{name}_manifest.json")
        assert manifest["gguf"] == {"bytes": llama.stat().st_size, "sha256": sha256_file(llama)}
        assert manifest["source"] == str(llama)


@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("smollm", [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ("gpt-2", [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    ],
)
def test_the_tokenizer_splits_as_the_model_was_trained(tmp_path: Path, pre: str, split: list[Any]) -> None:
    folder = made(gguf_files.write(tmp_path / "a.gguf", gguf_files.random_model("llama"), "F16", pre=pre), tmp_path)
    merges = [tuple(merge.split(" ")) for merge in gguf_files.MERGES]
    wanted = Tokenizer(models.BPE({token: at for at, token in enumerate(TOKENS)}, merges))
    wanted.pre_tokenizer, wanted.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("the other  12 é\n   3 they", "a   1", "  "):
        assert tokenizer.encode(text) == wanted.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a  1") == ([97, 258, 49] if pre == "smollm" else [97, 32, 32, 49])  # a space goes to GPT-2's digit
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=False)
    assert chat == [256, 260, 257]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


def test_qwen_composes_characters_and_splits_in_one_way(tmp_path: Path) -> None:
    model = gguf_files.random_model("qwen2")
    tokenizer = AutoTokenizer.from_pretrained(made(gguf_files.write(tmp_path / "a.gguf", model, "F16"), tmp_path / "a"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    path = gguf_files.write(tmp_path / "b.gguf", model, "F16", pre="llama-bpe")
    with refused(f"{path}: tokenizer.ggml.pre 'llama-bpe'", "for qwen2", "the folder"):
        made(path, tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"without": ("blk.1.ffn_up.weight",)}, ("lacks 1 tensors", "blk.1.ffn_up.weight")),
        ({"more": {"rope_freqs.weight": np.ones(8, np.float32)}}, ("1 tensors", "lost, such as rope_freqs.weight")),
        ({"more": {"rope.scaling.type": "yarn"}}, ("llama.rope.scaling.type is 'yarn'", "the folder")),
        (
            {"more": {"feed_forward_length": 128}},
            ("model.layers.0.mlp.gate_proj.weight", re.compile(r"\[.*96.*\], .* \[.*128.*\]")),
        ),
        ({"more": {"split.count": 3}}, ("is a part", "llama-gguf-split --merge")),
        ({"without": ("tokenizer",)}, ("lacks tokenizer.ggml.model, tokenizer.ggml.tokens, tokenizer.ggml.eos_token_id",)),
        ({"pre": "unheard-of"}, ("tokenizer.ggml.pre 'unheard-of'", "smollm")),
        (
            {"more": {"token_embd.weight": np.full((len(TOKENS), 64), np.inf, np.float32)}},
            ("model.embed_tokens.weight:", "not finite"),
        ),
    ],
)
def test_what_would_be_lost_or_guessed_is_refused(tmp_path: Path, change: dict[str, Any], told: tuple[Fact, ...]) -> None:
    path = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_model("llama"), "F16", **change)
    with refused(f"{path}: {told[0]}", *told[1:]):
        made(path, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "general.architecture 'mamba'"),
        # The type of a tensor of one dimension: int8, which gguf does not undo.
        (
            b"attn_norm.weight\1\0\0\0@\0\0\0\0\0\0\0\0",
            b"attn_norm.weight\1\0\0\0@\0\0\0\0\0\0\0\x18",
            re.compile("quantized .*I8"),
        ),
    ],
)
def test_another_kind_of_model_or_numbers_is_named(llama: Path, tmp_path: Path, old: bytes, new: bytes, fact: Fact) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(llama.read_bytes().replace(old, new, 1))
    with refused(f"{path}:", fact):
        made(path, tmp_path)


def test_a_cut_file_is_refused_wherever_it_is_cut(llama: Path, tmp_path: Path) -> None:
    whole = llama.read_bytes()
    path = tmp_path / "cut.gguf"
    draw = random.Random(0)
    for length in (0, 20, *(draw.randrange(len(whole)) for _ in range(3)), len(whole) - 64):
        path.write_bytes(whole[:length])
        with refused(f"{path}:"):
            made(path, tmp_path)
        assert [each.name for each in tmp_path.iterdir()] == ["cut.gguf"]


def test_another_hash_is_refused_and_a_file_that_is_gone(llama: Path, tmp_path: Path) -> None:
    with refused(f"recipe.model.sha256: is {'0' * 64}", f"that of {llama} is {sha256_file(llama)}"):
        made(llama, tmp_path, "0" * 64)
    fetched = tmp_path / "wheel_file.json"
    write_json(fetched, {"path": "gone.gguf"})
    with refused("recipe.model.source: wheel:a==1/a.gguf:", Path("gone.gguf").absolute()):
        dequantize.make("wheel:a==1/a.gguf", "0" * 64, fetched, tmp_path / "t.json", tmp_path / "k.json")
    assert not (tmp_path / "target").exists()
