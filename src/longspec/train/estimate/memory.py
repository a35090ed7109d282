"""Estimates the memory of one training rank in closed form, from the configurations alone.

Symbols: T tokens of one forward (micro batch x sequence length), H hidden width, N heads of width D, K key/value heads, I
feed-forward width, L layers, V vocabulary, P parameters of the draft, R ranks, e bytes of an element of the training dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from longspec.config import OFFLINE, PARTITIONED, REPLICATED, TENSOR_PARALLEL, Recipe, Runtime
from longspec.methods import measures_target, method_of
from longspec.methods.contract import Method
from longspec.models.attention.backends import SDPA, fastest
from longspec.models.attention.sdpa import QUERY_BLOCK
from longspec.models.losses import TOP_BYTES
from longspec.models.target import head_width, heads_of_rank, without_layers
from longspec.states.load import check_ranks
from longspec.states.stored.declaration import StoredTensor, bytes_a_token, stored_tensors
from longspec.states.tensors import FINAL, KEYS, VALUES, StateTensor
from longspec.train.estimate.feed_forward import widest_elements

GIB = 2**30
REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's own default; of smaller drafts their parameters (engine.py)
OPTIMIZER, BUCKET = "draft optimizer", "gradient reduction bucket"
ALWAYS, TARGET, DRAFT = "always", "target's forward", "draft's forward and backward"
# A CUDA context with its libraries, NCCL's buffers, and gaps in the allocator's memory: not derived, a round guess.
GPU_OVERHEAD = 2 * GIB


@dataclass(frozen=True)
class Setup:
    """All settings that the memory estimate depends on."""

    config: Any  # the target's
    method: Method
    settings: Any  # of the method
    reads: tuple[StateTensor, ...]  # of the target
    sequence_length: int
    micro_batch: int
    world_size: int
    dtype: torch.dtype
    device: torch.device
    zero_stage: int
    offload: str
    target: str
    target_chunk: int | None
    target_bytes: int
    largest_gather: int  # bytes of a partitioned target that are whole at once: a layer, or the embeddings
    draft_parameters: int
    stored: tuple[StoredTensor, ...] | None = None  # tensors of the states that are read from files; None: the target runs
    top_k: int | None = None  # likeliest tokens that are stored in the place of `final`

    @property
    def tokens(self) -> int:
        """Number of tokens in one forward."""
        return self.micro_batch * self.sequence_length


@dataclass(frozen=True)
class Item:
    """One thing that takes memory, in one phase, on the device or the host."""

    name: str
    bytes: int
    phase: str = ALWAYS
    on_host: bool = False


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of all parameters, tied ones counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def setup_of(
    config: Any, recipe: Recipe, runtime: Runtime, micro_batch: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> Setup:
    """Read both configurations; the models are built on the meta device, without memory.

    Raises ValueError for a target that is to be split over ranks that cannot share it.
    """
    (method, settings), states = method_of(recipe), recipe.states
    reads = method.reads(config, settings, with_llm_loss=measures_target(recipe, runtime))
    offline = states.source == OFFLINE
    if not offline:
        check_ranks(config, runtime, world_size)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(without_layers(config) if offline else config, dtype=dtype)
        layer = method.layer(config, settings)
    whole_at_once = [*target.model.layers, target.model.embed_tokens, target.lm_head]
    return Setup(
        config=config,
        method=method,
        settings=settings,
        reads=reads,
        sequence_length=recipe.data.sequence_length,
        micro_batch=micro_batch,
        world_size=world_size,
        dtype=dtype,
        device=device,
        zero_stage=runtime.deepspeed.zero_stage,
        offload=runtime.deepspeed.offload_optimizer,
        target=REPLICATED if offline else runtime.target,
        target_chunk=runtime.target_chunk,
        target_bytes=parameter_bytes(target),
        largest_gather=max(map(parameter_bytes, whole_at_once)),
        draft_parameters=sum(parameter.numel() for parameter in layer.parameters()),
        stored=stored_tensors(reads, states.dtype, states.top_k) if offline else None,
        top_k=states.top_k,
    )


def training_state(setup: Setup) -> list[Item]:
    """Weights, gradients and optimizer of the draft, as DeepSpeed holds them for our configuration (engine.py).

    Weights: P, and P / R from stage 3 on, where a forward gathers them all again (they are fewer than DeepSpeed keeps
    alive). Optimizer: AdamW's two moments and a float32 copy of the weights, 12 bytes a parameter, shared by the ranks from
    stage 1 on; no copy where the weights are float32 and stay where they are (stage 0, and stage 3 without offload).
    Gradients: added up in float32 (in the training dtype in stage 0, and in stages 1 and 2 with offload), shared from stage 2
    on. The bucket they are reduced in: none in stage 0, nor in stage 1 in bf16 without offload. Offload puts the optimizer on
    the host, from stage 2 on the gradients too, and copies of the rank's share: of gradients in float32, of weights below
    stage 3, and in stage 1 of gradients as they were added up.
    """
    parameters, stage, element = setup.draft_parameters, setup.zero_stage, setup.dtype.itemsize
    share, offloaded, fp32 = -(-parameters // setup.world_size), setup.offload != "none", setup.dtype == torch.float32
    in_place = fp32 and (stage == 0 or (stage == 3 and not offloaded))
    summed_in = element if stage == 0 or (stage < 3 and offloaded) else 4
    gradients = (share if stage >= 2 else parameters) * summed_in
    items = [Item("draft weights", (share if stage == 3 else parameters) * element)]
    if setup.offload != "nvme":
        items.append(Item(OPTIMIZER, (share if stage else parameters) * (8 if in_place else 12), on_host=offloaded))
    if stage == 3:
        items.append(Item("draft weights, gathered", parameters * element, DRAFT))
    items.append(Item("draft gradients", gradients, on_host=offloaded and stage >= 2))
    if offloaded:
        copies = 4 + (element if stage < 3 else 0) + (summed_in if stage == 1 else 0)
        items.append(Item("copies for the offload", share * copies, on_host=True))
    if stage > 1 or (stage == 1 and (fp32 or offloaded)):
        items.append(Item(BUCKET, min(REDUCE_BUCKET, parameters) * element))
    return items


def target_items(setup: Setup) -> list[Item]:
    """Return the target's weights and its forward, which keeps nothing for a backward.

    At its widest a layer holds residual, embeddings, norm and output, 4H, beside its feed-forward part, or in its attention 3H
    beside 5ND for the rotations; this for the tokens of one chunk. Kept for the draft: see draft_items; the last layer's keys
    and values and the final hidden states are made after the last rotation. With chunks, keys and values of all layers are kept
    until the last one, 2KDL, and the hidden states once more, H.

    Split over ranks, a rank has its part of weights, of heads where the plan splits them, and of the feed-forward part. The
    draft's head is whole beside them, and the rows of another rank may be under way when what its own left is there already.
    """
    config, element, tokens, ranks = setup.config, setup.dtype.itemsize, setup.tokens, setup.world_size
    hidden, width, layers = config.hidden_size, head_width(config), config.num_hidden_layers
    parts = ranks if setup.target == TENSOR_PARALLEL else 1
    key_value_heads = heads_of_rank(config, parts) or config.num_key_value_heads
    key_values = key_value_heads * width
    heads = config.num_attention_heads * width * key_value_heads // config.num_key_value_heads
    at_once = min(setup.target_chunk or setup.sequence_length, setup.sequence_length) * setup.micro_batch
    late_names = (FINAL, f"{KEYS}{layers - 1}", f"{VALUES}{layers - 1}")
    late = sum(tensor.elements for tensor in setup.reads if tensor.name in late_names)
    feed_forward = max(widest_elements(config, layer) for layer in range(layers))
    widest = max(4 * hidden + feed_forward // parts, 3 * hidden + 5 * heads + 2 * key_values - late)
    kept = kept_of_target(setup) * tokens * element
    items = [
        Item("target weights", -(-setup.target_bytes // (ranks if setup.target == PARTITIONED else parts))),
        Item("target activations", widest * at_once * element, TARGET),
        Item("kept of the target", kept, TARGET),
    ]
    if setup.target == PARTITIONED:
        items.append(Item("target layer, gathered", setup.largest_gather, TARGET))
    elif parts > 1:
        items.append(Item("target head, whole", config.vocab_size * hidden * element))
        items.append(Item("kept of another rank's rows", kept, TARGET))
    elif setup.device.type == "cuda":
        items.append(Item("target while it is loaded", setup.target_bytes, on_host=True))
    if config.model_type == "gpt_oss" and setup.device.type == "cuda" and fastest("cuda", setup.dtype, width, False) == SDPA:
        groups = config.num_attention_heads // config.num_key_value_heads
        # Scores, weights and a mask in float32, of a block of queries and one key/value head.
        items.append(Item("attention scores beside sinks", 12 * groups * QUERY_BLOCK * setup.sequence_length, TARGET))
    if at_once < tokens:
        all_layers = 2 * key_values * (layers - 1) + hidden
        items.append(Item("target keys and values of all layers", all_layers * tokens * element, TARGET))
        # Of a block of queries against all keys, for backends without kernels for it.
        mask = QUERY_BLOCK * config.num_attention_heads // config.num_key_value_heads * setup.sequence_length
        items.append(Item("attention mask", mask * element, TARGET))
    return items


def stored_items(setup: Setup, stored: tuple[StoredTensor, ...]) -> list[Item]:
    """Embedding, norm and head of a target whose states are stored, and two micro batches of these: one in use, one to come.

    On a GPU those are on the host, and that in use on the GPU too, while it is decoded.
    """
    on_gpu, micro_batch = setup.device.type == "cuda", bytes_a_token(stored) * setup.tokens
    items = [
        Item("target's embedding and head", setup.target_bytes),
        Item("stored states, read ahead", 2 * micro_batch, on_host=on_gpu),
        Item("kept of the target", kept_of_target(setup) * setup.tokens * setup.dtype.itemsize, TARGET),
    ]
    return [*items, Item("stored states, in use", micro_batch, TARGET)] if on_gpu else items


def kept_of_target(setup: Setup) -> int:
    """Elements a token: embeddings H, RoPE's tables 4D, and what the method reads."""
    reads = [tensor.elements for tensor in setup.reads if setup.top_k is None or tensor.name != FINAL]
    top = 0 if setup.top_k is None else -(-TOP_BYTES * setup.top_k // setup.dtype.itemsize)
    return setup.config.hidden_size + 4 * head_width(setup.config) + sum(reads) + top


def draft_items(setup: Setup) -> list[Item]:
    """Memory of the target's states that are kept, and of the method's own forward, losses and backward, over all tokens."""
    config, element, tokens = setup.config, setup.dtype.itemsize, setup.tokens
    draft = setup.method.memory(config, setup.settings, tokens, setup.dtype, setup.device, top_k=setup.top_k)
    items = [
        Item("kept of the target", kept_of_target(setup) * tokens * element, DRAFT),
        Item("draft activations", draft.kept, DRAFT),
    ]
    # The two are never alive together.
    widest = "logits and their gradient" if draft.losses > draft.backward else "draft backward"
    items.append(Item(widest, max(draft.losses, draft.backward), DRAFT))
    if setup.target == PARTITIONED:
        items.append(Item("target head, gathered", config.vocab_size * config.hidden_size * element, DRAFT))
    return items


def estimate(setup: Setup) -> list[Item]:
    """All items of one rank."""
    target = target_items(setup) if setup.stored is None else stored_items(setup, setup.stored)
    items = [*target, *training_state(setup), *draft_items(setup)]
    if setup.device.type == "cuda":
        items.append(Item("CUDA, NCCL, fragments (a guess)", GPU_OVERHEAD))
    return items


def peak(items: list[Item], *, on_host: bool = False) -> int:
    """Bytes at the worst moment: what is always there and the larger of the two phases."""
    here = [item for item in items if item.on_host == on_host]
    sums = {phase: sum(item.bytes for item in here if item.phase == phase) for phase in (ALWAYS, TARGET, DRAFT)}
    return sums[ALWAYS] + max(sums[TARGET], sums[DRAFT])
