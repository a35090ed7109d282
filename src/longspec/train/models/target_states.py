"""What a draft reads from its frozen target in one forward: embeddings, last-layer keys and values, final hidden states.

Shapes: B batch, S tokens of a row, C tokens of a chunk, T keys up to the chunk's end, H hidden width, N query heads,
K key/value heads, D head width.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from longspec.train.models.attention import AUTO, target_attention
from longspec.train.models.target import head_width
from longspec.train.models.visibility import Visibility

Cached = tuple[Tensor, Tensor]  # keys after RoPE, values, [B, K, S, D] each
States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


@dataclass
class _Pass:
    """One forward over whole rows, in one chunk or several: what the attention hook keeps of it."""

    last: int  # the last layer's number
    length: int  # S
    keys_only: bool  # the last layer ends with its keys and values
    visibility: Visibility  # of all S tokens
    kept: dict[int, Cached] = field(default_factory=dict)  # layer -> room for all S tokens
    start: int = 0  # of the chunk that runs now

    def attend(self, module: nn.Module, q_BNCD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, **arguments: Any) -> Tensor:
        """Attention output [B, C, N, D] of one layer over the chunks so far."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = k_BKCD, v_BKCD
        if layer == self.last or keys.shape[2] < self.length:
            keys, values = self._remember(layer, k_BKCD, v_BKCD)
        if layer == self.last and self.keys_only:
            return torch.zeros_like(q_BNCD).transpose(1, 2)
        visibility = self.visibility.first(keys.shape[2])
        return target_attention(module, q_BNCD, keys, values, None, visibility=visibility, **arguments)[0]

    def _remember(self, layer: int, k_BKCD: Tensor, v_BKCD: Tensor) -> Cached:
        """Add a chunk; the keys and values up to its end, [B, K, T, D] each."""
        if layer not in self.kept:
            shape = (*k_BKCD.shape[:2], self.length, k_BKCD.shape[3])
            self.kept[layer] = (k_BKCD.new_empty(shape), v_BKCD.new_empty(shape))
        keys_BKSD, values_BKSD = self.kept[layer]
        end = self.start + k_BKCD.shape[2]
        keys_BKSD[:, :, self.start : end] = k_BKCD
        values_BKSD[:, :, self.start : end] = v_BKCD
        return keys_BKSD[:, :, :end], values_BKSD[:, :, :end]


def states_attention(
    module: nn.Module,
    q_BNCD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    attention_mask: Tensor | None,
    states: _Pass | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention hook: target_attention, which also hands the keys and values to `states`."""
    if states is None:
        return target_attention(module, q_BNCD, k_BKTD, v_BKTD, attention_mask, **arguments)
    assert attention_mask is None, "documents replace padding masks"
    return states.attend(module, q_BNCD, k_BKTD, v_BKTD, **arguments), None


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """transformers' hook for masks: none is made, and packing is not guessed from positions. Raises ValueError for padding."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask: a target that was loaded with its draft knows no padding; give rows without it, decode by "
            "longspec.decode.generate, or load the target by AutoModelForCausalLM"
        )


STATES_ATTENTION = "longspec_states"
AttentionInterface.register(STATES_ATTENTION, states_attention)
AttentionMaskInterface.register(STATES_ATTENTION, no_mask)


class _KeysAndValuesOnly(nn.Module):
    """Stands in for the last layer: its attention makes keys and values for the hook; what would follow is not needed."""

    layer: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # it stays a part of the target alone

    def forward(self, hidden_BCH: Tensor, **arguments: Any) -> Tensor:
        self.layer.self_attn(hidden_states=self.layer.input_layernorm(hidden_BCH), **arguments)
        return hidden_BCH


@contextmanager
def _cut_last_layer(layers: nn.ModuleList) -> Iterator[None]:
    """Within the block the last layer ends with its keys and values."""
    whole = layers[-1]
    layers[-1] = _KeysAndValuesOnly(whole)
    try:
        yield
    finally:
        layers[-1] = whole


class TargetStates(nn.Module):
    """The frozen target as its draft sees it. One module, so that an engine can partition it over the ranks as a whole.

    target: transformers' causal language model, loaded with the attention STATES_ATTENTION.
    chunk: tokens of one forward, None for whole rows. Chunks hold less of one layer at once, and the keys and values of
    all layers instead: they save memory where a token's widest activation is larger than its cache.
    attention: the attention backend.
    gather: a context in which the given parameters are whole on every rank.
    """

    def __init__(self, target: Any, chunk: int | None = None, attention: str = AUTO) -> None:
        super().__init__()
        self.target, self.chunk, self.attention, self.partitioned = target, chunk, attention, False
        self.gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]] = lambda _: nullcontext()

    def follow(self, device: torch.device) -> None:
        """Move the target to its draft's device, unless an engine has partitioned it."""
        if not self.partitioned:
            self.target.to(device)

    @torch.no_grad()
    def forward(
        self, input_ids_BS: Tensor, position_ids_BS: Tensor, document_ids_BS: Tensor | None, keys_only: bool = False
    ) -> States:
        """Embeddings [B, S, H], RoPE's cos and sin [B, S, D], last-layer keys and values [B, K, S, D], hidden [B, S, H].

        The hidden states (after the final norm) may be an inference tensor; they are None with `keys_only`, which ends the
        forward after the last layer's keys and values.
        """
        model, length = self.target.model, input_ids_BS.shape[1]
        embedded_BSH = model.embed_tokens(input_ids_BS)
        cos_BSD, sin_BSD = model.rotary_emb(embedded_BSH, position_ids_BS)
        visibility = Visibility(document_ids_BT=document_ids_BS)
        states = _Pass(self.target.config.num_hidden_layers - 1, length, keys_only, visibility)
        # Made out here: what inference mode makes, no backward pass may use.
        keys_BKSD, values_BKSD = states.kept[states.last] = self._last_layer_room(embedded_BSH)
        cut = _cut_last_layer(model.layers) if keys_only else nullcontext()
        chunks = []
        with torch.inference_mode(), cut:
            for start in range(0, length, self.chunk or length):
                states.start, part = start, slice(start, start + (self.chunk or length))
                arguments = {"inputs_embeds": embedded_BSH[:, part], "position_ids": position_ids_BS[:, part]}
                arguments |= {"states": states, "attention_backend": self.attention}
                chunks.append(model(**arguments, use_cache=False).last_hidden_state)
                if keys_only:
                    chunks.clear()
            hidden_BSH = torch.cat(chunks, dim=1) if len(chunks) > 1 else next(iter(chunks), None)
        return embedded_BSH, cos_BSD, sin_BSD, keys_BKSD, values_BKSD, hidden_BSH

    def _last_layer_room(self, embedded_BSH: Tensor) -> Cached:
        config = self.target.config
        shape = (embedded_BSH.shape[0], config.num_key_value_heads, embedded_BSH.shape[1], head_width(config))
        return embedded_BSH.new_empty(shape), embedded_BSH.new_empty(shape)
