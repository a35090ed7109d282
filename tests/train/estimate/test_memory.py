"""The estimate against what torch and DeepSpeed really hold, at tiny sizes on a CPU."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from longspec.config import Runtime, compose
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, class_for
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.train.estimate import memory
from longspec.train.estimate.memory import ALWAYS, DRAFT, TARGET, Setup

pytestmark = pytest.mark.slow  # half a minute and more as a whole

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations make, until it is freed; `ignored` is not counted."""

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def recipe_of(**draft: Any) -> Any:
    recipe = OmegaConf.create(OmegaConf.to_container(compose("train", ["run=demo", "recipe.draft.start=random"]).recipe))
    recipe.draft.update(draft)
    return recipe


def setup_of(config: PretrainedConfig, tokens: int, dtype: torch.dtype, chunk: int | None = None, **draft: Any) -> Setup:
    recipe = recipe_of(**draft)
    recipe.data.sequence_length = tokens
    runtime = OmegaConf.structured(Runtime(target_chunk=chunk))
    return memory.setup_of(config, recipe, runtime, 1, 1, dtype, CPU)


def glide_of(config: PretrainedConfig, dtype: torch.dtype, chunk: int | None = None, **draft: Any) -> Glide:
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION, dtype=dtype)
    settings = OmegaConf.to_container(recipe_of(**draft).draft)
    family = class_for(config.model_type)
    states = TargetStates(target.requires_grad_(False).eval(), chunk=chunk, attention="sdpa")
    return family(config, "", draft=Draft(**settings), states=states)  # type: ignore[arg-type]


WIDE = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512}
CONFIGS = {
    "tied": Qwen2Config(**WIDE, num_hidden_layers=3, tie_word_embeddings=True),
    "wide heads": LlamaConfig(**WIDE, num_hidden_layers=2, head_dim=24, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**WIDE, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
}


@pytest.mark.parametrize(("name", "dtype"), [("tied", torch.float32), ("experts", torch.bfloat16)])
def test_weights_are_counted_to_the_byte(name: str, dtype: torch.dtype) -> None:
    setup, glide = setup_of(CONFIGS[name], 64, dtype, final_norm=True), glide_of(CONFIGS[name], dtype, final_norm=True)
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in glide.target.parameters()}
    assert setup.target_bytes == sum(storages.values())
    assert setup.draft_parameters * setup.dtype.itemsize == sum(
        p.untyped_storage().nbytes() for p in glide.draft_model.parameters()
    )


SHAPES = {
    "chunks": (WIDE, 2048, 512, {}),
    "long vocabulary": (WIDE | {"vocab_size": 8192, "hidden_size": 64}, 1024, None, {}),
    "mixed loss": (WIDE | {"vocab_size": 4096}, 2048, None, {"loss": "mix", "final_norm": True}),
    "narrow": (WIDE | {"intermediate_size": 160, "num_key_value_heads": 8}, 2048, None, {"lag_mode": "blocks"}),
}


@pytest.mark.parametrize(("name", "dtype"), list(zip(SHAPES, [torch.float32, torch.bfloat16] * 2, strict=True)))
def test_activations_are_within_a_fifth(name: str, dtype: torch.dtype) -> None:
    """The peak of the target's forward, and that of the draft's forward and backward, weights and gradients aside."""
    shape, tokens, chunk, draft = SHAPES[name]
    config = Qwen2Config(**shape, num_hidden_layers=4, tie_word_embeddings=False)
    glide, setup = glide_of(config, dtype, chunk, **draft), setup_of(config, tokens, dtype, chunk, **draft)
    items = memory.estimate(setup)
    estimated = {phase: sum(item.bytes for item in items if item.phase == phase) for phase in (TARGET, DRAFT)}
    ids = torch.arange(tokens)[None] % config.vocab_size
    weights = [*glide.target.parameters(), *glide.draft_model.parameters()]
    with LiveBytes(weights) as target:
        glide.states(ids, torch.arange(tokens)[None], None, setup.reads)
    with LiveBytes(weights) as whole:
        loss = glide(ids, ids, lag="blocks" if draft.get("lag_mode") == "blocks" else 2).loss
        forward, whole.peak = whole.peak, 0
        loss.backward()
    gradients = setup.draft_parameters * setup.dtype.itemsize
    assert target.peak * 0.95 < estimated[TARGET] < target.peak * 1.25
    measured = max(forward, whole.peak - gradients)
    assert measured * 0.9 < estimated[DRAFT] < measured * 1.2


def test_a_partitioned_target_is_shared_and_gathered_by_the_layer() -> None:
    setup = replace(setup_of(CONFIGS["wide heads"], 64, torch.bfloat16), world_size=4, target="partitioned")
    items = {(item.name, item.phase): item.bytes for item in memory.target_items(setup)}
    assert items["target weights", ALWAYS] == -(-setup.target_bytes // 4)
    glide = glide_of(CONFIGS["wide heads"], torch.bfloat16)
    layer = sum(p.numel() * 2 for p in glide.target.model.layers[0].parameters())
    assert items["target layer, gathered", TARGET] == max(layer, 512 * 128 * 2)
