"""A DFlash draft's folder is the layout of z-lab/dflash, which engines load; published folders are read back into ours."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspec import methods
from longspec.atomic_files import read_json, write_json
from longspec.config import Recipe
from longspec.draft import folder
from longspec.draft.folder import config_of, write_draft
from longspec.draft.importing import import_draft
from longspec.methods.dflash import gguf_layout
from longspec.methods.dflash import settings as dflash
from longspec.methods.dflash.layer import DFlashLayer
from longspec.methods.dflash.method import METHOD
from longspec.methods.dflash.published import read_published
from longspec.methods.dflash.settings import Settings
from tests.draft.eagle3_drafts import IDS, TARGET
from tests.refusals import refused
from tests.targets import LLAMA3

FOLDER = Path(dflash.__file__).parent
DEPTH, BLOCK, HIDDEN, INNER, HEADS, KEY_VALUES, WIDTH = 2, 6, 32, 48, 4, 2, 12
SETTINGS = Settings(layers=(1, 4, 6), depth=DEPTH, block_size=BLOCK, mask_token=90)
REDUCED = {"vocabulary": len(IDS), "ids": IDS, "target_vocabulary": TARGET.vocab_size}
OURS = ("draft", "settings", "target", "target_path", "target_source", "stage", "num_parameters", "model_target")
# As their readers take them (shared facts of z-lab's model.py and vLLM's qwen3_dflash.py), shapes of TARGET.
OF_A_LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
    "self_attn.k_proj": (KEY_VALUES * WIDTH, HIDDEN),
    "self_attn.v_proj": (KEY_VALUES * WIDTH, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
    "self_attn.q_norm": (WIDTH,),
    "self_attn.k_norm": (WIDTH,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
TENSORS = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)} | {
    f"layers.{number}.{name}.weight": shape for number in range(DEPTH) for name, shape in OF_A_LAYER.items()
}


def random_state(settings: Settings) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn_like(tensor) for name, tensor in DFlashLayer(TARGET, settings).state_dict().items()}


@pytest.fixture
def target_path(tmp_path: Path) -> str:
    TARGET.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def write(folder: Path, target_path: str, settings: Settings) -> dict[str, Tensor]:
    """A draft folder of random weights; returns the layer's state dict."""
    state = random_state(settings)
    write_draft(folder, METHOD.published(state, settings), config_of(METHOD, settings, target_path, "hf:owner/target", "base"))
    return state


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, replace(SETTINGS, sliding_window=9, tied_k_norm=False), replace(SETTINGS, **REDUCED)],
    ids=["plain", "sliding", "reduced"],
)
def test_a_folder_is_what_engines_read_and_what_we_read_back(tmp_path: Path, target_path: str, settings: Settings) -> None:
    state = write(tmp_path / "draft", target_path, settings)
    found, content = load_file(tmp_path / "draft/model.safetensors"), read_json(tmp_path / "draft/config.json")
    more = {"lm_head.weight": (len(IDS), HIDDEN), "d2t": (len(IDS),), "t2d": (97,)} if settings.ids else {}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == TENSORS | more
    norms = [found[f"layers.{number}.self_attn.k_norm.weight"] for number in range(DEPTH)]
    assert torch.equal(*norms) is settings.tied_k_norm
    wanted = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [0, 3, 5]},
        "num_target_layers": 9,
        "num_hidden_layers": DEPTH,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUES,
        "head_dim": WIDTH,
        "vocab_size": 97,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": [f"{'full' if settings.sliding_window is None else 'sliding'}_attention"] * DEPTH,
        "sliding_window": settings.sliding_window,
        "use_sliding_window": settings.sliding_window is not None,
    }
    assert {name: content[name] for name in wanted} == wanted
    assert content.get("draft_vocab_size") == (len(IDS) if settings.ids else None)
    read = METHOD.stored_settings(tmp_path / "draft")
    assert read == settings
    layer = METHOD.layer(TARGET, read)
    METHOD.load(layer, tmp_path / "draft", TARGET, read)
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in state.items())
    # Others' folders are ours without what is ours alone. What is made of one is evaluated and trained further.
    theirs = {name: value for name, value in content.items() if name not in OURS}
    (tmp_path / "published").mkdir()
    save_file(found, tmp_path / "published/model.safetensors")
    write_json(tmp_path / "published/config.json", theirs)
    import_draft(tmp_path / "published", Path(target_path), tmp_path / "imported", {})
    imported = METHOD.stored_settings(tmp_path / "imported")
    assert imported == settings
    METHOD.load(fresh := METHOD.layer(TARGET, imported), tmp_path / "imported", TARGET, imported)
    torch.testing.assert_close(fresh.state_dict(), state, rtol=0, atol=0)


def test_the_card_says_how_to_serve_it(tmp_path: Path, target_path: str) -> None:
    """As many drafted tokens as a block has slots behind its first one."""
    write(tmp_path / "draft", target_path, SETTINGS)
    loader = jinja2.FileSystemLoader([FOLDER.parent, Path(folder.__file__).parent])
    template = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined).get_template("dflash/card.md.j2")
    about = {"config": read_json(tmp_path / "draft/config.json"), "base_model": "owner/target"}
    body = template.render(**about, repository="me/draft", revision="main")
    commands = [line for line in body.replace(" \\\n    ", " ").splitlines() if line.startswith(("vllm", "python -m sglang"))]
    speculative = '{"method": "dflash", "model": "me/draft", "num_speculative_tokens": 5}'
    assert commands == [
        f"vllm serve owner/target --speculative-config '{speculative}'",
        "python -m sglang.launch_server --model-path owner/target --speculative-algorithm DFLASH "
        "--speculative-draft-model-path me/draft --speculative-num-draft-tokens 6",
    ]
    about["config"]["settings"]["vocabulary"] = 64  # a head of its own, which SGLang skips
    assert "sglang" not in template.render(**about, repository="me/draft", revision="main")
    assert "layers 1, 4, 6, the target's head, no sliding window" in body


def speculators_config(content: dict[str, Any]) -> dict[str, Any]:
    """As the package speculators 0.9.0 writes it."""
    layer = {name: content[name] for name in content if name not in (*OURS, "dflash_config", "block_size", "architectures")}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 4, 6],
        "mask_token_id": 90,
        "draft_vocab_size": len(IDS),
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }


def test_a_folder_of_speculators_is_read_alike(tmp_path: Path, target_path: str) -> None:
    settings = replace(SETTINGS, **REDUCED)
    state = write(tmp_path / "draft", target_path, settings)
    theirs = speculators_config(read_json(tmp_path / "draft/config.json"))
    assert methods.published_method(theirs) == "dflash"
    their_state, their_settings = read_published(tmp_path / "draft", theirs, TARGET, lambda: torch.empty(0))
    assert their_settings == settings
    assert all(torch.equal(their_state[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("change", "place", "fact"),
    [
        ({"attention_bias": True}, "attention_bias: is True", "has False"),
        ({"num_target_layers": 8}, "num_target_layers: is 8", "has 9"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "2 times sliding_attention"),
        ({"is_causal": True}, "is_causal: is True", "has False"),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [1]}}, "mask_token_id: 97", "0 to 96"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [8]}}, "target_layer_ids", "[9]"),
        ({"dflash_config": {"mask_token_id": 1, "sample_from_anchor": True}}, "sample_from_anchor: is True", "has False"),
        ({"block_size": 1}, "block_size", "2 to 64, is 1"),
    ],
)
def test_what_ours_cannot_be_is_refused_by_its_field(
    tmp_path: Path, target_path: str, change: dict[str, Any], place: str, fact: str
) -> None:
    write(tmp_path / "draft", target_path, SETTINGS)
    theirs = {name: x for name, x in read_json(tmp_path / "draft/config.json").items() if name not in OURS} | change
    with refused(f"{tmp_path}/draft/config.json: {place}", fact):
        read_published(tmp_path / "draft", theirs, TARGET, lambda: torch.empty(0))


SLIDES = {"sliding_window": 16, "layer_types": ["sliding_attention"] * DEPTH}


@pytest.mark.parametrize(
    ("change", "field", "causal"),
    [
        ({"use_swa": True, "layer_types": None, "swa_window_size": 16}, "is_causal", True),
        ({"use_swa": True, "sliding_window": 16}, "is_causal", True),
        (SLIDES, "sliding_window_non_causal", False),
    ],
)
def test_a_window_whose_slots_see_later_ones_is_refused(
    tmp_path: Path, target_path: str, change: dict[str, Any], field: str, causal: bool
) -> None:
    """As engines take it where the file says nothing; with a word of its own it is read."""
    write(tmp_path / "draft", target_path, replace(SETTINGS, **REDUCED))
    content = read_json(tmp_path / "draft/config.json") | change
    published = {name: x for name, x in content.items() if name not in OURS}
    theirs = speculators_config(content) if change is SLIDES else published
    theirs.pop(field, None)
    with refused(f"{tmp_path}/draft/config.json: {field}: is {not causal}", f"has {causal}"):
        read_published(tmp_path / "draft", theirs, TARGET, lambda: torch.empty(0))
    _, settings = read_published(tmp_path / "draft", theirs | {field: causal}, TARGET, lambda: torch.empty(0))
    assert settings.sliding_window == 16


def test_llama_3s_rotation_is_refused_for_llama_cpp(tmp_path: Path, target_path: str) -> None:
    """Its loader knows no such frequencies for this architecture, and its graph would not use them."""
    write(tmp_path / "draft", target_path, replace(SETTINGS, rope_parameters=LLAMA3))
    with refused(
        f"{tmp_path}/draft/config.json: rope_parameters: llama3", "recipe.method.rope_parameters: {rope_type: default"
    ):
        gguf_layout.write(tmp_path / "draft", tmp_path / "draft.gguf", None, None)


def test_norms_of_keys_that_differ_are_no_shared_one(tmp_path: Path, target_path: str) -> None:
    untied = replace(SETTINGS, tied_k_norm=False)
    write(tmp_path / "draft", target_path, untied)
    layer = METHOD.layer(TARGET, SETTINGS)
    content = read_json(tmp_path / "draft/config.json")
    file = tmp_path / "draft/model.safetensors"
    with refused(f"{file}: layers.1.self_attn.k_norm.weight", "layers.0.", "recipe.method.tied_k_norm: false"):
        METHOD.check_state(layer, load_file(file), file)
    save_file({**load_file(file), "mask_hidden": torch.zeros(HIDDEN)}, file)
    with refused(file, "mask_hidden: unknown"):
        METHOD.load(METHOD.layer(TARGET, untied), tmp_path / "draft", TARGET, untied)
    write_json(tmp_path / "draft/config.json", content | {"settings": content["settings"] | {"block_size": 7}})
    with refused(tmp_path / "draft", re.compile("recipe.method.block_size: .* 6, .* 7;")):
        METHOD.load(METHOD.layer(TARGET, untied), tmp_path / "draft", TARGET, untied)


def recipe_of(draft: dict[str, Any] | None = None, **method: Any) -> Any:
    recipe = OmegaConf.structured(Recipe(method=dflash.Method(**method), draft=dflash.Draft(**draft or {}), stage="base"))
    recipe.data.sequence_length = 64
    return recipe


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"layers": [0, 2]}, ("layers: [0, 2]", "from 1")),
        ({"layers": [2, 4], "stored_layers": [2]}, ("stored_layers: [2]", "recipe.method.layers", "[2, 4]")),
        ({"stored_layers": [2]}, ("stored_layers: [2]", "recipe.method.layers", "not given")),
        ({"block_size": 64 + 1}, ("block_size", "blocks of 65", "rows of 64", "recipe.data.sequence_length")),
        ({"sliding_window": 16}, ("sliding_window: 16", "16 slots", "recipe.method.block_size", "17 or more")),
        ({"vocabulary_from": "demo"}, ("vocabulary_from", "recipe.method.vocabulary is null")),
    ],
)
def test_a_recipe_is_refused_with_its_key(method: dict[str, Any], told: tuple[str, ...]) -> None:
    with refused(f"recipe.method.{told[0]}", *told[1:]):
        dflash.check(recipe_of(**method))


def test_a_target_is_refused_with_the_recipes_key() -> None:
    for layers, method, place, fact in (
        (6, {}, "layers", "as [1, 3, 5]"),
        (9, {"layers": [3, 9]}, "layers: [3, 9]", "0 to 8"),
        (9, {"mask_token": 97}, "mask_token: 97", "0 to 96"),
        (9, {"vocabulary": 97}, "vocabulary: 97", "97 tokens"),
    ):
        with refused(f"recipe.method.{place}", fact):
            dflash.fits(recipe_of(**method), layers, 97)
    dflash.fits(recipe_of(), 9, 97)
    assert Settings().read_of(9) == (2, 4, 6)
