"""Run the frozen target: a forward, which returns what a draft reads (tensors.py).

Shapes: B batch, S tokens of a row, C tokens of a chunk, T keys up to the chunk's end, H hidden width, N query heads,
K key/value heads, D head width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface

from longspec.models.attention.backends import AUTO, target_attention
from longspec.models.attention.visibility import Visibility
from longspec.models.draft_attention import rotations
from longspec.models.target import Group, all_heads_at, group_of, rows_of_ranks, splits_heads, whole
from longspec.states.tensors import COS, EMBEDDED, FINAL, HIDDEN, KEYS, SIN, VALUES, layers_of


@dataclass
class _Pass:
    """One forward over whole rows, in one chunk or several, and what is kept of it."""

    names: Sequence[str]  # the tensors that are asked for
    length: int  # S
    cut: int | None  # the layer that ends with its keys and values; None: no layer
    visibility: Visibility  # of all S tokens
    parts: Group | None  # the ranks that have some of the heads each; None: this one has all
    owner: int  # the one of them whose rows these are, which gets all heads
    kept: dict[str, Tensor] = field(default_factory=dict)  # by name: of all S tokens, keys after RoPE
    start: int = 0  # of the chunk that runs now

    def attend(self, module: Any, q_BNCD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, **arguments: Any) -> Tensor:
        """Attention output [B, C, N, D] of one layer over the chunks so far."""
        layer, keys, values = module.layer_idx, k_BKCD, v_BKCD
        names = (f"{KEYS}{layer}", f"{VALUES}{layer}")
        if keys.shape[2] < self.length or not set(names).isdisjoint(self.names):
            keys, values = self.keep(names[0], k_BKCD), self.keep(names[1], v_BKCD)
        if layer == self.cut:
            return torch.zeros_like(q_BNCD).transpose(1, 2)
        visibility = self.visibility.first(keys.shape[2])
        return target_attention(module, q_BNCD, keys, values, None, visibility=visibility, **arguments)[0]

    def keep(self, name: str, chunk: Tensor) -> Tensor:
        """Add a chunk [..., C, D or H] of a tensor; return it up to the chunk's end, [..., T, D or H]."""
        if name not in self.kept:
            self.kept[name] = chunk.new_empty((*chunk.shape[:-2], self.length, chunk.shape[-1]))
        end = self.start + chunk.shape[-2]
        self.kept[name][..., self.start : end, :] = chunk
        return self.kept[name][..., :end, :]

    def take_input(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """torch's hook before a forward: the module's input is what has this name."""
        self.keep(name, inputs[0])

    def state(self, name: str) -> Tensor:
        """One of the tensors that were asked for, over all S tokens."""
        split = self.parts is not None and name.startswith((KEYS, VALUES))
        return all_heads_at(self.kept[name], self.parts, self.owner) if split else self.kept[name]


def states_attention(
    module: nn.Module,
    q_BNCD: Tensor,
    k_BKCD: Tensor,
    v_BKCD: Tensor,
    attention_mask: Tensor | None,
    states: _Pass | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention hook: target_attention, which also hands keys and values to `states`."""
    if states is None:
        return target_attention(module, q_BNCD, k_BKCD, v_BKCD, attention_mask, **arguments)
    assert attention_mask is None, "documents replace padding masks"
    return states.attend(module, q_BNCD, k_BKCD, v_BKCD, **arguments), None


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
    """Stands in for a layer: its attention makes keys and values for the hook; what would follow is not needed."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # it stays a part of the target alone

    def forward(self, hidden_BCH: Tensor, **arguments: Any) -> Tensor:
        layer: Any = self.layer
        layer.self_attn(hidden_states=layer.input_layernorm(hidden_BCH), **arguments)
        return hidden_BCH


def depth_of(names: Sequence[str], layers: int) -> tuple[int, bool]:
    """Return how many of a target's layers run whole for these tensors, and whether the next one's keys and values are made."""
    if FINAL in names:
        return layers, False
    keys = layers_of(names, KEYS, VALUES)
    deepest = max(keys | layers_of(names, HIDDEN), default=0)
    return deepest, deepest in keys


@contextmanager
def _only(model: Any, states: _Pass, whole_layers: int) -> Iterator[None]:
    """Within the block the model ends, with its final norm, where all is made that is asked for; inputs of layers are kept."""
    layers = model.layers
    last = [] if states.cut is None else [_KeysAndValuesOnly(layers[states.cut])]
    model.layers = nn.ModuleList([*layers[:whole_layers], *last])
    with ExitStack() as within:
        within.callback(setattr, model, "layers", layers)
        for layer in layers_of(states.names, HIDDEN):
            module = model.layers[layer] if layer < len(model.layers) else model.norm  # the forward ends before that layer
            hook = partial(states.take_input, f"{HIDDEN}{layer}")
            within.enter_context(module.register_forward_pre_hook(hook))
        yield


class TargetStates(nn.Module):
    """The frozen target as its draft sees it. One module, so that an engine can partition it over the ranks as a whole.

    target: transformers' causal language model, loaded with STATES_ATTENTION; attention: the backend.
    chunk: tokens of one forward, None for whole rows. Chunks hold less of one layer at once, and the keys and values of
    all layers instead: they save memory where a token's widest activation is larger than its cache.
    gather: a context in which the given parameters are whole, of a target whose parameters are partitioned over the ranks.
    """

    gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]]

    def __init__(self, target: Any, chunk: int | None = None, attention: str = AUTO, gather: Any = None) -> None:
        super().__init__()
        self.target, self.config, self.chunk, self.attention = target, target.config, chunk, attention
        self.partitioned, self.gather = gather is not None, gather or (lambda _: nullcontext())
        self._whole_heads: list[nn.Parameter] = []  # out of reach of what moves and counts a module's parameters

    @property
    def head_weight(self) -> nn.Parameter:
        """The weight [V, H] of the head. Where it is split over ranks they all ask for it; its whole is made once and kept."""
        weight: nn.Parameter = self.target.lm_head.weight
        if not isinstance(weight, DTensor):
            return weight
        if not self._whole_heads:
            self._whole_heads.append(nn.Parameter(whole(weight), requires_grad=False))
        return self._whole_heads[0]

    def inputs(self, input_ids_BS: Tensor, position_ids_BS: Tensor) -> dict[str, Tensor]:
        """Embeddings [B, S, H], and rotations [B, S, R], of the tokens at these positions."""
        embedded_BSH = self.target.model.embed_tokens(input_ids_BS)
        cos_BSR, sin_BSR = rotations(self.target.model, embedded_BSH, position_ids_BS)
        return {EMBEDDED: embedded_BSH, COS: cos_BSR, SIN: sin_BSR}

    def follow(self, device: torch.device) -> None:
        """Move the target to its draft's device, unless it is in parts, which lie where they belong."""
        if not self.partitioned and group_of(self.target) is None:
            self.target.to(device)

    def prefetch(self, row_numbers: Sequence[int]) -> None:
        """Stored states are read ahead of their forward; a target computes them in it."""

    @torch.no_grad()
    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor,
        document_ids_BS: Tensor | None,
        names: Sequence[str],
        row_numbers_B: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Embeddings and rotations, and the tensors of these names; the target runs as far as they need.

        They are constants to a gradient. row_numbers_B: by which stored states are found; a forward needs none.

        The ranks that hold a target together call it at once, each with rows of its own, of one shape. One rank's rows run
        after another's: what lives at once is that of one rank's rows, however many ranks there are.
        """
        group, own = group_of(self.target), {}
        if group is None:
            return self._states_of(input_ids_BS, position_ids_BS, document_ids_BS, names, owner=0)
        for rank, rows in enumerate(rows_of_ranks(input_ids_BS, position_ids_BS, document_ids_BS, group)):
            found = self._states_of(*rows, names, rank)
            if rank == group.rank():
                own = found
        return own

    def _states_of(
        self, input_ids_BS: Tensor, position_ids_BS: Tensor, document_ids_BS: Tensor | None, names: Sequence[str], owner: int
    ) -> dict[str, Tensor]:
        """One pass of the target; of one that is split over ranks, the rank `owner` alone gets all heads."""
        model, length = self.target.model, input_ids_BS.shape[1]
        found = self.inputs(input_ids_BS, position_ids_BS)
        whole_layers, then_keys = depth_of(names, self.config.num_hidden_layers)
        cut = whole_layers if then_keys else None
        parts = group_of(self.target) if splits_heads(self.target) else None
        states = _Pass(names, length, cut, Visibility(document_ids_BT=document_ids_BS), parts, owner)
        with _only(model, states, whole_layers):
            for start in range(0, length, self.chunk or length):
                states.start, part = start, slice(start, start + (self.chunk or length))
                last = model(
                    inputs_embeds=found[EMBEDDED][:, part],
                    position_ids=position_ids_BS[:, part],
                    states=states,
                    attention_backend=self.attention,
                    use_cache=False,
                ).last_hidden_state
                if FINAL in names:
                    states.keep(FINAL, last)
        return found | {name: states.state(name) for name in names}
