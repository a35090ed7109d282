"""Floating-point operations of a training step in closed form: a product of [m, k] and [k, n] has 2 m k n.

Counted are the operations in the formulas of target, draft and losses: matrix products, and attention over the pairs of query
and key that see each other. Not counted are norms, activations, softmax and rotations (below 1 %), and what a kernel computes
twice or for keys that a mask hides.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from longspec.config import OFFLINE, States
from longspec.data.pack.arrow_shards import DOCUMENT_STARTS, LENGTH, PackedRows
from longspec.data.schedule import TrainedRows
from longspec.families import layer_windows
from longspec.methods.contract import Method
from longspec.models.attention.visibility import causal_pairs
from longspec.models.target import head_width
from longspec.states.forward import depth_of
from longspec.states.tensors import FINAL

# Dense bf16 tensor-core FLOP/s from the makers' data sheets, by a part of the device's name. The first match counts, so longer
# names come first: "H100 PCIe" before "H100".
PEAK_BF16 = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "NVL": 835e12,  # of H100 and H200
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H800 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


class Operations(NamedTuple):
    """Hold operations: the target's forward, the draft's forward and backward, the products with the head; sum() adds them."""

    target: float
    draft: float
    head: float


def target_pairs(documents: Iterable[int], config: Any, layers: int) -> float:
    """Count pairs of query and key that see each other in the first `layers` layers. documents: their lengths in tokens."""
    # Number of keys before its own that a query sees; None: all.
    windows = Counter(None if size is None else size - 1 for size in layer_windows(config)[:layers])
    lengths = Counter(documents).items()
    return float(sum(n * m * causal_pairs(length, window) for length, n in lengths for window, m in windows.items()))


def experts_of(config: Any, layer: int) -> tuple[int, int, int] | None:
    """Return (experts of a target's layer, experts for each token, an expert's width); None if the layer is dense."""
    if config.model_type == "gpt_oss":
        return config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    count = getattr(config, "num_experts", None)
    if not count or layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step:
        return None
    return count, config.num_experts_per_tok, config.moe_intermediate_size


def layer_products(config: Any, layer: int) -> int:
    """Count the multiplications for one token in the feed-forward part of a layer."""
    hidden, experts = config.hidden_size, experts_of(config, layer)
    if experts is None:
        return int(3 * hidden * config.intermediate_size)
    count, chosen, width = experts
    return int(hidden * count + 3 * hidden * width * chosen)


def target_operations(config: Any, tokens: int, pairs: float, whole_layers: int, then_keys: bool) -> float:
    """Count the target's forward without its head, as deep as its draft needs it (depth_of). pairs: over whole layers.

    A last layer that only makes keys and values still computes all four projections.
    """
    width = head_width(config)
    heads = config.num_attention_heads * width
    projections = 2 * config.hidden_size * (heads + config.num_key_value_heads * width)
    products = (whole_layers + then_keys) * projections
    products += sum(layer_products(config, layer) for layer in range(whole_layers))
    return 2.0 * tokens * products + 4.0 * heads * pairs  # queries by keys, weights by values


def operations(
    config: Any,
    method: Method,
    settings: Any,
    tokens: int,
    documents: Sequence[int],
    labels: int,
    states: States | None = None,
    *,
    with_llm_loss: bool = True,
) -> Operations:
    """Count one step's operations, over all ranks.

    tokens: of all rows, padding included; documents: their lengths; labels: trained tokens; states: of the recipe, None =
    online; with_llm_loss: whether the target's own loss is measured; if not, less of the target may be needed.
    """
    reads = method.reads(config, settings, with_llm_loss=with_llm_loss)
    depth = depth_of(reads, config.num_hidden_layers)
    with_teacher = FINAL in reads and (states is None or states.top_k is None)
    layer, head = method.operations(config, settings, tokens, documents, labels, with_teacher=with_teacher)
    if states is not None and states.source == OFFLINE:
        return Operations(0.0, layer, head)
    pairs = target_pairs(documents, config, depth[0])
    return Operations(target_operations(config, tokens, pairs, *depth), layer, head)


def document_lengths(rows: PackedRows | TrainedRows, row_numbers: Iterable[int]) -> list[int]:
    """Return the lengths of the documents in these rows, without padding."""
    lengths: list[int] = []
    for number in row_numbers:
        batch, place = rows.find(int(number))  # reading whole rows is slow: a step may have thousands
        edges = [*batch.column(DOCUMENT_STARTS)[place].as_py(), batch.column(LENGTH)[place].as_py()]
        lengths += [stop - start for start, stop in pairwise(edges)]
    return lengths


def peak(device: torch.device, dtype: torch.dtype, configured_tflops: float | None) -> float | None:
    """Return operations per second of one rank's device: as configured, else a known GPU's from the data sheet; or None."""
    if configured_tflops is not None:
        return configured_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype == torch.bfloat16 else ""
    return next((rate for part, rate in PEAK_BF16.items() if part in name), None)
