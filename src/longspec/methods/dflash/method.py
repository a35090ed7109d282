"""Define the draft method `dflash`: DFlash's random draws, and its memory and operations in closed form.

Shapes: B rows, S tokens. Symbols: H hidden width, N heads of width D, K key/value heads, I feed-forward width, V draft
vocabulary, T the target's, n layers of the target that are read, W slots of a block, Q slots of all blocks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspec.config.schema import HARD
from longspec.methods.contract import DraftMemory
from longspec.methods.dflash.layer import K_NORM, DFlashLayer, config_fields, head_shape
from longspec.methods.dflash.settings import NAME, Settings, anchors_of
from longspec.methods.dflash.trainer import DFlashTrainer
from longspec.methods.layer_config import layer_config
from longspec.methods.own_layers import OwnLayersMethod
from longspec.models.attention.backends import score_bytes
from longspec.models.attention.visibility import causal_pairs
from longspec.models.block_losses import block_bytes
from longspec.models.teachers import TOP_BYTES


def slots_of(settings: Settings, tokens: int) -> int:
    """Return the slots of all blocks of a step whose rows have `tokens` tokens in all."""
    row = min(settings.row_tokens, tokens) or tokens
    return max(1, tokens // row) * anchors_of(settings, row) * settings.block_size


def projection_operations(config: Any, settings: Settings, tokens: int) -> float:
    """Count operations of what layers see of a text, forward and backward; the target's states get no gradient."""
    (_, key_values, width), hidden = head_shape(config, settings), config.hidden_size
    taps = len(settings.read_of(config.num_hidden_layers))
    return 2.0 * tokens * hidden * (2 * taps * hidden + 3 * settings.depth * 2 * key_values * width)


def block_operations(config: Any, settings: Settings, slots: int, pairs: float) -> float:
    """Count operations of all layers on `slots` slots that see `pairs` keys in all, forward and backward.

    The backward of a trained product costs two of its size (input and weight), that of attention four for the forward's two.
    """
    heads, key_values, width = head_shape(config, settings)
    products = 2 * config.hidden_size * (heads + key_values) * width
    products += 3 * config.hidden_size * layer_config(config, settings).intermediate_size
    return settings.depth * (3 * 2.0 * slots * products + 12.0 * heads * width * pairs)


def head_operations(config: Any, settings: Settings, predicted: int, *, with_teacher: bool) -> float:
    """Count operations of the slots' logits, their gradient, the gradient of a head of its own, and the target's logits."""
    of_draft = 2 * config.vocab_size if settings.vocabulary is None else 3 * settings.vocabulary
    return 2.0 * predicted * config.hidden_size * (of_draft + with_teacher * config.vocab_size)


def operations(
    config: Any, settings: Settings, tokens: int, documents: Iterable[int], labels: int, *, with_teacher: bool
) -> tuple[float, float]:
    """Count operations of all layers and of the head, as if every slot had a label and anchors were spread evenly.

    With answers alone there are at most as many blocks as labels. With top_k the target's logits are not made.
    """
    slots, window = settings.block_size, settings.sliding_window
    blocks = min(slots_of(settings, tokens) // slots, labels)
    back = [None if window is None else window - 1 - slot for slot in range(slots)]  # keys of the text that each slot may see
    text = sum(times * causal_pairs(length, most, 1) for length, times in Counter(documents).items() for most in back)
    own = slots * (slots if window is None else (slots + 1) / 2)
    of_layers = block_operations(config, settings, blocks * slots, blocks * (text / max(1, tokens) + own))
    of_head = head_operations(config, settings, blocks * settings.predicted, with_teacher=with_teacher)
    return projection_operations(config, settings, tokens) + of_layers, of_head


def memory(
    config: Any, settings: Settings, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
) -> DraftMemory:
    """Estimate the bytes of the blocks' forward and backward and of the losses, for tokens that are all trained.

    Kept, in elements of the dtype. For each token of a text: the states that are read nH, hidden_norm's result before and after
    its weight 2H, each layer's keys before the norm's weight and rotated, and values, 3KD. For each slot and layer: two norms
    before and after their weights 4H, queries before their norm's weight and rotated 2ND, the attention's output twice 2ND,
    keys and values 3KD, four of width I. In float32 the inputs of norms: H and KD a token; 2H, ND and KD a slot, and a softmax
    sum a head. Once for each slot: rotations 2D, before the head H before the norm's weight, its gradient H, H in float32.

    Losses hold the rows before the head H, the target's trained tokens H or top_k tokens, a chunk of logits, and the gradient
    of the draft's own head in float32, which the backward holds too. At its widest the backward holds gradients of slots of
    width I and H, or of queries and outputs together with those of all layers' keys and values of the text. If attention has
    no kernel, the scores of a chunk of queries may come on top of these.
    """
    (n_heads, n_key_values, width), hidden = head_shape(config, settings), config.hidden_size
    ffn, element = layer_config(config, settings).intermediate_size, dtype.itemsize
    heads, key_values, depth = n_heads * width, n_key_values * width, settings.depth
    slots, taps = slots_of(settings, tokens), len(settings.read_of(config.num_hidden_layers))
    predicted = slots // settings.block_size * settings.predicted
    of_token = element * (taps * hidden + 2 * hidden + 3 * depth * key_values) + 4 * (hidden + depth * key_values)
    of_slot = depth * element * (4 * hidden + 4 * heads + 3 * key_values + 4 * ffn)
    of_slot += depth * 4 * (2 * hidden + heads + key_values + n_heads) + 2 * element * width
    kept = of_token * tokens + of_slot * slots + (2 * element + 4) * hidden * predicted
    with_teacher = settings.loss != HARD and top_k is None
    proposed = settings.vocabulary or config.vocab_size
    logits = block_bytes(config.vocab_size if with_teacher else 0, proposed, settings.predicted, predicted, dtype, device)
    head = 0 if settings.vocabulary is None else 4 * proposed * hidden
    of_target = hidden * element if with_teacher else TOP_BYTES * (top_k or 0) * (settings.loss != HARD)
    losses = logits + head + element * hidden * predicted + of_target * tokens
    row = min(tokens, settings.row_tokens or tokens) + settings.block_size
    scores = score_bytes(n_heads, width, row, None, dtype, device)
    attention = element * ((3 * heads + 2 * key_values + hidden) * slots + 2 * key_values * depth * tokens) + scores
    widest = max(element * (2 * ffn + 2 * hidden) * slots, attention - element * 4 * ffn * slots)
    return DraftMemory(kept=int(kept), losses=int(losses), backward=int(widest + head))


class DFlashMethod(OwnLayersMethod):
    """Answer the contract (methods/contract.py)."""

    name = NAME
    schema = Settings
    trained_by = DFlashTrainer
    layer = DFlashLayer
    memory = staticmethod(memory)
    operations = staticmethod(operations)
    config_fields = staticmethod(config_fields)

    def check_state(self, layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
        """Raise ValueError if a file has another draft vocabulary, or its layers' norms of keys differ though one is shared."""
        own, known, shared = dict(state), layer.state_dict(), K_NORM.format(0)
        for number in range(1, len(layer.layers)):  # type: ignore[arg-type]
            name = K_NORM.format(number)
            if name not in known and name in own and not torch.equal(own.pop(name), state.get(shared, torch.empty(0))):
                raise ValueError(
                    f"{source}: {name}: differs from {shared}, which all layers of this draft share; set "
                    "recipe.method.tied_k_norm: false, or give another draft"
                )
        super().check_state(layer, own, source)

    def draws(
        self, settings: Settings, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return plain positions, and a random `priority` for each token: the possible anchors with the highest are taken."""
        generators = [np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, row]))) for row, _ in rows]
        drawn = [each.random(len(plain_S), dtype=np.float32) for each, (_, plain_S) in zip(generators, rows, strict=True)]
        return [plain_S for _, plain_S in rows], {"priority": torch.from_numpy(np.stack(drawn))}

    def drafted_steps(self, settings: Settings) -> int:
        return settings.predicted

    def published(self, state: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
        """Return the layer's tensors, a shared norm of keys copied for each layer, and the draft vocabulary's tensors."""
        norms = {K_NORM.format(number): state.get(K_NORM.format(number)) for number in range(settings.depth)}
        shared = state[K_NORM.format(0)]
        written = {name: shared.clone() if norm is None else norm for name, norm in norms.items()}
        return super().published(state | written, settings)


METHOD = DFlashMethod()
