"""Drafts beside a target of every family: its states, drafts that are trained and loaded, and what they decode.

Shapes: B rows, S tokens, H hidden width.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from longspec import methods
from longspec.atomic_files import read_json
from longspec.decode.generate import load_drafter
from longspec.decode.speculate import speculate
from longspec.draft.folder import draft_config, write_draft
from longspec.families import FAMILIES
from longspec.methods.dflash import settings as dflash
from longspec.methods.eagle3.settings import Settings
from longspec.methods.glide import settings as glide
from longspec.methods.layer_config import layer_config
from longspec.models.attention import sdpa
from longspec.models.attention.backends import FLASH, FLEX, SDPA
from longspec.models.target import load_target
from longspec.states.forward import STATES_ATTENTION, TargetStates
from tests.draft.eagle3_drafts import recipe_of
from tests.methods.test_eagle3 import packed_row
from tests.refusals import refused
from tests.targets import EAGLE3_TARGETS, VOCABULARY, save_target

pytestmark = pytest.mark.slow  # half a minute and more as a whole

LAYERS, NEW = (0, 1, 3), 30


def test_a_draft_of_gpt_oss_may_have_a_width_of_its_own_and_heads_of_another_width_turn_whole() -> None:
    own = layer_config(EAGLE3_TARGETS["gpt_oss"], Settings(intermediate_size=40))
    assert (own.intermediate_size, layer_config(EAGLE3_TARGETS["gpt_oss"], Settings()).intermediate_size) == (40, 6 * 32)
    whole = {"rope_type": "default", "rope_theta": 10000.0}
    for name, width in (("glm4", 16), ("phi3-partial", 8)):
        with refused("recipe.method.head_dim: 12", f"heads of {width},", "{rope_type: default, rope_theta: 10000.0}"):
            layer_config(EAGLE3_TARGETS[name], Settings(head_dim=12))
        assert layer_config(EAGLE3_TARGETS[name], Settings(head_dim=12, rope_parameters=whole)).head_dim == 12


def test_every_family_is_here() -> None:
    assert {config.model_type for config in EAGLE3_TARGETS.values()} == set(FAMILIES)


@pytest.fixture(scope="module", params=sorted(EAGLE3_TARGETS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(request.param, tmp_path_factory.mktemp(request.param), EAGLE3_TARGETS)


def own(path: str) -> Any:
    """The target as transformers runs it, by its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def states_of(path: str, attention: str = SDPA, chunk: int | None = None) -> TargetStates:
    target = load_target(path, AutoConfig.from_pretrained(path), torch.float32, STATES_ATTENTION)
    return TargetStates(target, chunk=chunk, attention=attention)


@torch.no_grad()
def check_states(path: str, states: TargetStates) -> None:
    """Hidden states of two packed rows are those of each document alone, by transformers' eager attention."""
    rows = [packed_row([20, 1, 13, 30], 3) for _ in range(2)]
    ids_BS, positions_BS, numbers_BS = (torch.cat([row[part] for row in rows]) for part in (1, 2, 3))
    names = [*(f"hidden.{layer}" for layer in LAYERS), "final"]
    found, target = states(ids_BS, positions_BS, numbers_BS, names), own(path)
    for row, (documents, *_) in enumerate(rows):
        for number, document_S in enumerate(documents):
            wanted = target.model(document_S[None], output_hidden_states=True)
            alone = [*(wanted.hidden_states[layer][0] for layer in LAYERS), wanted.last_hidden_state[0]]
            for name, wanted_SH in zip(names, alone, strict=True):
                found_SH = found[name][row, numbers_BS[row] == number]
                torch.testing.assert_close(found_SH, wanted_SH, rtol=1e-4, atol=1e-4)


def test_packed_documents_have_the_states_of_each_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 8)
    check_states(path, states_of(path))


@pytest.mark.parametrize(("backend", "chunk"), [(SDPA, 17), (FLASH, None), (FLEX, 17)])
def test_sinks_are_in_the_softmax_of_every_backend(
    backend: str, chunk: int | None, tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "QUERY_BLOCK", 8)
    path = save_target("gpt_oss", tmp_path, EAGLE3_TARGETS)
    check_states(path, states_of(path, backend, chunk))


def train(states: TargetStates, target: Any, texts: Tensor, recipe: Any) -> Any:
    """A fresh draft after some steps on packed rows of these texts, each two documents.

    What the target's own loss is tells that its logits are its head's, and nothing after it; of blocks it is another mean.
    """
    method, settings = methods.method_of(recipe)
    made = method.trainer(states, settings, None)
    if method.name != "dflash":
        torch.testing.assert_close(made(texts, texts).llm_loss, target(texts, labels=texts).loss.detach(), rtol=1e-4, atol=0)
    optimizer = torch.optim.Adam(made.draft_model.parameters(), lr=3e-3)
    half = texts.shape[1] // 2
    documents = {
        "position_ids": torch.arange(half).repeat(2).expand_as(texts),
        "document_ids": torch.arange(2).repeat_interleave(half).expand_as(texts),
    }
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = made(texts, texts, **documents).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return made


def recipe_for(method: str) -> Any:
    """EAGLE-3's, of all tokens; DFlash's of the same layers but for the first one, which it cannot read; or GLIDE's."""
    recipe = recipe_of(layers=list(LAYERS), vocabulary=None)
    if method == "dflash":
        recipe.method = OmegaConf.structured(dflash.Method(layers=list(LAYERS[1:]), depth=2, block_size=5))
        recipe.draft = OmegaConf.structured(dflash.Draft(anchors=NEW))
    if method == "glide":
        recipe.method = OmegaConf.structured(glide.Method())
        recipe.draft = OmegaConf.structured(glide.Draft(window=12, anchors="off", lag_mode="fixed", final_norm=True))
    return recipe


# Of each method the model type of config.json and a tensor's name.
METHODS = {
    "eagle3": ("llama", "midlayer.mlp.gate_proj.weight"),
    "dflash": ("qwen3", "layers.1.mlp.gate_proj.weight"),
    "glide": (None, "mlp.gate_proj.weight"),
}
CASES = [
    *zip(sorted(EAGLE3_TARGETS), cycle(["eagle3", "dflash"]), strict=False),
    *((name, "glide") for name, config in EAGLE3_TARGETS.items() if config.model_type in glide.FAMILIES),
]


@pytest.mark.parametrize(("path", "method"), CASES, indirect=["path"])
def test_what_is_trained_decodes_the_targets_own_text(path: str, method: str, tmp_path: Path) -> None:
    """Chains and trees, prompts on both sides of a window, against transformers' generate."""
    model_type, gate = METHODS[method]
    recipe = recipe_for(method)
    target = own(path)
    recipe.model.family = target.config.model_type
    prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (2, 5, 30)]
    settings: Any = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        wanted = [target.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    texts = torch.tensor([text[-NEW:] for text in wanted])
    state, folder = train(states_of(path), target, texts, recipe).draft_model.state_dict(), tmp_path / "draft"
    made, settings_of_draft = methods.method_of(recipe)
    write_draft(folder, made.published(state, settings_of_draft), draft_config(path, recipe))
    content = read_json(folder / "config.json")
    assert (content.get("model_type"), content["target"]["model_type"]) == (model_type, target.config.model_type)
    width = 6 * 32 if target.config.model_type == "gpt_oss" else 48
    assert content.get("intermediate_size", width) == width
    assert load_file(folder / "model.safetensors")[gate].shape == (width, 32)
    evaluated = load_target(path, AutoConfig.from_pretrained(path), torch.float32)  # as the evaluation loads it
    drafter, accepted = load_drafter(evaluated, folder), 0
    for shape in (3, (3, 4, 2)):
        decoded = speculate(evaluated, drafter, prompts, max_new_tokens=NEW, shape=shape)
        assert [prompt + row.ids for prompt, row in zip(prompts, decoded.rows, strict=True)] == wanted
        accepted += sum(sum(row.accepted) for row in decoded.rows)
    assert accepted > 0
