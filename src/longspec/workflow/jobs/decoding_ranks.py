"""On how many ranks a job's target decodes: the fewest that hold it, by an estimate and the profile's memory of a GPU.

The memory of one rank is told in closed form, from the target's config.json and the sizes of its files of weights. Symbols:
P weights of the target, H hidden width, N heads of width D, K key/value heads, F elements a token of the widest feed-forward
part, L layers, V vocabulary, e bytes of an element, R ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longspec.families import UNSPLIT, WHOLE_FEED_FORWARD, WHOLE_HEADS
from longspec.models.model_folder import INDEX, weight_files
from longspec.train.estimate.feed_forward import experts_of, widest_elements
from longspec.workflow.jobs.resources import GPUS, check_ranks, gpus_in, number_in, with_gpus
from longspec.workflow.settings.targets import settings_of

OVERHEAD = 2 * 2**30  # a CUDA context, NCCL's buffers, gaps in the allocator's memory: a round guess, as while training
STORED_IN = {"float32": 4, "float64": 8}  # bytes of an element by config.json's dtype; those of the others have two
EXPERT_DEFAULTS = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # transformers' own, of keys that may be missing
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NEEDED = {"model_type", "max_position_embeddings", *SIZES}  # keys of config.json


@dataclass(frozen=True)
class Target:
    """config: of config.json, each key an attribute; weights: how many there are."""

    config: Any
    weights: int

    def fitting(self, most: int) -> list[int]:
        """The numbers of ranks, up to `most`, that the target can be split over."""
        if self.config.model_type in UNSPLIT:
            return [1]
        return [ranks for ranks in range(1, most + 1) if getattr(self.config, self._heads) % ranks == 0]

    @property
    def _heads(self) -> str:
        return "num_attention_heads" if self.config.model_type in WHOLE_HEADS else "num_key_value_heads"

    @property
    def shared(self) -> str:
        """Which of its parts ranks share, for messages."""
        if self.config.model_type in UNSPLIT:
            return f"a target of model_type {self.config.model_type!r} cannot be split over ranks"
        return f"ranks share its {self._heads}: {getattr(self.config, self._heads)}, none of which is divided"


@dataclass(frozen=True)
class Decoding:
    """Texts that are decoded side by side, in the most tokens that there can be."""

    tokens: int  # of prompts and what follows them, in the cache
    forward: int  # of the prompts alone
    element: int  # bytes of an element
    masked: int = 0  # pairs of tokens in the prompts' mask; 0 without one
    logits: int = 0  # tokens whose logits are kept
    nodes: int = 1  # of a tree
    draft: int = 0  # weights beside the target; 0 without a draft


def read_target(folder: Path) -> Target | None:
    """A target's figures; None where it is not there, or not whole."""
    content = settings_of(folder)
    if content is None or not content.keys() >= NEEDED:
        return None
    try:
        files = [name for name in weight_files(folder) if not name.endswith(INDEX)]
    except ValueError:  # its own job tells what is wrong
        return None
    stored_in = STORED_IN.get(str(content.get("dtype") or content.get("torch_dtype")), 2)
    return target_of(content, sum((folder / name).stat().st_size for name in files) // stored_in)


def target_of(content: Mapping[str, Any], weights: int) -> Target:
    """The figures of a target by the content of its config.json."""
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    heads = content["num_attention_heads"]
    config = SimpleNamespace(**EXPERT_DEFAULTS | dict(content))
    config.rope_parameters = rope
    config.num_key_value_heads = content.get("num_key_value_heads") or heads
    config.head_dim = content.get("head_dim") or content["hidden_size"] // heads
    return Target(config, weights)


def rank_bytes(target: Target, decoding: Decoding, ranks: int) -> int:
    """Memory of each of so many ranks.

    Weights: eP / R, norms aside, and the draft's, which is whole on each. Cache: 2KDL / R a token; beside it what drafts read,
    hidden states of three layers and the keys and values of one, their own too: 3H + 4KD. A forward over the prompts at its
    widest: residual, embeddings, norm and output 4H beside F / R, or 3H beside (5ND + 2KD) / R for the rotations; a mask has a
    byte for each pair and e in the kernel. Or, later, logits: those that are kept, and of a tree's nodes their probabilities
    and two sorted copies in float32.
    """
    config, element = target.config, decoding.element
    hidden, vocabulary, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    heads, key_values = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sharing = 1 if config.model_type in WHOLE_HEADS else ranks
    widest = max(_feed_forward(config, layer, ranks) for layer in range(layers))
    weights = -(-target.weights // ranks) + decoding.draft
    cached = 2 * key_values * layers // sharing + (3 * hidden + 4 * key_values if decoding.draft else 0)
    forward = element * decoding.forward * max(4 * hidden + widest, 3 * hidden + (5 * heads + 2 * key_values) // sharing)
    forward += (1 + element) * decoding.masked
    logits = vocabulary * (element * decoding.logits + (element + 12) * decoding.nodes)
    return element * (weights + cached * decoding.tokens) + max(forward, logits) + OVERHEAD


def _feed_forward(config: Any, layer: int, ranks: int) -> int:
    """Elements a token of a layer's feed-forward part; of experts each rank has the inputs and outputs of all."""
    elements = widest_elements(config, layer)
    is_whole = config.model_type in WHOLE_FEED_FORWARD or experts_of(config, layer) is not None
    return elements if is_whole else elements // ranks


@dataclass(frozen=True)
class Machine:
    """The GPUs that a rule's jobs may have."""

    rule: str
    gpus: int = 0  # of a node; 0 where the profile tells none
    gres: str = ""  # a job's own, as the profile has it; "" for as many as there are ranks
    node_gres: str = ""  # a whole node's, which tells their type
    gpu_mem: int = 0  # MB of each; 0: unknown
    ranks: int = 0  # by hand; 0: by the estimate

    def asked(self, ranks: int) -> str:
        """The GPUs that a job of so many ranks asks Slurm for; "" where the profile has none."""
        if self.gres or not self.node_gres:
            return self.gres
        named = GPUS.search(self.node_gres)
        return with_gpus(named[0] if named else "gpu", ranks)


def machine_of(rule: str, block: Mapping[str, str], training: Mapping[str, str]) -> Machine:
    """The machine of a rule by its block of the profile's set-resources, and that of `train`, which has a whole node's GPUs.

    Raises ValueError for a number that is none, and for more ranks than GPUs.
    """
    gres, node = (each.get("gres", "").strip("'\"") for each in (block, training))
    ranks = number_in(rule, block, "ranks")
    check_ranks(rule, ranks, rule if gres else "train", gres or node)
    return Machine(rule, gpus_in(gres or node), gres, node, number_in(rule, block, "gpu_mem"), ranks)


def ranks_of(what: str, target: Target | None, decodings: Iterable[Decoding], machine: Machine) -> int:
    """The fewest ranks that hold the target and each of the decodings; one where there is nothing to estimate from.

    what: is decoded, for messages. Raises ValueError, with the numbers, for ranks that cannot share the target's heads, and
    where no number of a node's GPUs holds it.
    """
    if machine.ranks:
        if target is not None and machine.ranks not in target.fitting(machine.ranks):
            raise ValueError(
                f"set-resources: {machine.rule}: ranks: {machine.ranks}: {what}: {target.shared}; give one of "
                f"{', '.join(map(str, target.fitting(target.config.num_attention_heads)))}"
            )
        return machine.ranks
    if target is None or not machine.gpu_mem:
        return 1
    fitting = target.fitting(max(1, machine.gpus))
    needed = {ranks: max(rank_bytes(target, each, ranks) for each in decodings) for ranks in fitting}
    for ranks, size in needed.items():
        if size <= machine.gpu_mem * 10**6:
            return ranks
    sizes = ", ".join(f"{_gb(size)} on each of {ranks}" for ranks, size in needed.items())
    raise ValueError(
        f"{what}: needs {sizes} GPUs, by an estimate; set-resources: {machine.rule}: gpu_mem has "
        f"{_gb(machine.gpu_mem * 10**6)}, a node {max(1, machine.gpus)} of them, and {target.shared}. Shorten the longest "
        f"prompts or answers; or set ranks of {machine.rule} in profiles/slurm/profile.yaml, in the place of the estimate"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
