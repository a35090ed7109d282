"""Tiny targets with random weights: every family, with the peculiarities its real models have, and what is read of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longspec.methods.glide.trainer import Glide
from longspec.states.forward import STATES_ATTENTION, TargetStates

VOCABULARY = 97
SHAPES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SHAPES |= {"initializer_range": 0.2, "tie_word_embeddings": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

TARGETS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPES),
    "llama3-tied": LlamaConfig(**SHAPES | {"tie_word_embeddings": True}, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SHAPES, sliding_window=None),
    "mistral-sliding": MistralConfig(**SHAPES, head_dim=16, sliding_window=7),
    "qwen2": Qwen2Config(**SHAPES),
    "qwen2-yarn": Qwen2Config(**SHAPES, rope_parameters=YARN),
    "qwen2-sliding-last": Qwen2Config(**SHAPES, **SLIDING, layer_types=["full_attention", "sliding_attention"]),
    "qwen3": Qwen3Config(**SHAPES, head_dim=16, rope_parameters=LINEAR),
    "qwen3-tied-sliding-first": Qwen3Config(
        **SHAPES | {"tie_word_embeddings": True}, **SLIDING, layer_types=["sliding_attention", "full_attention"], head_dim=8
    ),
    "qwen3-experts": Qwen3MoeConfig(**SHAPES, **EXPERTS, head_dim=16),
}
# Every family beside EAGLE-3, in layers that are enough for it: windows that alternate, heads that turn in part, sinks.
DEEP: dict[str, Any] = SHAPES | {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
HARMONY = YARN | {"factor": 8.0, "original_max_position_embeddings": 512, "truncate": False} | BETAS
EAGLE3_TARGETS: dict[str, PretrainedConfig] = {
    "glm4": Glm4Config(**DEEP, head_dim=16, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "gpt_oss": GptOssConfig(
        **DEEP, head_dim=16, sliding_window=7, num_local_experts=4, num_experts_per_tok=2, rope_parameters=HARMONY
    ),
    "llama": LlamaConfig(**DEEP, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**DEEP, head_dim=16, sliding_window=7),
    "olmo2": Olmo2Config(**DEEP),
    "phi3": Phi3Config(**DEEP, sliding_window=7),
    "phi3-partial": Phi3Config(**DEEP, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "qwen2": Qwen2Config(**DEEP, **SLIDING, max_window_layers=2),
    "qwen3": Qwen3Config(**DEEP, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**DEEP, **EXPERTS, head_dim=16),
}


def save_target(name: str, folder: Path, targets: dict[str, PretrainedConfig] = TARGETS) -> str:
    """A random target in a folder; its norms and sinks are random too, so that none can be left out unseen."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(targets[name])
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return str(folder)


def states_of(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32, attention: str = "sdpa", chunk: int | None = None
) -> TargetStates:
    """What drafts read of a random target that is not trained."""
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    return TargetStates(target.requires_grad_(False).eval(), chunk=chunk, attention=attention)


def last_states(
    glide: Glide, ids_BS: Tensor, positions_BS: Tensor, document_ids_BS: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The last layer's keys and values and the final hidden states, as a target hands them to its draft."""
    last = glide.config.num_hidden_layers - 1
    names = [f"keys.{last}", f"values.{last}", "final"]
    found = glide.states(ids_BS, positions_BS, document_ids_BS, names)
    keys_BKSD, values_BKSD, hidden_BSH = (found[name] for name in names)
    return keys_BKSD, values_BKSD, hidden_BSH
