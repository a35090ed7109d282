"""The layouts of the package `speculators` and for OpenVINO, and the final folder of an EAGLE-3 run on its way to the hub."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from longspec.atomic_files import describe_files, files_below, read_json, write_json, write_text
from longspec.config import compose, to_yaml
from longspec.draft.hub_upload import model_card
from longspec.methods.eagle3.method import METHOD
from tests.draft.conftest import Verb
from tests.draft.eagle3_drafts import SHAPE, SHAPES, TARGET, make_draft, write_tokenizer
from tests.refusals import refused
from tests.targets import EAGLE3_TARGETS, LLAMA3


def export(verb: Verb, folder: Path, layout: str = "speculators", *more: str) -> Path:
    verb("export", folder, "--layout", layout, "--out", folder.parent / "exported", *more)
    return folder.parent / "exported"


def test_names_shapes_and_numbers_are_those_of_speculators(verb: Verb, tmp_path: Path) -> None:
    folder = make_draft(tmp_path, fc_norm=True)
    out = export(verb, folder)
    assert files_below(out) == ["config.json", "model.safetensors"]
    found, own = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    # As speculators 0.9.0 saved them (Eagle3DraftModel.save_pretrained), less embed_tokens, which it takes of its verifier.
    theirs = SHAPES | {f"fc_norm.{number}.weight": (32,) for number in range(3)}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name.replace("midlayer.", "layers.0."): shape for name, shape in theirs.items()
    }
    assert all(torch.equal(tensor, own[name.replace("layers.0", "midlayer")]) for name, tensor in found.items())


def test_the_configuration_is_that_of_speculators(verb: Verb, tmp_path: Path) -> None:
    """Fields and values as Eagle3SpeculatorConfig 0.9.0 writes them."""
    target = Qwen3Config(**SHAPE, rope_parameters=LLAMA3)
    content = read_json(export(verb, make_draft(tmp_path, target, sliding_window=64, norm_output=True)) / "config.json")
    layer = LlamaConfig(**content.pop("transformer_layer_config"))
    assert content == {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 8,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,  # vLLM takes a missing one for true
        "norm_output": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "owner/target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "eos_token_id"):
        assert getattr(layer, name) == SHAPE[name]
    assert (layer.rope_parameters, layer.num_hidden_layers) == (target.rope_parameters, 1)
    assert (layer.layer_types, layer.sliding_window) == (["sliding_attention"], 64)


def test_tensors_and_layers_are_those_that_openvino_reads(verb: Verb, tmp_path: Path) -> None:
    """As optimum-intel's class LlamaEagle3ForCausalLM has them, less embed_tokens. A window as wide as the texts is none."""
    folder = make_draft(tmp_path, sliding_window=64)
    out = export(verb, folder, "openvino", "--dtype", "f16", "--context", "64")
    assert files_below(out) == ["config.json", "model.safetensors"]
    found, own = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    assert all(torch.equal(tensor, own[name].to(tensor.dtype)) for name, tensor in found.items())
    assert (found["fc.weight"].dtype, found["d2t"].dtype) == (torch.float16, torch.int64)
    config = read_json(out / "config.json")
    assert config["hidden_layers_list"] == [1, 3, 5], "outputs, of layers 2, 4 and 6 the inputs"
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], 8)
    layer = LlamaConfig(**config)
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(layer, name) == SHAPE[name]
    assert not {"draft", "sliding_window"} & config.keys(), "a folder for another program, not a draft's"


def test_for_openvino_a_draft_of_all_tokens_has_both_tensors_too(verb: Verb, tmp_path: Path) -> None:
    found = load_file(export(verb, make_draft(tmp_path, vocabulary=None), "openvino") / "model.safetensors")
    assert found.keys() == SHAPES.keys()
    assert found["d2t"].tolist() == [0] * 97
    assert found["t2d"].all()


def test_a_damaged_folder_leaves_nothing(verb: Verb, tmp_path: Path) -> None:
    folder = make_draft(tmp_path)
    tensors, before = load_file(folder / "model.safetensors"), sorted(tmp_path.iterdir())
    save_file(tensors | {"fc.weight": tensors["fc.weight"].fill_(torch.nan)}, folder / "model.safetensors")
    with refused(folder / "model.safetensors", "fc.weight: 3072 of its 3072", "NaN", kind=SystemExit) as told:
        export(verb, folder)
    assert "\n" not in str(told.value)
    (folder / "config.json").unlink()
    with refused(f"{folder}:", "no config.json", kind=SystemExit):
        export(verb, folder)
    assert sorted(tmp_path.iterdir()) == before


OTHER_LAYERS, WINDOW = {"layers": [1, 2, 3]}, {"sliding_window": 64}
PARTIAL, WHOLE = EAGLE3_TARGETS["phi3-partial"], "recipe.method.rope_parameters: {rope_type: default, rope_theta: 10000.0}"


@pytest.mark.parametrize(
    ("layout", "target", "method", "options", "key", "facts"),
    [
        ("gguf", TARGET, {"fc_norm": True}, "", "recipe.method.fc_norm: true", ["llama.cpp"]),
        ("gguf", TARGET, {"norm_output": True}, "", "recipe.method.norm_output: true", ["llama.cpp"]),
        ("gguf", TARGET, WINDOW, "", "recipe.method.sliding_window: 64", ["llama.cpp", "any length"]),
        ("gguf", TARGET, WINDOW, "--context=65", "recipe.method.sliding_window: 64", [" 65 tokens", " 64 tokens", "--context"]),
        ("gguf", TARGET, {}, "--dtype=q8_0", "--dtype: q8_0", ["blk.0.ffn_down.weight", " 48 "]),
        ("openvino", TARGET, {"norm_before_residual": True}, "", "recipe.method.norm_before_residual: true", ["OpenVINO"]),
        ("openvino", TARGET, {"norm_before_fc": True}, "", "recipe.method.norm_before_fc: true", ["OpenVINO"]),
        ("openvino", TARGET, {"layers": [0, 4, 6]}, "", "recipe.method.layers: [0, 4, 6]", ["OpenVINO"]),
        ("openvino", TARGET, WINDOW, "--context=65", "recipe.method.sliding_window: 64", ["OpenVINO", " 65 tokens"]),
        ("openvino", TARGET, {}, "--dtype=q8_0", "--dtype: q8_0", ["openvino", "f32, f16, bf16"]),
        ("openvino", EAGLE3_TARGETS["olmo2"], OTHER_LAYERS, "", "target: model_type: olmo2", ["OpenVINO", "llama"]),
        ("openvino", PARTIAL, OTHER_LAYERS, "", "rope_parameters: partial_rotary_factor: 0.5", [WHOLE]),
        ("onnx", TARGET, {}, "", "--layout: onnx", ["gguf, openvino, speculators"]),
        ("speculators", TARGET, {}, "--context=65", "--context: 65", ["speculators"]),
    ],
)
def test_what_a_program_cannot_represent_is_refused(
    verb: Verb, tmp_path: Path, layout: str, target: Any, method: dict[str, Any], options: str, key: str, facts: list[str]
) -> None:
    folder = make_draft(tmp_path, target, **method)
    write_tokenizer(folder)
    before = sorted(tmp_path.iterdir())
    with refused(key if key.startswith("--") else f"{folder}/config.json: {key}", *facts, kind=SystemExit):
        export(verb, folder, layout, *options.split())
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_name_and_a_taken_one_are_refused(verb: Verb, tmp_path: Path) -> None:
    folder = make_draft(tmp_path)
    with refused("--out: missing", "gguf", "name what", kind=SystemExit):
        verb("export", folder, "--layout", "gguf")
    write_text(tmp_path / "exported/mine.txt", "mine")
    with refused(f"--out: {tmp_path}/exported", "already", "remove it", kind=SystemExit):
        export(verb, folder)
    assert files_below(tmp_path / "exported") == ["mine.txt"]
    of_target = ("--out", str(tmp_path / "d.gguf"), "--target", str(tmp_path / "t.gguf"))
    with refused("--layout: openvino: targets", "gguf", kind=SystemExit):
        verb("export", folder, "--layout", "openvino", *of_target)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"target_path": str(tmp_path / "gone")})
    with refused(f"{tmp_path}/gone/config.json:", kind=SystemExit):
        verb("export", folder, "--layout", "gguf", *of_target)
    assert not (tmp_path / "d.gguf").exists()


def final_draft(verb: Verb, folder: Path, **method: Any) -> Path:
    """The final folder of a run of one stage."""
    draft = make_draft(folder, **method)
    write_text(folder / "base/recipe.yaml", (folder / "recipe.yaml").read_text())
    write_text(folder / "base/runtime.yaml", to_yaml(compose("train", ["run=demo"]).runtime))
    times = {"training_seconds": 1.0, "world_size": 1, "zero_stage": 1, "versions": {}}
    write_json(folder / "base/checkpoint.json", {"step": 100, "tokens_seen": 10**6, "identity": {}} | times)
    write_text(folder / "target/tokenizer.json", "{}")
    write_json(
        folder / "tokenizer.json",
        {"path": str(folder / "target"), "files": describe_files(folder / "target", ["tokenizer.json"])},
    )
    inputs = {"--target": "target.json", "--tokenizer": "tokenizer.json", "--data": "vocabulary.json", "--stages": "base"}
    paths = [part for option, name in inputs.items() for part in (option, folder / name)]
    verb("final", "--draft", draft, *paths, "--out", folder / "final_draft")
    return folder / "final_draft"


@pytest.mark.parametrize(("window", "revision"), [(None, "main"), (64, "v2")])
def test_the_card_says_how_to_serve_it(verb: Verb, tmp_path: Path, window: int | None, revision: str) -> None:
    folder = final_draft(verb, tmp_path, sliding_window=window)
    assert METHOD.stored_settings(folder) == METHOD.stored_settings(tmp_path / "draft")
    card = model_card(folder, "me/draft", revision, None, None)
    header, body = card.split("---\n", 2)[1:]
    assert yaml.safe_load(header)["base_model"] == "owner/target"
    assert "eagle3" in yaml.safe_load(header)["tags"]
    commands = [line for line in body.replace(" \\\n    ", " ").splitlines() if line.startswith(("vllm", "python -m sglang"))]
    tag, told = (', "revision": "v2"', " --speculative-draft-model-revision v2") if revision == "v2" else ("", "")
    chain = '"num_speculative_tokens": 3'
    assert commands == [
        f"""vllm serve owner/target --speculative-config '{{"method": "eagle3", "model": "me/draft"{tag}, {chain}}}'""",
        "python -m sglang.launch_server --model-path owner/target --speculative-algorithm EAGLE3"
        f" --speculative-draft-model-path me/draft{told} --speculative-num-steps 3 --speculative-eagle-topk 1"
        # What counts the query itself in config.json does not in SGLang.
        f" --speculative-num-draft-tokens 4{'' if window is None else ' --speculative-draft-window-size 63'}",
    ]
    assert ("sliding window 64" in body) == (window == 64)
    assert "layers 2, 4, 6, draft vocabulary\n8 of 97 tokens" in body
    assert "custom_generate=draft" in body
    assert "Not measured." in body
    assert str(tmp_path) not in card
    described = body.split("\n\n\n## Acceptance")[0]
    assert ("\n\n\n" in described, "\n\n```\n\n" in described) == (False, False)
    normed = model_card(final_draft(verb, tmp_path / "normed", norm_output=True), "me/draft", revision, None, None)
    assert ("SGLang does not read norm_output" in normed, "sglang.launch_server" in normed) == (True, False)
