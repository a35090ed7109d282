"""Define the draft method `eagle3`, with its memory and operations in closed form.

Symbols: H hidden width, N heads of width D, K key/value heads, I feed-forward width, V draft vocabulary, T the target's, k
steps of a chain.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from longspec.families import position_limit
from longspec.methods.contract import DraftMemory
from longspec.methods.eagle3.layer import Eagle3Layer, config_fields
from longspec.methods.eagle3.settings import AUXILIARY, NAME, Settings
from longspec.methods.eagle3.trainer import Eagle3Trainer
from longspec.methods.layer_config import layer_config
from longspec.methods.own_layers import OwnLayersMethod
from longspec.models.attention.backends import score_bytes
from longspec.models.attention.visibility import causal_pairs
from longspec.models.chain_losses import chain_bytes
from longspec.models.target import head_width
from longspec.models.teachers import TOP_BYTES


def projection_operations(config: Any, settings: Settings, tokens: int) -> float:
    """Count operations of the features, forward and backward; the target's states get a gradient only for their norms."""
    return (3 if settings.fc_norm or settings.norm_before_fc else 2) * 2.0 * tokens * AUXILIARY * config.hidden_size**2


def step_operations(config: Any, tokens: int, pairs: float) -> float:
    """Count operations of one step of the layer, forward and backward.

    The backward of a trained product costs two of its size (input and weight), that of attention four for the forward's two.
    """
    hidden, width = config.hidden_size, head_width(config)
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    products = 2 * hidden * (heads + 2 * key_values) + heads * hidden + 3 * hidden * config.intermediate_size
    return 3 * 2.0 * tokens * products + 12.0 * heads * pairs


def head_operations(config: Any, settings: Settings, labels: int, rows: int) -> float:
    """Count operations of the target's logits of each label, and of each row's draft logits and both their gradients."""
    return 2.0 * config.hidden_size * (labels * config.vocab_size + 3 * rows * (settings.vocabulary or config.vocab_size))


def operations(
    config: Any, settings: Settings, tokens: int, documents: Iterable[int], labels: int, *, with_teacher: bool
) -> tuple[float, float]:
    """Count operations of all steps and of the head, as if every token began a chain and every label ended one in each step.

    Only a few tokens at each document's ends do not. With top_k the target's logits are not made; otherwise they are made
    anyway, so the target's own loss costs no product.
    """
    steps, pairs = range(settings.steps), [0.0] * settings.steps
    for length, times in Counter(documents).items():
        for step in steps:
            window = None if settings.sliding_window is None else settings.sliding_window - 1 - step
            pairs[step] += times * (causal_pairs(length, window) + step * length)  # the text's keys, and the chain's own
    of_steps = sum(step_operations(layer_config(config, settings), tokens, pairs[step]) for step in steps)
    of_head = head_operations(config, settings, labels if with_teacher else 0, settings.steps * labels)
    return projection_operations(config, settings, tokens) + of_steps, of_head


def memory(
    config: Any, settings: Settings, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
) -> DraftMemory:
    """Estimate the bytes of the steps' forward and backward and of the losses, for tokens that are all trained.

    Kept of each step, in elements of the dtype a token: the four norms' results before their weights, the inputs of the
    attention 2H and of the feed-forward part, and the gradient of the rows before the head, 8H; queries and the attention's
    output 2ND, keys and values 2KD; four of width I. In float32 the inputs of the norms, 3H (2H if the dtype is float32: the
    head's norm and the next step's read one), a softmax sum a head and the weights of the chain's own keys. Of the first step
    the auxiliary hidden states side by side 3H, and once more for each norm over them; of the last step its output H.

    Losses hold the normed rows of all steps kH, the target's trained tokens H or top_k of its tokens with their
    log-probabilities, a chunk of logits, and the gradient of the head's weight in float32, which the backward holds too. The
    backward also holds another gradient of the rows; at a step's widest part two of width I and H, or gradients of all steps'
    keys and values. If attention has no kernel (on a GPU with neither flash-attn nor compiled flex_attention, as
    `runtime.attention: auto` finds here), these may be held with the scores of a block of queries, after the last step's
    results behind its attention are freed: 5H, four of width I and two norms. The keys are those of one row: of all tokens, or
    of as many as the target has positions.
    """
    positions, config = position_limit(config), layer_config(config, settings)
    element, steps, single = dtype.itemsize, settings.steps, dtype == torch.float32
    hidden, width, ffn = config.hidden_size, head_width(config), config.intermediate_size
    heads, key_values = config.num_attention_heads * width, config.num_key_value_heads * width
    step = element * (8 * hidden + 2 * heads + 2 * key_values + 4 * ffn)
    step += 4 * ((2 if single and not settings.norm_output else 3) * hidden + config.num_attention_heads)
    own = 4 * config.num_attention_heads * steps * (steps - 1) // 2
    kept = steps * step + own + element * hidden * (AUXILIARY * (1 + settings.fc_norm + settings.norm_before_fc) + 1)
    window = None if settings.sliding_window is None else settings.sliding_window - 1
    scores = score_bytes(config.num_attention_heads, width, min(tokens, positions), window, dtype, device)
    proposed = settings.vocabulary or config.vocab_size
    head = 4 * proposed * hidden
    logits = chain_bytes(config.vocab_size, proposed, steps, tokens, dtype, device, sparse=top_k is not None)
    rows = tokens * (steps * hidden * element + (hidden * element if top_k is None else TOP_BYTES * top_k))
    losses = logits + head + (0 if single else element * proposed * hidden) + rows
    attention = element * (2 * steps * key_values + 3 * heads + 2 * hidden)
    widest = max(element * steps * hidden, element * (2 * ffn + hidden), attention) * tokens
    behind_attention = element * (4 * ffn + 5 * hidden) + 4 * (2 if single else 3) * hidden
    widest = max(widest, (attention - behind_attention) * tokens + scores)
    return DraftMemory(kept=kept * tokens, losses=losses, backward=widest + head)


class Eagle3Method(OwnLayersMethod):
    """Answer the contract (methods/contract.py)."""

    name = NAME
    schema = Settings
    trained_by = Eagle3Trainer
    layer = Eagle3Layer
    memory = staticmethod(memory)
    operations = staticmethod(operations)
    config_fields = staticmethod(config_fields)
    hints: ClassVar[dict[str, str]] = {
        "fc_norm": "; recipe.method.fc_norm says whether there are norms before fc",
        "input_norm": "; recipe.method.norm_before_fc says whether there is one norm before fc",
    }

    def drafted_steps(self, settings: Settings) -> int:
        return settings.steps


METHOD = Eagle3Method()
