"""EAGLE-3 drafts as optimum-intel converts them for OpenVINO, held against what its class LlamaEagle3ForCausalLM has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from longspec.atomic_files import files_below, read_json
from tests.draft.conftest import Verb
from tests.draft.eagle3_drafts import IDS, SHAPE, make_draft
from tests.targets import EAGLE3_TARGETS

# Of optimum-intel 2.2.0's state dict for a draft 32 wide with 4 heads of 12, 2 key/value heads and 8 tokens of 97, less
# model. and less embed_tokens, which are the target's.
ASKED_FOR = {
    "d2t": (8,),
    "t2d": (97,),
    "fc.weight": (32, 96),
    "lm_head.weight": (8, 32),
    "norm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.self_attn.k_proj.weight": (24, 64),
    "midlayer.self_attn.o_proj.weight": (32, 48),
    "midlayer.self_attn.q_proj.weight": (48, 64),
    "midlayer.self_attn.v_proj.weight": (24, 64),
}


def export(verb: Verb, folder: Path, *more: str) -> Path:
    verb("export", folder, "--layout", "openvino", "--out", folder.parent / "exported", *more)
    return folder.parent / "exported"


def test_tensors_and_layers_are_those_that_openvino_reads(verb: Verb, tmp_path: Path) -> None:
    folder = make_draft(tmp_path)
    out = export(verb, folder, "--dtype", "f16")
    assert files_below(out) == ["config.json", "model.safetensors"]
    found, own = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == ASKED_FOR
    assert all(torch.equal(tensor, own[name].to(tensor.dtype)) for name, tensor in found.items())
    assert (found["fc.weight"].dtype, found["d2t"].dtype) == (torch.float16, torch.int64)
    assert (found["d2t"] + torch.arange(8)).tolist() == list(IDS)
    config = read_json(out / "config.json")
    assert config["hidden_layers_list"] == [1, 3, 5], "outputs, of layers 2, 4 and 6 the inputs"
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], 8)
    layer = LlamaConfig(**config)
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(layer, name) == SHAPE[name]
    assert "draft" not in config, "a folder for another program, not a draft's"


def test_a_draft_of_all_tokens_has_both_tensors_too(verb: Verb, tmp_path: Path) -> None:
    found = load_file(export(verb, make_draft(tmp_path, vocabulary=None)) / "model.safetensors")
    assert found.keys() == ASKED_FOR.keys()
    assert found["d2t"].tolist() == [0] * 97
    assert found["t2d"].all()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ({"fc_norm": True}, [], r"draft/config\.json: recipe\.method\.fc_norm: true: OpenVINO has no place for it; train with"),
        ({"norm_output": True}, [], r"recipe\.method\.norm_output: true: OpenVINO has no place for it"),
        ({"norm_before_residual": True}, [], r"recipe\.method\.norm_before_residual: true: OpenVINO has no place for it"),
        ({"norm_before_fc": True}, [], r"recipe\.method\.norm_before_fc: true: OpenVINO has no place for it"),
        ({"layers": [0, 4, 6]}, [], r"recipe\.method\.layers: \[0, 4, 6\]: OpenVINO reads outputs of layers, and layer 0's"),
        (
            {"sliding_window": 64},
            [],
            r"recipe\.method\.sliding_window: 64: drafts see all of a text in OpenVINO, here texts of",
        ),
        ({"sliding_window": 64}, ["--context", "65"], r"here 65 tokens; keep to texts of 64 tokens \(of an evaluation"),
        ({}, ["--dtype", "q8_0"], r"--dtype: q8_0: is unknown to the layout openvino; give one of f32, f16, bf16"),
    ],
)
def test_what_openvino_cannot_represent_is_refused(
    verb: Verb, tmp_path: Path, method: dict[str, Any], options: list[str], message: str
) -> None:
    folder = make_draft(tmp_path, **method)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=message):
        export(verb, folder, *options)
    assert sorted(tmp_path.iterdir()) == before


def test_a_window_as_wide_as_the_texts_is_none(verb: Verb, tmp_path: Path) -> None:
    config = read_json(export(verb, make_draft(tmp_path, sliding_window=64), "--context", "64") / "config.json")
    assert "sliding_window" not in config


@pytest.mark.parametrize("family", ["glm4", "gpt_oss", "olmo2", "qwen3_moe"])
def test_targets_whose_layers_have_other_sums_are_refused(verb: Verb, tmp_path: Path, family: str) -> None:
    folder = make_draft(tmp_path, EAGLE3_TARGETS[family], layers=[1, 2, 3])
    with pytest.raises(SystemExit, match=rf"target: model_type: {family}: OpenVINO finds the outputs of layers in targets of"):
        export(verb, folder)


def test_heads_that_turn_in_part_are_refused(verb: Verb, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, EAGLE3_TARGETS["phi3-partial"], layers=[1, 2, 3])
    with pytest.raises(SystemExit, match=r"rope_parameters: partial_rotary_factor: 0\.5: a draft in OpenVINO turns whole"):
        export(verb, folder)
