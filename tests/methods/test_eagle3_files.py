"""EAGLE-3's draft folders and recipes: what engines find in them, what comes back from them, what is allowed and refused."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Phi3Config, PretrainedConfig, Qwen2Config

from longspec.atomic_files import read_json, write_json
from longspec.methods.eagle3 import settings as eagle3
from longspec.methods.eagle3.layer import Eagle3Layer
from longspec.methods.eagle3.method import METHOD
from longspec.methods.eagle3.settings import Settings
from longspec.models.attention.visibility import Visibility
from longspec.models.draft_attention import Rotation
from tests.draft.eagle3_drafts import IDS, SHAPE, SHAPES, TARGET, make_draft, random_state, recipe_of
from tests.refusals import refused
from tests.targets import LLAMA3, YARN

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A draft folder."""
    return partial(make_draft, tmp_path)


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("fc_norm", [False, True])
def test_weights_have_the_names_shapes_and_numbers_that_engines_load(make: Make, fc_norm: bool) -> None:
    folder = make(fc_norm=fc_norm)
    norms = {f"fc_norm.{n}.weight": (32,) for n in range(3)} if fc_norm else {}
    for found in (load_file(folder / "model.safetensors"), torch.load(folder / "draft_model_weights.pth", weights_only=True)):
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES | norms
        state = random_state(TARGET, recipe_of(fc_norm=fc_norm))
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert (found["d2t"].dtype, found["t2d"].dtype) == (torch.int64, torch.bool)
        # SGLang's way from a draft token to the target's, and vLLM's.
        assert (found["d2t"] + torch.arange(8)).tolist() == list(IDS)
        assert [token for token, drafted in enumerate(found["t2d"].tolist()) if drafted] == list(IDS)


def test_a_draft_of_all_tokens_has_no_tensors_of_a_vocabulary(make: Make) -> None:
    """vLLM makes no place for d2t where draft_vocab_size is the target's vocab_size, and refuses the file."""
    folder = make(vocabulary=None)
    assert not load_file(folder / "model.safetensors").keys() & {"d2t", "t2d"}
    assert read_json(folder / "config.json")["draft_vocab_size"] == 97
    settings = METHOD.stored_settings(folder)
    assert (settings.vocabulary, settings.ids) == (None, None)
    METHOD.load(Eagle3Layer(TARGET, settings), folder, TARGET, settings)
    assert METHOD.published({}, Settings(vocabulary=3, ids=(0, 1, 2), target_vocabulary=3)) == {}


def test_transformers_reads_the_configuration_as_a_llama(make: Make) -> None:
    folder = make(sliding_window=64)
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is LlamaConfig
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, name) == SHAPE[name]
    for name in ("max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == SHAPE[name]
    assert (config.architectures, config.num_hidden_layers, config.draft_vocab_size) == (["LlamaForCausalLMEagle3"], 1, 8)
    assert (config.hidden_act, config.tie_word_embeddings, config.dtype) == ("silu", False, torch.bfloat16)
    assert (config.layer_types, config.sliding_window) == (["sliding_attention"], 64)
    assert (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output) == (False,) * 4
    assert LlamaConfig.from_pretrained(folder).to_diff_dict() == config.to_diff_dict()
    # vLLM takes them for inputs of layers, and looks at the top first; SGLang for outputs, in eagle_config alone.
    content = read_json(folder / "config.json")
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6] == content["settings"]["layers"]
    assert content["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    body = AutoModelForCausalLM.from_config(config)
    assert body.model.layers[0].self_attn.q_proj.out_features == SHAPES["midlayer.self_attn.q_proj.weight"][0]


@pytest.mark.parametrize(("family", "rope"), [(LlamaConfig, LLAMA3), (Qwen2Config, YARN)])
def test_rotations_and_positions_travel(make: Make, family: Any, rope: dict[str, Any]) -> None:
    """In the form of transformers 5, in that of before, and to the same frequencies from either."""
    target = family(**SHAPE, rope_parameters=rope)
    folder = make(target)
    content = read_json(folder / "config.json")
    assert content["max_position_embeddings"] == 4096
    assert (content["rope_parameters"], content["rope_theta"]) == (target.rope_parameters, rope["rope_theta"])
    scaling = {name: value for name, value in target.rope_parameters.items() if name != "rope_theta"}
    assert content["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)

    def frequencies(config: PretrainedConfig) -> Tensor:
        return AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq

    old, new = dict(content), dict(content)
    del old["rope_parameters"], new["rope_theta"], new["rope_scaling"]
    for form in (content, old, new):
        assert torch.equal(frequencies(LlamaConfig(**form)), frequencies(target))


def test_settings_come_back_and_are_those_of_the_recipe(make: Make) -> None:
    own = {"sliding_window": 64, "fc_norm": True, "norm_output": True}
    folder = make(**own)
    settings = METHOD.stored_settings(folder)
    assert settings == Settings(layers=(2, 4, 6), vocabulary=8, steps=5, decay=0.5, ids=IDS, target_vocabulary=97, **own)
    METHOD.load(Eagle3Layer(TARGET, settings), folder, TARGET, eagle3.of(recipe_of(**own)))


def spoil(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (spoil("fc.weight", lambda t: t.to(torch.int8)), ("fc.weight: is torch.int8", "torch.float32")),
        (spoil("fc.weight", lambda t: t.fill_(torch.nan)), ("fc.weight: 3072 of its 3072", "NaN")),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), ("fc_norm.0.weight: unknown", "recipe.method.fc_norm")),
        (spoil("d2t", lambda t: t[:7].clone()), ("d2t: is torch.int64 [7]", "torch.int64 [8]")),
        (spoil("d2t", lambda t: t.flip(0)), ("d2t: draft token 1 ", "'s 36", "90 to 96")),
        (lambda tensors: tensors.pop("d2t"), ("d2t: is missing", "torch.int64 [8]")),
    ],
)
def test_a_strange_tensor_is_named(make: Make, change: Any, facts: tuple[str, ...]) -> None:
    folder = make()
    settings = METHOD.stored_settings(folder)
    layer = Eagle3Layer(TARGET, settings)
    edit_weights(folder, change)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with refused(folder / "model.safetensors", *facts):
        METHOD.load(layer, folder / "model.safetensors", TARGET, settings)
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())


def test_another_vocabulary_is_refused(make: Make) -> None:
    folder = make()
    other = Settings(layers=(2, 4, 6), vocabulary=8, ids=(*IDS[:4], 20, *IDS[5:]), target_vocabulary=97)
    with refused(f"{folder}/model.safetensors: d2t", "recipe.method.vocabulary_from"):
        METHOD.load(Eagle3Layer(TARGET, other), folder, TARGET, other)
    with torch.device("meta"):
        planned = Eagle3Layer(TARGET, other)
    METHOD.check_state(planned, load_file(folder / "model.safetensors"), "file")  # holds no numbers to compare


@pytest.mark.parametrize(
    ("fields", "place", "fact"),
    [
        ({"settings": {"ids": [1]}}, "/config.json: settings: ids", "unknown"),
        ({"draft": "glide"}, "/config.json: draft: is 'glide'", "'eagle3'"),
        (None, ":", "config.json beside it"),
    ],
)
def test_strange_settings_are_refused(make: Make, fields: dict[str, Any] | None, place: str, fact: str) -> None:
    folder = make()
    content = {"model_type": "llama"} if fields is None else read_json(folder / "config.json")  # a target's, say
    for name, value in (fields or {}).items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    write_json(folder / "config.json", content)
    with refused(f"{folder}{place}", fact):
        METHOD.stored_settings(folder)


def test_a_draft_of_another_meaning_is_neither_trained_nor_measured(make: Make) -> None:
    folder = make()
    wanted = eagle3.of(recipe_of(layers=[1, 4, 6], norm_output=True, sliding_window=9))
    values = {"layers": r"\(1, 4, 6\), .* \(2, 4, 6\)", "norm_output": "True, .* False", "sliding_window": "9, .* None"}
    with refused(folder, *(re.compile(f"recipe.method.{key}: [^;]* {both};") for key, both in values.items())):
        METHOD.load(Eagle3Layer(TARGET, wanted), folder, TARGET, wanted)


STEPS = 5  # of recipe_of


def test_a_window_shows_the_text_in_every_step() -> None:
    """As many keys as steps: the last step sees its own chain and the text's newest key, and with one key less no text."""
    eagle3.check(recipe_of(sliding_window=STEPS))
    for window, keys in ((STEPS, [1]), (STEPS - 1, [0])):
        of_last_step = Visibility(window=window - 1 - (STEPS - 1))
        first, last = of_last_step.bounds_BS(1, 9, "cpu")
        assert (last - first + 1).flatten().tolist() == keys
    with refused("recipe.method.sliding_window: 4", "5 steps", "recipe.draft.steps", "sees 4", "give 5"):
        eagle3.check(recipe_of(sliding_window=STEPS - 1))


@pytest.mark.parametrize("layers", [3, 6])
def test_layers_that_are_advised_are_allowed(layers: int) -> None:
    """A small target needs layers of its own."""
    with refused("recipe.method.layers") as told:
        eagle3.fits(recipe_of(), layers, 97)
    advised = re.search(r"such as (\[.*?\])", str(told.value))
    recipe = recipe_of(layers=json.loads(advised[1]))
    eagle3.check(recipe)
    eagle3.fits(recipe, layers, 97)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 1.0, "factor": None},
        YARN | {"beta_fast": 32, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0},
        LLAMA3,
    ],
)
def test_a_rotation_that_is_allowed_turns(rope: dict[str, Any]) -> None:
    """What passes the plan has every number that the layer's rotation reads, and turns whole heads."""
    eagle3.check(recipe_of(rope_parameters=rope))
    config = LlamaConfig(num_attention_heads=1, hidden_size=8, max_position_embeddings=4096)
    config.rope_parameters = rope
    cos_BSD, _ = Rotation(config)(torch.ones(1), torch.arange(3)[None])
    assert cos_BSD.shape == (1, 3, 8)
    assert bool(cos_BSD.isfinite().all())


def test_a_field_of_the_targets_changes_no_rotation_of_the_drafts_own() -> None:
    """Phi-3's configuration has positions of its own, which transformers would put into any rotation that is given to it."""
    own = YARN | {"original_max_position_embeddings": 64}
    turned = []
    for kind in (LlamaConfig, Phi3Config):
        config = kind(num_attention_heads=1, num_key_value_heads=1, hidden_size=8, max_position_embeddings=4096, pad_token_id=0)
        config.rope_parameters = dict(own)
        turned.append(Rotation(config)(torch.ones(1), torch.arange(90)[None])[0])
        assert config.rope_parameters == own
    assert torch.equal(*turned)


@pytest.mark.parametrize(
    ("rope", "place", "fact"),
    [
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "rope_type yarn"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "factor, original_max_position_embeddings", "missing; rope_type yarn"),
        ({"rope_type": "default", "rope_theta": "abc"}, "rope_theta: is 'abc'", "above 0"),
        ({"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}, "factor: rope_type default", "rope_theta alone"),
        ({"rope_type": ["yarn"], "rope_theta": 1e4}, "rope_type ['yarn']", "llama3"),
    ],
)
def test_a_rotation_that_the_layer_cannot_turn_by_is_named(rope: dict[str, Any], place: str, fact: str) -> None:
    with refused(f"recipe.method.rope_parameters: {place}", fact):
        eagle3.check(recipe_of(rope_parameters=rope))
