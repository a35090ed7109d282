"""The estimate against what torch and DeepSpeed really hold, at tiny sizes on a CPU; the dry batch, and what it leaves."""

import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from longspec import methods
from longspec.config import Runtime, compose
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide, class_for
from longspec.train import dry_batch
from longspec.train.estimate import memory
from longspec.train.estimate.memory import ALWAYS, DRAFT, TARGET, Setup, parameter_bytes
from tests.refusals import refused
from tests.targets import states_of

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
    settings = OmegaConf.to_container(recipe_of(**draft).draft)
    family, states = class_for(config.model_type), states_of(config, dtype, chunk=chunk)
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


def test_nothing_is_left_of_the_dry_batch() -> None:
    torch.manual_seed(3)
    tied, blocks = CONFIGS["tied"], {"lag_mode": "blocks"}
    glide, setup = glide_of(tied, torch.float32, **blocks), setup_of(tied, 64, torch.float32, **blocks)
    weights = {name: tensor.clone() for name, tensor in glide.state_dict().items()}
    state, sizes = torch.random.get_rng_state(), []
    glide.states.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(inputs[0].shape)))
    dry_batch.dry_batch(glide, replace(setup, micro_batch=3), with_llm_loss=True)
    assert sizes == [(3, 64)]
    assert all(parameter.grad is None for parameter in glide.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in glide.state_dict().items())


def test_out_of_memory_is_explained_and_other_failures_are_not_taken_for_it() -> None:
    glide, setup = glide_of(CONFIGS["tied"], torch.float32), setup_of(CONFIGS["tied"], 64, torch.float32)
    glide._losses = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    with refused("out of memory", "runtime.micro_batch"):
        dry_batch.dry_batch(glide, setup, with_llm_loss=True)
    glide._losses = Mock(side_effect=RuntimeError("shapes do not fit"))
    with refused("shapes do not fit", kind=RuntimeError):
        dry_batch.dry_batch(glide, setup, with_llm_loss=True)


LONG, KEYS = WIDE | {"vocab_size": 4096, "hidden_size": 64}, WIDE | {"num_key_value_heads": 8}
STEPS = {"layers": (0, 1, 2), "steps": 7}
BLOCKS: dict[str, Any] = {"layers": (1, 2), "block_size": 8}
# Method, part by which the estimate may be off, shape of the target, tokens, settings, dtype.
CASES: list[tuple[str, float, dict[str, Any], int, dict[str, Any], torch.dtype]] = [
    ("eagle3", 0.1, WIDE, 1024, {**STEPS, "vocabulary": 256}, torch.float32),
    ("eagle3", 0.1, LONG, 512, {**STEPS, "vocabulary": 1024}, torch.bfloat16),
    ("eagle3", 0.1, KEYS, 1024, {**STEPS, "vocabulary": 256, "fc_norm": True}, torch.bfloat16),
    ("dflash", 0.2, WIDE, 1024, {**BLOCKS, "depth": 3, "block_size": 16}, torch.float32),
    ("dflash", 0.2, LONG, 512, {**BLOCKS, "depth": 1, "vocabulary": 1024}, torch.bfloat16),
    ("dflash", 0.2, KEYS, 512, {**BLOCKS, "depth": 2, "anchors": 128, "loss": "hard"}, torch.float32),
]


def measured(method: Any, config: PretrainedConfig, settings: Any, tokens: int, dtype: torch.dtype) -> int:
    """The peak of the draft's forward and backward, weights, gradients and what is kept of the target aside."""
    states = states_of(config, dtype)
    made, ids = method.trainer(states, settings, None), torch.arange(tokens)[None] % config.vocab_size
    with_loss = getattr(settings, "loss", "soft") == "soft"
    names = method.reads(config, settings, with_llm_loss=with_loss)
    found = states(ids, torch.arange(tokens)[None], None, names)
    states.forward = lambda *_: found
    own = made.draft_model
    with LiveBytes([*states.target.parameters(), *own.parameters(), *own.buffers(), *found.values()]) as live:
        loss = made(ids, ids, with_llm_loss=with_loss).loss
        forward, live.peak = live.peak, live.live
        loss.backward()
    return max(forward, live.peak - parameter_bytes(own))


@pytest.mark.parametrize(("name", "off", "shape", "tokens", "chosen", "dtype"), CASES)
def test_memory_is_within_a_part(
    name: str, off: float, shape: dict[str, Any], tokens: int, chosen: dict[str, Any], dtype: torch.dtype
) -> None:
    config, proposed = Qwen2Config(**shape, num_hidden_layers=3, tie_word_embeddings=False), chosen.get("vocabulary")
    ids = {} if proposed is None else {"ids": tuple(range(proposed)), "target_vocabulary": config.vocab_size}
    rows = {"row_tokens": tokens} if name == "dflash" else {}
    method, settings = methods.method(name), methods.settings_of(name).Settings(**chosen, **ids, **rows)
    estimate = method.memory(config, settings, tokens, dtype, torch.device("cpu"))
    peak = measured(method, config, settings, tokens, dtype)
    assert peak * (1 - off) < estimate.kept + max(estimate.losses, estimate.backward) < peak * (1 + off)
