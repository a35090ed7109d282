"""EAGLE-3 drafts with random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from longspec.atomic_files import write_json, write_text
from longspec.config import compose, to_yaml
from longspec.config.schema import Model
from longspec.draft.folder import draft_config, write_draft
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of
from longspec.methods.eagle3 import settings as eagle3
from longspec.methods.eagle3.layer import Eagle3Layer
from longspec.methods.eagle3.method import METHOD

IDS = (0, 3, 4, 9, 17, 40, 41, 96)
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
TARGET = LlamaConfig(**SHAPE)


@cache
def demo_recipe() -> Any:
    """A whole recipe, of another method."""
    return compose("train", ["run=demo"]).recipe


def recipe_of(**method: Any) -> Any:
    """A typed recipe of an EAGLE-3 draft of so many tokens as IDS, or as `method` says."""
    recipe = demo_recipe().copy()
    OmegaConf.set_readonly(recipe, False)
    recipe.method = OmegaConf.structured(eagle3.Method(**{"vocabulary": len(IDS)} | method))
    recipe.draft = OmegaConf.structured(eagle3.Draft(steps=5, decay=0.5))
    recipe.model = OmegaConf.structured(Model("target", "hf:owner/target", "llama"))
    return recipe


def random_state(config: PretrainedConfig, recipe: Any) -> dict[str, Tensor]:
    """A layer's state dict, its norms random too."""
    torch.manual_seed(3)
    state = Eagle3Layer(config, eagle3.of(recipe)).state_dict()
    return {name: torch.randn_like(tensor) for name, tensor in state.items()}


def make_draft(folder: Path, config: PretrainedConfig = TARGET, **method: Any) -> Path:
    """`folder/draft`, of the target `folder/target`, by a recipe with these values."""
    recipe, target = recipe_of(**method), folder / "target"
    config.save_pretrained(target)
    write_json(folder / "target.json", {"path": str(target)})
    write_text(folder / "recipe.yaml", to_yaml(recipe))
    vocabulary = None
    if recipe.method.vocabulary is not None:
        vocabulary = DraftVocabulary(IDS, config.vocab_size, "hash", {"all": 1.0})
        vocabulary.write(folder / "vocabulary.json")
    settings = method_of(recipe, vocabulary)[1]
    published = METHOD.published(random_state(config, recipe), settings)
    write_draft(folder / "draft", published, draft_config(str(target), recipe, vocabulary))
    return folder / "draft"
