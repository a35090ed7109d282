"""Drafts as GGUF files, held against what llama.cpp's loaders ask for (src/models/eagle3.cpp, dflash.cpp)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.draft.conftest import Verb
from tests.draft.eagle3_drafts import IDS, TARGET, make_draft, write_tokenizer
from tests.methods import test_dflash_files as dflash

# Of a draft 32 wide with 4 heads of 12, 2 key/value heads and 8 tokens; rows first.
ASKED_FOR = {
    "d2t": (8,),
    "fc.weight": (32, 96),
    "output.weight": (8, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_norm_2.weight": (32,),
    "blk.0.attn_q.weight": (48, 64),
    "blk.0.attn_k.weight": (24, 64),
    "blk.0.attn_v.weight": (24, 64),
    "blk.0.attn_output.weight": (32, 48),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (48, 32),
    "blk.0.ffn_up.weight": (48, 32),
    "blk.0.ffn_down.weight": (32, 48),
}


def export(verb: Verb, folder: Path, *more: str) -> Any:
    write_tokenizer(folder)
    verb("export", folder, "--layout", "gguf", "--out", folder.parent / "d.gguf", *more)
    return gguf.GGUFReader(folder.parent / "d.gguf")


def test_tensors_and_keys_are_those_that_llama_cpp_loads(verb: Verb, tmp_path: Path) -> None:
    """A window as wide as the texts is none."""
    folder = make_draft(tmp_path, norm_before_residual=True, sliding_window=64)
    reader = export(verb, folder, "--dtype", "f32", "--context", "64")
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert {name: array.shape for name, array in found.items()} == ASKED_FOR
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "eagle3"
    assert not [name for name in keys if "window" in name]
    assert [keys[f"eagle3.{name}"] for name in ("target_layers", "target_hidden_size", "block_count")] == [[2, 4, 6], 32, 1]
    assert (keys["eagle3.norm_before_residual"], keys["eagle3.norm_before_fc"]) == (True, False)
    heads = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "rope.dimension_count")
    assert [keys[f"eagle3.{name}"] for name in heads] == [4, 2, 12, 12]
    assert (keys["eagle3.vocab_size"], len(keys["tokenizer.ggml.tokens"]), keys["tokenizer.ggml.pre"]) == (97, 97, "gpt-2")
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.token_type"][96]) == (5, gguf.TokenType.UNUSED)
    own = load_file(folder / "model.safetensors")
    assert found["d2t"].dtype == np.int64
    assert tuple(found["d2t"].tolist()) == IDS, "the target's tokens themselves, where d2t of our file is less by its place"
    first_head = [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]  # row i turns with row i + 6
    rows = [12 * head + row for head in range(2) for row in first_head]
    assert np.array_equal(found["blk.0.attn_k.weight"], own["midlayer.self_attn.k_proj.weight"][rows].numpy())
    assert np.array_equal(found["blk.0.attn_norm_2.weight"], own["midlayer.hidden_norm.weight"].numpy())
    assert np.array_equal(found["blk.0.attn_norm.weight"], own["midlayer.input_layernorm.weight"].numpy())
    assert np.array_equal(found["fc.weight"], own["fc.weight"].numpy())


def test_a_norm_before_fc_and_a_draft_of_all_tokens(verb: Verb, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, norm_before_fc=True, vocabulary=None)
    reader = export(verb, folder)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == ASKED_FOR.keys() - {"d2t"} | {"enc.output_norm.weight"}
    assert reader.fields["eagle3.norm_before_fc"].contents() is True
    norm = load_file(folder / "model.safetensors")["input_norm.weight"].float()
    assert torch.equal(torch.from_numpy(np.array(found["enc.output_norm.weight"].data)), norm)
    assert found["fc.weight"].tensor_type == gguf.GGMLQuantizationType.BF16, "the target's dtype"


@pytest.mark.parametrize("window", [None, 9])
def test_a_dflash_draft_has_its_layers_norms_and_its_block(verb: Verb, tmp_path: Path, window: int | None) -> None:
    """Rows stand as they are, since this architecture turns as transformers does."""
    TARGET.save_pretrained(tmp_path / "target")
    reduced = {} if window is None else dflash.REDUCED
    settings = replace(dflash.SETTINGS, sliding_window=window, tied_k_norm=False, **reduced)
    dflash.write(tmp_path / "draft", str(tmp_path / "target"), settings)
    reader = export(verb, tmp_path / "draft", "--dtype", "f32")
    keys = {name.removeprefix("dflash."): field.contents() for name, field in reader.fields.items()}
    wanted = {"block_count": 2, "block_size": 6, "target_layers": [1, 4, 6], "tokenizer.ggml.mask_token_id": 90}
    wanted |= {"general.architecture": "dflash", "attention.causal": window is not None}
    wanted |= {} if window is None else {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, True]}
    assert {name: keys[name] for name in wanted} == wanted
    assert (window is None) == ("attention.sliding_window" not in keys)
    own = load_file(tmp_path / "draft/model.safetensors")
    names = {"fc": "fc", "norm": "output_norm", "hidden_norm": "enc.output_norm"} | ({"lm_head": "output"} if window else {})
    parts = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.k_proj": "attn_k"}
    parts |= {"self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names |= {f"layers.{n}.{part}": f"blk.{n}.{name}" for n in range(2) for part, name in parts.items()}
    found = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert window is None or tuple(found.pop("d2t").tolist()) == IDS
    assert found.keys() == {f"{name}.weight" for name in names.values()}
    for ours, name in names.items():
        assert np.array_equal(found[f"{name}.weight"], own[f"{ours}.weight"].float().numpy()), name
