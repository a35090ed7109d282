"""A random draft beside a small target that has a tokenizer, in folders as a run leaves them."""

import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from longspec.config import compose
from longspec.draft.folder import draft_config, write_draft
from longspec.methods.glide.layer import GlideLayer
from tests.corpus import Corpus


def save(target: Path, draft: Path, corpus: Corpus) -> None:
    """Write both folders; the draft names its target by the path that is given."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=275, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, **shape)
    Qwen2ForCausalLM(config).save_pretrained(target)
    for path in (corpus.tokenizer.parent / "tokenizer").iterdir():
        shutil.copy(path, target)
    recipe = compose("train", ["run=demo"]).recipe
    write_draft(draft, GlideLayer(config).state_dict(), draft_config(str(target), recipe))
