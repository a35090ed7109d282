"""Estimate the memory of one training rank, in closed form from the configurations.

Symbols: T tokens of one forward (micro batch x sequence length), H hidden width, N heads of width D, K key/value heads, I
feed-forward width (of one expert), k experts of a token, L layers, V vocabulary, P parameters of the draft, R ranks, e bytes of
an element of the training dtype.
"""

import os
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from longspec.config import OFFLINE, PARTITIONED, REPLICATED, TENSOR_PARALLEL, Recipe, Runtime
from longspec.methods import measures_target, method_of
from longspec.methods.contract import Method
from longspec.models.attention.sdpa import QUERY_BLOCK
from longspec.models.target import head_width, heads_of_rank, without_layers
from longspec.models.teachers import TOP_BYTES
from longspec.states.declaration import Tensors, bytes_a_token, stored_tensors
from longspec.states.load import check_ranks
from longspec.states.tensors import FINAL, KEYS, VALUES, token_shape
from longspec.train.estimate.flops import experts_of

GIB = 2**30
REDUCE_BUCKET = 500_000_000  # elements, DeepSpeed's own default; smaller drafts use their number of parameters (engine.py)
JOINED = ("glm4", "phi3")  # families that compute gate and up in one product, whose result lives until both are used
ALWAYS, TARGET, DRAFT = "always", "target's forward", "draft's forward and backward"
# A CUDA context with its libraries, NCCL's buffers, and gaps in the allocator's memory: a rough guess, not derived.
GPU_OVERHEAD = 2 * GIB
WAYS_OUT = (
    f"runtime.micro_batch: 1; runtime.target: {PARTITIONED} or {TENSOR_PARALLEL}; runtime.target_chunk: 4096; "
    "runtime.deepspeed: zero_stage 3, offload_optimizer cpu; a shorter recipe.data.sequence_length; more processes"
)


@dataclass(frozen=True)
class Setup:
    """Hold all settings that the memory estimate depends on."""

    config: Any  # of the target
    method: Method
    settings: Any  # of the method
    reads: tuple[str, ...]  # names of the target's tensors
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
    largest_gather: int  # bytes of a partitioned target gathered at once: a layer, or the embeddings
    draft_parameters: int
    stored: Tensors | None = None  # tensors of the states that are read from files; None: the target runs
    top_k: int | None = None  # number of likeliest tokens stored instead of `final`

    @property
    def tokens(self) -> int:
        """Return the tokens of one forward."""
        return self.micro_batch * self.sequence_length

    def elements(self, *names: str) -> int:
        """Return the elements for one token of those named tensors that the method reads."""
        return sum(prod(token_shape(self.config, name)) for name in self.reads if name in names)

    @property
    def kept_of_target(self) -> int:
        """Return the bytes of embeddings H, RoPE's tables 4D, and what the method reads."""
        reads = [name for name in self.reads if self.top_k is None or name != FINAL]
        elements = self.config.hidden_size + 4 * head_width(self.config) + self.elements(*reads)
        return (elements * self.dtype.itemsize + TOP_BYTES * (self.top_k or 0)) * self.tokens


@dataclass(frozen=True)
class Item:
    """Hold one use of memory, in one phase, on the device or the host."""

    name: str
    bytes: int
    phase: str = ALWAYS
    on_host: bool = False


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters; tied ones count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def setup_of(
    config: Any, recipe: Recipe, runtime: Runtime, micro_batch: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> Setup:
    """Return the settings of both configurations; the models are built on the meta device, without memory.

    Raises ValueError if the target is to be split over ranks that cannot share it.
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
        stored=stored_tensors(config, reads, states.dtype, states.top_k) if offline else None,
        top_k=states.top_k,
    )


def training_state(setup: Setup) -> list[Item]:
    """Return weights, gradients and optimizer of the draft, as DeepSpeed holds them for our configuration (engine.py).

    Weights: P, or P / R in stage 3, where a forward gathers all of them. Optimizer: AdamW's two moments and a float32 copy of
    the weights, 12 bytes a parameter, shared by the ranks from stage 1 on; no copy if the float32 weights stay where they are.
    Gradients: summed in float32 (in the training dtype in stage 0, and in stages 1 and 2 with offload), shared from stage 2 on.
    Their bucket: none in stage 0, nor in stage 1 in bf16 without offload. Offload moves the optimizer to the host, from stage 2
    on the gradients too, and adds copies of the rank's share: of gradients in float32, of weights below stage 3, and in stage 1
    of gradients as they were summed.
    """
    parameters, stage, element = setup.draft_parameters, setup.zero_stage, setup.dtype.itemsize
    share, offloaded, fp32 = -(-parameters // setup.world_size), setup.offload != "none", setup.dtype == torch.float32
    in_place = fp32 and (stage == 0 or (stage == 3 and not offloaded))
    summed_in = element if stage == 0 or (stage < 3 and offloaded) else 4
    gradients = (share if stage >= 2 else parameters) * summed_in
    items = [Item("draft weights", (share if stage == 3 else parameters) * element)]
    if setup.offload != "nvme":
        items.append(Item("draft optimizer", (share if stage else parameters) * (8 if in_place else 12), on_host=offloaded))
    if stage == 3:
        items.append(Item("draft weights, gathered", parameters * element, DRAFT))
    items.append(Item("draft gradients", gradients, on_host=offloaded and stage >= 2))
    if offloaded:
        copies = 4 + (element if stage < 3 else 0) + (summed_in if stage == 1 else 0)
        items.append(Item("copies for the offload", share * copies, on_host=True))
    if stage > 1 or (stage == 1 and (fp32 or offloaded)):
        items.append(Item("gradient reduction bucket", min(REDUCE_BUCKET, parameters) * element))
    return items


def widest_elements(config: Any, layer: int) -> int:
    """Count elements a token at a feed-forward part's widest moment, without the 4H of residual, embeddings, norm and output.

    SwiGLU: gate, up and their product 3I. Experts, as transformers groups tokens by them (integrations/moe.py): a token's input
    once for each of its experts kH, and gate and up together and apart 4kI, or the output, weighted, and in order again 3kH.
    GPT-OSS also has copies of its biases, 2kI and kH, and clamps: 5kI for three.
    """
    hidden, experts = config.hidden_size, experts_of(config, layer)
    if experts is None:
        return int((4 if config.model_type in JOINED else 3) * config.intermediate_size)
    gates, outputs = (9, 4) if config.model_type == "gpt_oss" else (4, 3)
    _, chosen, width = experts
    return int(chosen * (hidden + max(gates * width, outputs * hidden)))


def target_items(setup: Setup) -> list[Item]:
    """Return the target's weights and its forward, which keeps nothing for a backward.

    At its widest a layer holds residual, embeddings, norm and output, 4H, and its feed-forward part; or in its attention 3H and
    5ND for the rotations; both for the tokens of one chunk. The last layer's keys and values and the final hidden states are
    made after the last rotation. With chunks, keys and values of all layers are kept until the last chunk, 2KDL, and the hidden
    states once more, H. If the target is split, a rank has its part of the weights, of the heads if the plan splits them, and
    of the feed-forward part, but also the whole head; another rank's rows may be computed while its own are kept.
    """
    config, element, tokens, ranks = setup.config, setup.dtype.itemsize, setup.tokens, setup.world_size
    hidden, width, layers = config.hidden_size, head_width(config), config.num_hidden_layers
    parts, groups = ranks if setup.target == TENSOR_PARALLEL else 1, config.num_attention_heads // config.num_key_value_heads
    key_values = (heads_of_rank(config, parts) or config.num_key_value_heads) * width
    heads = groups * key_values
    at_once = min(setup.target_chunk or setup.sequence_length, setup.sequence_length) * setup.micro_batch
    late = setup.elements(FINAL, f"{KEYS}{layers - 1}", f"{VALUES}{layers - 1}")
    feed_forward = max(widest_elements(config, layer) for layer in range(layers))
    widest = max(4 * hidden + feed_forward // parts, 3 * hidden + 5 * heads + 2 * key_values - late)
    items = [
        Item("target weights", -(-setup.target_bytes // (ranks if setup.target == PARTITIONED else parts))),
        Item("target activations", widest * at_once * element, TARGET),
        Item("kept of the target", setup.kept_of_target, TARGET),
    ]
    if setup.target == PARTITIONED:
        items.append(Item("target layer, gathered", setup.largest_gather, TARGET))
    elif parts > 1:
        items.append(Item("target head, whole", config.vocab_size * hidden * element))
        items.append(Item("kept of another rank's rows", setup.kept_of_target, TARGET))
    elif setup.device.type == "cuda":
        items.append(Item("target while it is loaded", setup.target_bytes, on_host=True))
    if at_once < tokens:
        all_layers = 2 * key_values * (layers - 1) + hidden
        items.append(Item("target keys and values of all layers", all_layers * tokens * element, TARGET))
        # For a block of queries against all keys, in backends without kernels for it.
        items.append(Item("attention mask", QUERY_BLOCK * groups * setup.sequence_length * element, TARGET))
    return items


def stored_items(setup: Setup, stored: Tensors) -> list[Item]:
    """Return embedding, norm and head of a target with stored states, and two micro batches of states, on the host.

    The micro batch in use is also on a GPU, while it is decoded.
    """
    on_gpu, micro_batch = setup.device.type == "cuda", bytes_a_token(stored) * setup.tokens
    return [
        Item("target's embedding and head", setup.target_bytes),
        Item("stored states, read ahead", 2 * micro_batch, on_host=on_gpu),
        Item("kept of the target", setup.kept_of_target, TARGET),
        *([Item("stored states, in use", micro_batch, TARGET)] if on_gpu else []),
    ]


def draft_items(setup: Setup) -> list[Item]:
    """Return what is kept of the target, and the method's own forward, losses and backward, over all tokens."""
    config = setup.config
    draft = setup.method.memory(config, setup.settings, setup.tokens, setup.dtype, setup.device, top_k=setup.top_k)
    items = [
        Item("kept of the target", setup.kept_of_target, DRAFT),
        Item("draft activations", draft.kept, DRAFT),
        Item("draft losses, or its backward", max(draft.losses, draft.backward), DRAFT),  # never alive together
    ]
    if setup.target == PARTITIONED:
        gathered = config.vocab_size * config.hidden_size * setup.dtype.itemsize
        items.append(Item("target head, gathered", gathered, DRAFT))
    return items


def estimate(setup: Setup) -> list[Item]:
    """Return all items of one rank."""
    target = target_items(setup) if setup.stored is None else stored_items(setup, setup.stored)
    items = [*target, *training_state(setup), *draft_items(setup)]
    if setup.device.type == "cuda":
        items.append(Item("CUDA, NCCL, fragments (a guess)", GPU_OVERHEAD))
    return items


def peak(items: list[Item], *, on_host: bool = False) -> int:
    """Return the bytes at the worst moment: what is always there plus the larger of the two phases."""
    here = [item for item in items if item.on_host == on_host]
    sums = {phase: sum(item.bytes for item in here if item.phase == phase) for phase in (ALWAYS, TARGET, DRAFT)}
    return sums[ALWAYS] + max(sums[TARGET], sums[DRAFT])


def gib(size: float) -> str:
    """Return a size as text, in GiB or MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def table(setup: Setup) -> str:
    """Return the estimate as lines, largest first, with the peaks of device and host."""
    items, lines = sorted(estimate(setup), key=lambda item: -item.bytes), []
    for on_host, place in ((False, "device"), (True, "host")):
        lines += [f"  {item.name:38s} {gib(item.bytes):>12s}  {item.phase}" for item in items if item.on_host == on_host]
        lines.append(f"  {f'PEAK of one rank, {place}':38s} {gib(peak(items, on_host=on_host)):>12s}")
    return "\n".join(lines)


def out_of_memory(setup: Setup, available: int) -> str:
    """Return a message: how much is needed, how much there is, and what to change."""
    return (
        f"out of memory: a micro batch of {setup.micro_batch} x {setup.sequence_length} tokens needs about "
        f"{gib(peak(estimate(setup)))} of this device's {gib(available)}. Change one or several of: {WAYS_OUT}"
    )


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU, or of this machine's main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
