"""Define the draft method `glide`: its training's random draws, which depend on (seed, step, row) alone, and its memory and
operations in closed form.

Shapes: S tokens of one row. Symbols: H hidden width, N heads of width D, K key/value heads, I feed-forward width, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspec.methods.contract import Distribution, DraftMemory, Method
from longspec.methods.draft_files import stored_settings
from longspec.methods.glide.layer import GlideLayer, check_draft_state, published_layout
from longspec.methods.glide.settings import BLOCKS, Draft
from longspec.methods.glide.trainer import PUBLISHED, Glide, class_for, reads
from longspec.models.attention.visibility import block_pairs, causal_pairs
from longspec.models.losses import loss_bytes
from longspec.models.target import head_width
from longspec.models.teachers import TOP_BYTES

# The published code keeps this many positions free at the end of the target's range.
RESERVED_POSITIONS = 1000


@dataclass(frozen=True)
class RowDraw:
    """Hold the values drawn for one row in one step."""

    anchors: int
    offset: int
    lag: int


def draw_row(draft: Draft, seed: int, step: int, row: int, length: int, target_positions: int) -> RowDraw:
    """Draw anchors, offset and lag of one row (LongSpec 3.1, 3.2 and the published limits).

    length: tokens of the row; target_positions: the target's max_position_embeddings. Rows longer than `anchors_up_to` and
    targets too short for an offset keep plain positions (offset 0).
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, row])))
    anchors = int(generator.integers(0, draft.anchor_tokens + 1))
    limit = min(draft.max_position, target_positions - RESERVED_POSITIONS) - length
    offset = int(generator.integers(0, max(limit, 0) + 1))
    lag = int(generator.integers(1, draft.lag + 1))
    if draft.anchors == "fixed":
        anchors = draft.anchor_tokens
    if draft.anchors == "off" or length > draft.anchors_up_to:
        anchors = offset = 0
    return RowDraw(anchors, offset, draft.lag if draft.lag_mode == "fixed" else lag)


def shift_positions(position_ids_S: np.ndarray, draw: RowDraw) -> np.ndarray:
    """Return anchor-offset positions: each document's first `anchors` tokens stay, all later ones move by `offset`."""
    return np.where(position_ids_S >= draw.anchors, position_ids_S + draw.offset, position_ids_S)


def cross_pairs(length: int, draft: Draft) -> float:
    """Count pairs of the cross attention in a document under the variant's lag; random lags count as their mean."""
    if draft.lag_mode == "blocks":
        return block_pairs(length, draft.block)
    lags = [draft.lag] if draft.lag_mode == "fixed" else range(1, draft.lag + 1)
    return sum(causal_pairs(length, lag=lag) for lag in lags) / len(lags)


def operations(
    config: Any, settings: Draft, tokens: int, documents: Iterable[int], labels: int, *, with_teacher: bool
) -> tuple[float, float]:
    """Count operations of the layer's forward and backward, and of the head's products on the trained tokens.

    The backward of a trained product costs two of its size (input and weight); that of own attention four for the forward's
    two, of cross attention two, since its keys and values are the frozen target's. The head has the draft's logits, their
    gradient, and the target's logits if there is a teacher: for soft labels and for the target's own loss.
    """
    width = head_width(config)
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    own = cross = 0.0
    for length, times in Counter(documents).items():
        own += times * causal_pairs(length, settings.window)
        cross += times * cross_pairs(length, settings)
    attention = 2 * config.hidden_size * (2 * heads + key_values)  # own: q, k, v, o; cross: q, o
    products = attention + 3 * config.hidden_size * config.intermediate_size
    of_layer = 3 * 2.0 * tokens * products + heads * (12.0 * own + 8.0 * cross)
    return of_layer, (3 if with_teacher else 2) * 2.0 * labels * config.hidden_size * config.vocab_size


def memory(
    config: Any, settings: Draft, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
) -> DraftMemory:
    """Estimate the bytes of the layer's forward and backward and of the losses, for tokens that are all trained.

    Kept, in elements of the dtype a token: norms and the inputs of products 8H, own keys and values 2KD, queries and
    attention outputs 4ND, four of width I; the hidden states' gradient H, which the loss makes in the forward; in float32
    the inputs of two norms 2H and two softmax sums a head. A final norm of its own adds 2H and one float32 H. Losses hold
    another copy of both models' hidden states of the trained tokens, 2H, or H and top_k tokens with their log-probabilities,
    and a chunk of logits. The backward begins with two more of width I and one H.
    """
    element = dtype.itemsize
    hidden, width, ffn = config.hidden_size, head_width(config), config.intermediate_size
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    norms = 3 if settings.final_norm else 2
    kept = element * ((5 + 2 * norms) * hidden + 2 * key_values + 4 * heads + 4 * ffn)
    kept += 4 * (norms * hidden + 2 * config.num_attention_heads)
    labels = 3 * hidden * element if top_k is None else 2 * hidden * element + TOP_BYTES * top_k
    return DraftMemory(
        kept=kept * tokens,
        losses=loss_bytes(config.vocab_size, tokens, device, sparse=top_k is not None, kind=settings.loss) + labels * tokens,
        backward=(2 * ffn + hidden) * element * tokens,
    )


class GlideMethod(Method):
    """Answer the contract (methods/contract.py)."""

    name = "glide"
    reads = staticmethod(reads)
    memory = staticmethod(memory)
    operations = staticmethod(operations)
    check_state = staticmethod(check_draft_state)

    def learnt(self, settings: Draft) -> Distribution | None:
        return None if settings.loss == "hard" else Distribution(None, settings.temperature)

    def layer(self, config: Any, settings: Draft) -> GlideLayer:
        return GlideLayer(config, final_norm=settings.final_norm)

    def trainer(self, states: Any, settings: Draft, start: Path | None) -> Glide:
        path = None if start is None else str(start)
        return class_for(states.config.model_type)(states.config, "", path, draft=settings, states=states)

    def draws(
        self, settings: Draft, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return anchor-offset positions, and the lag of each row."""
        draws = [draw_row(settings, seed, step, number, len(plain_S), target_positions) for number, plain_S in rows]
        positions = [shift_positions(plain_S, draw) for (_, plain_S), draw in zip(rows, draws, strict=True)]
        lag = BLOCKS if settings.lag_mode == BLOCKS else torch.tensor([draw.lag for draw in draws])
        return positions, {"lag": lag}

    def drafted_steps(self, settings: Draft) -> int:
        return settings.lag

    def each_step(self, settings: Draft) -> dict[str, Any]:
        """Return lags 1, 2, ...: step k of drafting does not see the target's newest k tokens."""
        return {"lag": tuple(range(1, settings.lag + 1))}

    def heaviest(self, settings: Draft) -> dict[str, Any]:
        """Return the lag that hides least."""
        return {"lag": BLOCKS if settings.lag_mode == BLOCKS else 1}

    def published(self, state: dict[str, Tensor], settings: Draft) -> dict[str, Tensor]:
        return published_layout(state)

    def stored_settings(self, path: Path) -> Draft:
        """Return a draft folder's settings; published weights without them are of the published variant."""
        return stored_settings(path, Draft) or PUBLISHED


METHOD = GlideMethod()
