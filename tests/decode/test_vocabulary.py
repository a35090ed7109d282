"""Drafts that can say a part of the target's tokens: the file by which these are chosen, and what of it is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspec.atomic_files import read_json, write_json
from longspec.decode.generate import generate, load_drafter
from longspec.draft_vocabulary import DraftVocabulary, tokenizer_hash_of
from longspec.methods import chosen_vocabulary
from longspec.methods.glide.drafter import GlideDrafter
from tests.methods.test_attach import save_draft, save_target
from tests.refusals import refused
from tests.targets import VOCABULARY

SAID = (0, 2, 7, 11, 30, 44, 45, 60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_draft(save_target("qwen2", tmp_path / "target"), tmp_path / "draft")
    DraftVocabulary(SAID, VOCABULARY, "", {"all": 1.0}).write(tmp_path / "draft_vocabulary_8.json")
    return tmp_path


def test_a_glide_draft_takes_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name of generate's argument, through the folder's own code and by a Python call, and by load_drafter."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    ids_BT, greedy = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    draft, path = folder / "draft", folder / "draft_vocabulary_8.json"
    drafter = load_drafter(target, draft, path)
    assert isinstance(drafter, GlideDrafter)
    assert drafter.proposed == len(SAID)
    assert torch.equal(drafter.head_VH, target.lm_head.weight[list(SAID)])
    own = target.generate(ids_BT, **greedy)
    named = {"draft": draft, "draft_vocabulary": str(path), "shape": (8, 3)}
    by_folder = target.generate(ids_BT, custom_generate=str(draft), trust_remote_code=True, **named, **greedy)
    assert torch.equal(by_folder, own)
    assert torch.equal(generate(target, ids_BT, **named, **greedy), own)
    with refused("shape (9,)", "level 1", "9 nodes", "1 to 8", "vocabulary of 8"):
        generate(target, ids_BT, **named | {"shape": (9,)}, **greedy)
    with refused(f"draft_vocabulary: {path}", "load_drafter"):
        generate(target, ids_BT, **named | {"draft": drafter}, **greedy)


def test_files_that_do_not_fit_are_named(folder: Path) -> None:
    path = folder / "draft_vocabulary_8.json"
    assert chosen_vocabulary("glide", None) is None
    assert chosen_vocabulary("eagle3", None) is None
    with refused(f"draft_vocabulary: {path}", "eagle3"):
        chosen_vocabulary("eagle3", path)
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    write_json(folder / "target/tokenizer.json", {})
    for changed, field in (({"size": 98}, "size"), ({"tokenizer": "other"}, "tokenizer"), ({"ids": [3, 2]}, "ids")):
        write_json(folder / "other.json", read_json(path) | {"tokenizer": tokenizer_hash_of(folder / "target")} | changed)
        with refused(f"{folder}/other.json: {field}"):
            load_drafter(target, folder / "draft", folder / "other.json")
