"""EAGLE-3 drafts with random weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
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
from tests import targets

IDS = (0, 3, 4, 9, 17, 40, 41, 96)
SHAPE = targets.SHAPES | {"num_hidden_layers": 9, "head_dim": 12, "rms_norm_eps": 1e-5, "bos_token_id": 5}
SHAPE |= {"eos_token_id": [6, 7], "dtype": "bfloat16", "tie_word_embeddings": True}
TARGET = LlamaConfig(**SHAPE)
# As vLLM's load_weights of llama_eagle3.py takes them: shapes of TARGET, 8 draft tokens.
SHAPES = {
    "midlayer.self_attn.q_proj.weight": (48, 64),
    "midlayer.self_attn.k_proj.weight": (24, 64),
    "midlayer.self_attn.v_proj.weight": (24, 64),
    "midlayer.self_attn.o_proj.weight": (32, 48),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "fc.weight": (32, 96),
    "norm.weight": (32,),
    "lm_head.weight": (8, 32),
    "d2t": (8,),
    "t2d": (97,),
}


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


def write_tokenizer(folder: Path) -> None:
    """Put a tokenizer of as many tokens as the target has into a folder."""
    letters = {chr(33 + number): number for number in range(SHAPE["vocab_size"] - 1)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "&"})
