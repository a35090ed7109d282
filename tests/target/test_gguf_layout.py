"""Targets written as GGUF files, held against what this project and llama.cpp's own package read of such files."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longspec.atomic_files import read_json, write_json
from longspec.models import gguf_writer
from longspec.target.layouts import write_target
from tests import gguf_files
from tests.refusals import refused
from tests.target.test_dequantize import made
from tests.targets import LLAMA3, SHAPES, YARN


def folder_of(architecture: str, place: Path) -> Path:
    """The folder of a random target, made of a GGUF file of the package's own writer."""
    return made(gguf_files.write(place / "source.gguf", gguf_files.random_model(architecture), "F16"), place)


def stored(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_a_llama_comes_back_as_it_was(tmp_path: Path) -> None:
    """Written, and read again by target/dequantize.py: weights, configuration, tokenizer and chat template."""
    folder = folder_of("llama", tmp_path)
    write_target(folder, "gguf", tmp_path / "again/source.gguf", "f32")
    again = made(tmp_path / "again/source.gguf", tmp_path / "again/out")
    own, found = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (folder, again))
    torch.testing.assert_close(found, own, rtol=0, atol=0)
    assert read_json(again / "config.json") == read_json(folder / "config.json")
    one, other = (AutoTokenizer.from_pretrained(each) for each in (folder, again))
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert (one.chat_template, one.bos_token_id, one.eos_token_id) == (other.chat_template, 256, 257)


def test_qwen2_is_written_as_llama_with_its_biases_turned(tmp_path: Path) -> None:
    """Rows i and i + D/2 of a head stand side by side; keys, values and what has no heads stay."""
    folder = folder_of("qwen2", tmp_path)
    write_target(folder, "gguf", tmp_path / "t.gguf", "f32")
    reader = gguf.GGUFReader(tmp_path / "t.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    own = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    width = 16
    for part, heads in (("q", 4), ("k", 2)):
        rows = [head * width + at + half for head in range(heads) for at in range(width // 2) for half in (0, width // 2)]
        for kind in ("weight", "bias"):
            expected = own[f"model.layers.1.self_attn.{part}_proj.{kind}"][rows]
            assert torch.equal(found[f"blk.1.attn_{part}.{kind}"], expected)
    assert torch.equal(found["blk.0.attn_v.bias"], own["model.layers.0.self_attn.v_proj.bias"])
    assert torch.equal(found["blk.0.ffn_down.weight"], own["model.layers.0.mlp.down_proj.weight"])
    assert reader.fields["tokenizer.ggml.pre"].contents() == "qwen2"
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    assert [at for at, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL] == [256, 257]
    assert reader.fields["tokenizer.ggml.tokens"].contents() == gguf_files.TOKENS
    assert reader.fields["tokenizer.ggml.merges"].contents() == gguf_files.MERGES


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_matrices_are_what_the_package_makes_of_them_and_vectors_stay(tmp_path: Path, dtype: str) -> None:
    folder = folder_of("llama", tmp_path)
    write_target(folder, "gguf", tmp_path / "t.gguf", dtype)
    found, own = stored(tmp_path / "t.gguf"), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    down = own["model.layers.0.mlp.down_proj.weight"].numpy()
    assert found["blk.0.ffn_down.weight"].tensor_type == kind
    assert np.array_equal(found["blk.0.ffn_down.weight"].data, gguf.quantize(down, kind))
    assert np.abs(gguf.dequantize(found["blk.0.ffn_down.weight"].data, kind) - down).max() <= np.abs(down).max() / 127
    assert np.array_equal(found["output_norm.weight"].data, own["model.norm.weight"].numpy())


def test_llama3s_rotations_are_divided_by_what_transformers_scales_them(tmp_path: Path) -> None:
    scaled = LlamaConfig(**SHAPES, head_dim=64, rope_parameters=LLAMA3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    plain = 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    factors = gguf_writer.rope_factors(scaled)["rope_freqs.weight"]
    assert torch.allclose(plain / factors, frequencies, rtol=1e-5, atol=0)
    assert (factors.min(), factors.max()) == (1, 8)
    assert gguf_writer.rope_factors(LlamaConfig(**SHAPES)) == {}


def edit(path: Path, **fields: Any) -> None:
    write_json(path, read_json(path) | fields)


@pytest.mark.parametrize(
    ("architecture", "dtype", "changed", "told"),
    [
        ("qwen3", "f32", {}, ("{}/config.json: model_type: qwen3:", "llama, mistral, qwen2;", "vLLM")),
        ("llama", "q4_0", {}, ("--dtype: q4_0:", "f32, f16, bf16, q8_0")),
        ("llama", "f32", {"rope_parameters": YARN}, ("{}: rope_parameters:", "'yarn'", "linear or llama3;", "vLLM")),
        ("llama", "f32", {"hidden_act": "gelu"}, ("{}: hidden_act: is 'gelu'", "silu")),
        ("qwen2", "f32", {"layer_types": ["sliding_attention", "full_attention"]}, ("{}/config.json: sliding_window:", "vLLM")),
    ],
)
def test_what_llama_cpp_cannot_represent_is_refused(
    tmp_path: Path, architecture: str, dtype: str, changed: dict[str, Any], told: tuple[str, ...]
) -> None:
    folder = folder_of(architecture, tmp_path)
    edit(folder / "config.json", **changed)
    with refused(told[0].format(folder), *told[1:]):
        write_target(folder, "gguf", tmp_path / "out/t.gguf", dtype)
    assert not list(tmp_path.glob("out/*"))


def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    file = folder / "tokenizer.json"
    edit(file, pre_tokenizer={"type": "Whitespace"})
    with refused(f"{file}: pre_tokenizer:", "llama.cpp"):
        write_target(folder, "gguf", tmp_path / "t.gguf")
    edit(file, model={"type": "Unigram", "vocab": []})
    with refused(f"{file}: model: is Unigram", "byte-level BPE"):
        write_target(folder, "gguf", tmp_path / "t.gguf")
    with refused("--layout: onnx:", "known: gguf"):
        write_target(folder, "onnx", tmp_path / "t.onnx")
