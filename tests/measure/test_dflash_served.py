"""A DFlash draft in unmodified vLLM and llama.cpp: its text, and the drafts that these keep by position, beside our decoding.

The draft is that of the first stage of demo-dflash, whose blocks have a slot more than a round of CHAIN tokens fills.
"""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from longspec.atomic_files import read_json, write_json, write_text
from longspec.config import Recipe, load, to_yaml
from longspec.draft.folder import draft_config, write_draft
from longspec.draft_vocabulary import read_draft_vocabulary
from longspec.methods.dflash.drafter import DFlashDrafter
from longspec.methods.vocabulary_tensors import vocabulary_tensors
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from tests.measure.demo_draft import ROOT, RUN, Line, Measured, assert_as_ours, is_as_ours, is_seen

ENGINES = ("vllm", "llama.cpp")
STAGE = ROOT / "results/demo-dflash/blocks/base"
PROPOSED = 768
NEEDED = STAGE / "draft/model.safetensors"  # `make test-serve` makes it
WINDOW = 24
pytestmark = [pytest.mark.serve, pytest.mark.skipif(not NEEDED.is_file(), reason=f"{NEEDED} missing: make test-serve")]


@pytest.fixture(scope="module")
def whole() -> Measured:
    """As trained: no window, the target's head."""
    target, raw = ROOT / "models/demo/target_manifest.json", ROOT / "data/raw/stdlib/manifest.json"
    return Measured(target, STAGE / "draft", STAGE / "recipe.yaml", raw, None)


def changed(whole: Measured, folder: Path, tensors: dict[str, torch.Tensor], **method: Any) -> Measured:
    """The same draft with other tensors and other keys of recipe.method."""
    recipe, path = load(whole.recipe, Recipe).copy(), str(ROOT / read_json(whole.target)["path"])
    OmegaConf.set_readonly(recipe, False)
    recipe.method = OmegaConf.merge(recipe.method, method)
    file = None if recipe.method.vocabulary is None else RUN / f"draft_vocabulary_{PROPOSED}.json"
    vocabulary = None if file is None else read_draft_vocabulary(file)
    made = replace(whole, draft=folder / "draft", recipe=folder / "recipe.yaml", vocabulary=file)
    write_text(made.recipe, to_yaml(recipe))
    tensors = load_file(whole.draft / "model.safetensors") | tensors
    if vocabulary is not None:
        target = load_target(path, read_target_config(path), torch.float32)
        tensors |= vocabulary_tensors(vocabulary.ids, vocabulary.size)
        tensors["lm_head.weight"] = target.lm_head.weight.detach()[list(vocabulary.ids)].clone()
    write_draft(made.draft, tensors, draft_config(path, recipe, vocabulary))
    return made


@pytest.fixture(scope="module")
def narrow(whole: Measured, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A window, and a head of its own for some tokens."""
    return changed(whole, tmp_path_factory.mktemp("narrow"), {}, vocabulary=PROPOSED, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The lines of a draft by an engine, None for our own, measured once."""

    @cache
    def measured(draft: Measured, engine: str | None) -> list[Line]:
        out = tmp_path_factory.mktemp("lines") / "lines.jsonl"
        return draft.lines(out, *(options(engine) if engine else ()))

    return measured


def options(engine: str) -> list[str]:
    if not (ROOT / f".venv-serve/{engine}/.stamp").is_file():
        pytest.skip(f"{engine} is not installed: make test-serve")
    return ["--engine", engine, "--serve-python", str(ROOT / f".venv-serve/{engine}/bin/python")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", ["whole", "narrow"])
def test_text_and_acceptance_are_ours(lines: Any, request: pytest.FixtureRequest, variant: str, engine: str) -> None:
    draft = request.getfixturevalue(variant)
    assert_as_ours(lines(draft, engine), lines(draft, None), engine, 20 * 30)


def test_another_layer_is_seen(whole: Measured, lines: Any, tmp_path: Path) -> None:
    """The output of the target's last layer, at which llama.cpp ends."""
    shutil.copytree(whole.draft, tmp_path / "draft")
    config = read_json(tmp_path / "draft/config.json")
    config["dflash_config"]["target_layer_ids"][1] += 1
    write_json(tmp_path / "draft/config.json", config)
    given = ["--served-draft", str(tmp_path / "draft")]
    assert is_seen(whole.lines(tmp_path / "theirs.jsonl", *options("vllm"), *given), lines(whole, None))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_block_one_position_further_is_seen(
    whole: Measured, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Of ours, since no file says positions."""
    embedded = DFlashDrafter.embedded

    def further(self: DFlashDrafter, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        return embedded(self, tokens, positions + 1)

    theirs = lines(whole, engine)
    monkeypatch.setattr(DFlashDrafter, "embedded", further)
    assert is_seen(theirs, whole.lines(tmp_path / "ours.jsonl"))


def test_vllm_norms_keys_of_several_norms_otherwise_on_a_cpu(whole: Measured, lines: Any, tmp_path: Path) -> None:
    """Which is why such drafts are refused there. This folder does not say that it is one."""
    name = "layers.{}.self_attn.k_norm.weight"
    other = load_file(whole.draft / "model.safetensors")[name.format(0)].flip(0)
    untied = changed(whole, tmp_path, {name.format(1): other}, tied_k_norm=False)
    shutil.copytree(untied.draft, tmp_path / "silent")
    config = read_json(untied.draft / "config.json")
    write_json(tmp_path / "silent/config.json", config | {"settings": {}})
    theirs = untied.lines(tmp_path / "theirs.jsonl", *options("vllm"), "--served-draft", str(tmp_path / "silent"))
    assert is_seen(theirs, lines(untied, None))
    assert is_as_ours([line["accepted"] for line in lines(untied, "llama.cpp")], lines(untied, None))
