"""Floating-point operations of a training step in closed form: a product of [m, k] and [k, n] has 2 m k n.

Counted is what the formulas of target, draft and losses need: matrix products, and attention over the pairs of query and
key that see each other. Left out are norms, activations, softmax and rotations (below 1 %), and what a kernel does more
than once or to keys that a mask hides.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from longspec.config import Draft
from longspec.data.pack.arrow_shards import DOCUMENT_STARTS, LENGTH, PackedRows
from longspec.models.target import head_width
from longspec.train.phases import Phases

# Dense tensor-core rates in bf16 as their makers' data sheets state them, by a part of the device's name; the longer first.
PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


@dataclass(frozen=True)
class Pairs:
    """Pairs of query and key that see each other: in all the target's layers, in the draft's own, in its cross attention."""

    target: float = 0.0
    own: float = 0.0
    cross: float = 0.0

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.target + other.target, self.own + other.own, self.cross + other.cross)


@dataclass(frozen=True)
class Operations:
    """Operations of a step: the target's forward, the draft's forward and backward, the products with the head."""

    target: float
    draft: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.target + self.draft + self.head


def causal_pairs(length: int, window: int | None = None, lag: int = 0) -> int:
    """Query i sees key j when j <= i - lag and i - j <= window, in a document of `length` tokens."""
    if window is not None:
        return causal_pairs(length, None, lag) - causal_pairs(length, None, max(window + 1, lag))
    rest = max(0, length - lag)
    return rest * (rest + 1) // 2


def block_pairs(length: int, block: int) -> int:
    """Query i sees the keys before its own block: (i // block) * block of them."""
    whole, rest = divmod(length, block)
    return block * block * (whole * (whole - 1) // 2) + rest * whole * block


def cross_pairs(length: int, draft: Draft) -> float:
    """Of a document under the variant's lag; random lags count as their mean."""
    if draft.lag_mode == "blocks":
        return block_pairs(length, draft.block)
    lags = [draft.lag] if draft.lag_mode == "fixed" else range(1, draft.lag + 1)
    return sum(causal_pairs(length, lag=lag) for lag in lags) / len(lags)


def layer_windows(config: Any) -> list[int | None]:
    """Of each of the target's layers, how many keys before its own a query sees; None for all."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [size - 1 if size is not None and kind == "sliding_attention" else None for kind in kinds]


def pairs_of(documents: Iterable[int], config: Any, draft: Draft, *, keys_only: bool = False) -> Pairs:
    """The pairs of documents of so many tokens each. keys_only: the target's last layer makes keys and values alone."""
    windows = layer_windows(config)[: -1 if keys_only else None]
    pairs = Pairs()
    for length, times in Counter(documents).items():
        target = sum(windows.count(window) * causal_pairs(length, window) for window in set(windows))
        pairs += Pairs(times * target, times * causal_pairs(length, draft.window), times * cross_pairs(length, draft))
    return pairs


def layer_products(config: Any, layer: int) -> int:
    """Multiplications that one token needs in the feed-forward part of a target's layer."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts", None)
    sparse = experts and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    if sparse:
        return hidden * experts + 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
    return 3 * hidden * config.intermediate_size


def target_operations(config: Any, tokens: int, pairs: float, *, keys_only: bool = False) -> float:
    """The target's forward without its head. pairs: over all layers.

    keys_only leaves out the last layer's attention and feed-forward part (its four projections are made).
    """
    width = head_width(config)
    heads, layers = config.num_attention_heads * width, config.num_hidden_layers
    projections = 2 * config.hidden_size * (heads + config.num_key_value_heads * width)
    products = layers * projections + sum(layer_products(config, layer) for layer in range(layers - keys_only))
    return 2.0 * tokens * products + 4.0 * heads * pairs  # queries by keys, weights by values


def draft_operations(config: Any, tokens: int, pairs: Pairs) -> float:
    """The draft's forward and backward.

    The backward of a trained product is two of its size (input and weight), of its own attention four where the forward
    has two; in the cross attention two, since keys and values are the frozen target's.
    """
    width = head_width(config)
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    attention = 2 * config.hidden_size * (2 * heads + key_values)  # own: q, k, v, o; cross: q, o
    products = attention + 3 * config.hidden_size * config.intermediate_size
    return 3 * 2.0 * tokens * products + heads * (12.0 * pairs.own + 8.0 * pairs.cross)


def head_operations(config: Any, labels: int, *, with_teacher: bool) -> float:
    """The vocabulary's products on the trained tokens: the draft's logits, their gradient, and the target's logits."""
    return (3 if with_teacher else 2) * 2.0 * labels * config.hidden_size * config.vocab_size


def operations(
    config: Any, draft: Draft, tokens: int, documents: Iterable[int], labels: int, *, with_target_loss: bool = True
) -> Operations:
    """One step's operations, over all ranks.

    tokens: of all rows, padding included; documents: their lengths; labels: trained tokens; with_target_loss:
    runtime.log_target_loss, without which hard labels need no more of the target than keys and values.
    """
    keys_only = draft.loss == "hard" and not with_target_loss
    pairs = pairs_of(documents, config, draft, keys_only=keys_only)
    return Operations(
        target=target_operations(config, tokens, pairs.target, keys_only=keys_only),
        draft=draft_operations(config, tokens, pairs),
        head=head_operations(config, labels, with_teacher=not keys_only),
    )


def document_lengths(rows: PackedRows, row_numbers: Iterable[int]) -> list[int]:
    """The lengths of the documents in these rows, padding left out."""
    lengths: list[int] = []
    for number in row_numbers:
        batch, place = rows.find(int(number))  # not the whole row: a step may have thousands
        edges = [*batch.column(DOCUMENT_STARTS)[place].as_py(), batch.column(LENGTH)[place].as_py()]
        lengths += [stop - start for start, stop in pairwise(edges)]
    return lengths


@cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square product on this machine now, the best of some."""
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    # Random numbers: a GPU that multiplies constants draws less power and reaches rates that no training does.
    left = torch.randn((side, side), generator=torch.Generator(device).manual_seed(0), dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):
        phases = Phases(device)
        phases.take()
        left @ left
        best = min(best, sum(phases.take().values()))
    return 2.0 * side**3 / best


def peak(device: torch.device, dtype: torch.dtype, configured_tflops: float | None) -> tuple[float, str]:
    """Operations a second one rank's device is measured by, and where the number is from.

    What is configured; else the data sheet of a known GPU; else what a matrix product reaches.
    """
    if configured_tflops is not None:
        return configured_tflops * 1e12, "runtime.peak_tflops"
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, rate in PEAK_BF16.items():
            if part in name:
                return rate, f"data sheet of {part}"
    return measured_peak(device, dtype), f"measured on a product of matrices in {dtype}"
