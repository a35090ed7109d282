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
    """Run one forward over whole rows, in one chunk or several, and keep what was asked for."""

    names: Sequence[str]  # tensors to keep
    length: int  # S
    cut: int | None  # the layer that ends after its keys and values; None: no layer
    visibility: Visibility  # of all S tokens
    parts: Group | None  # the group of ranks that share the heads; None: this rank has all
    owner: int  # the rank in it whose rows these are; it gets all heads
    kept: dict[str, Tensor] = field(default_factory=dict)  # tensor name -> values of all S tokens, keys after RoPE
    start: int = 0  # first token of the current chunk

    def attend(self, module: Any, q_BNCD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, **arguments: Any) -> Tensor:
        """Return one layer's attention output [B, C, N, D] over the chunks so far."""
        layer, keys, values = module.layer_idx, k_BKCD, v_BKCD
        names = (f"{KEYS}{layer}", f"{VALUES}{layer}")
        if keys.shape[2] < self.length or not set(names).isdisjoint(self.names):
            keys, values = self.keep(names[0], k_BKCD), self.keep(names[1], v_BKCD)
        if layer == self.cut:
            return torch.zeros_like(q_BNCD).transpose(1, 2)
        visibility = self.visibility.first(keys.shape[2])
        return target_attention(module, q_BNCD, keys, values, None, visibility=visibility, **arguments)[0]

    def keep(self, name: str, chunk: Tensor) -> Tensor:
        """Add a chunk [..., C, D or H] to a tensor; return the tensor up to the chunk's end, [..., T, D or H]."""
        if name not in self.kept:
            self.kept[name] = chunk.new_empty((*chunk.shape[:-2], self.length, chunk.shape[-1]))
        end = self.start + chunk.shape[-2]
        self.kept[name][..., self.start : end, :] = chunk
        return self.kept[name][..., :end, :]

    def take_input(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep a module's input under this name; torch calls this hook before the module's forward."""
        self.keep(name, inputs[0])

    def state(self, name: str) -> Tensor:
        """Return one of the tensors that were asked for, over all S tokens."""
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
    """Attend as transformers' attention hook: target_attention, which also passes keys and values to `states`."""
    if states is None:
        return target_attention(module, q_BNCD, k_BKCD, v_BKCD, attention_mask, **arguments)
    assert attention_mask is None, "documents replace padding masks"
    return states.attend(module, q_BNCD, k_BKCD, v_BKCD, **arguments), None


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Make no mask, as transformers' hook for masks; packing is not guessed from positions. Raises ValueError for padding."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask: a target that was loaded with its draft knows no padding; give rows without it, decode by "
            "longspec.decode.generate, or load the target by AutoModelForCausalLM"
        )


STATES_ATTENTION = "longspec_states"
AttentionInterface.register(STATES_ATTENTION, states_attention)
AttentionMaskInterface.register(STATES_ATTENTION, no_mask)


class _KeysAndValuesOnly(nn.Module):
    """Replace a layer: its attention makes keys and values for the hook; the rest of the layer is not computed."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not registered: it stays a part of the target alone

    def forward(self, hidden_BCH: Tensor, **arguments: Any) -> Tensor:
        layer: Any = self.layer
        layer.self_attn(hidden_states=layer.input_layernorm(hidden_BCH), **arguments)
        return hidden_BCH


def depth_of(names: Sequence[str], layers: int) -> tuple[int, bool]:
    """Return how many of a target's layers run whole for these tensors, and whether the next layer makes keys and values."""
    if FINAL in names:
        return layers, False
    keys = layers_of(names, KEYS, VALUES)
    deepest = max(keys | layers_of(names, HIDDEN), default=0)
    return deepest, deepest in keys


@contextmanager
def _only(model: Any, states: _Pass, whole_layers: int) -> Iterator[None]:
    """End the model, within the block, once everything asked for is made, and keep the layers' inputs that are asked for."""
    layers = model.layers
    last = [] if states.cut is None else [_KeysAndValuesOnly(layers[states.cut])]
    model.layers = nn.ModuleList([*layers[:whole_layers], *last])
    with ExitStack() as within:
        within.callback(setattr, model, "layers", layers)
        for layer in layers_of(states.names, HIDDEN):
            module = model.layers[layer] if layer < len(model.layers) else model.norm  # the forward ends before this layer
            hook = partial(states.take_input, f"{HIDDEN}{layer}")
            within.enter_context(module.register_forward_pre_hook(hook))
        yield


class TargetStates(nn.Module):
    """Run the frozen target as its draft sees it. It is one module, so that an engine can partition it over the ranks whole.

    target: transformers' causal language model, loaded with STATES_ATTENTION; attention: the backend. chunk: tokens of one
    forward, None for whole rows. Chunks hold less of one layer at once, but the keys and values of all layers: they save memory
    if a token's widest activation is larger than its cache. gather: a context in which the given parameters are whole, if the
    target's parameters are partitioned over the ranks.
    """

    gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]]

    def __init__(self, target: Any, chunk: int | None = None, attention: str = AUTO, gather: Any = None) -> None:
        super().__init__()
        self.target, self.config, self.chunk, self.attention = target, target.config, chunk, attention
        self.partitioned, self.gather = gather is not None, gather or (lambda _: nullcontext())
        self._whole_heads: list[nn.Parameter] = []  # a list, so that nothing moves or counts it as a parameter

    @property
    def head_weight(self) -> nn.Parameter:
        """Return the head's weight [V, H]. If ranks share it, all must ask for it; the whole is made once and kept."""
        weight: nn.Parameter = self.target.lm_head.weight
        if not isinstance(weight, DTensor):
            return weight
        if not self._whole_heads:
            self._whole_heads.append(nn.Parameter(whole(weight), requires_grad=False))
        return self._whole_heads[0]

    def inputs(self, input_ids_BS: Tensor, position_ids_BS: Tensor) -> dict[str, Tensor]:
        """Return embeddings [B, S, H], and rotations [B, S, R], of the tokens at these positions."""
        embedded_BSH = self.target.model.embed_tokens(input_ids_BS)
        cos_BSR, sin_BSR = rotations(self.target.model, embedded_BSH, position_ids_BS)
        return {EMBEDDED: embedded_BSH, COS: cos_BSR, SIN: sin_BSR}

    def follow(self, device: torch.device) -> None:
        """Move the target to its draft's device, unless it is split into parts, which stay where they are."""
        if not self.partitioned and group_of(self.target) is None:
            self.target.to(device)

    def prefetch(self, row_numbers: Sequence[int]) -> None:
        """Do nothing: a target computes its states in the forward. Stored states are read ahead here."""

    @torch.no_grad()
    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor,
        document_ids_BS: Tensor | None,
        names: Sequence[str],
        row_numbers_B: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return embeddings, rotations and the tensors of these names; the target runs only as far as they need.

        They are constants to a gradient. row_numbers_B: unused; stored states are found by them.

        Ranks that hold a target together must call this at once, each with its own rows, all of one shape. The ranks' rows run
        one after another, so memory holds one rank's rows at a time, however many ranks there are.
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
        """Run the target once; if it is split over ranks, only the rank `owner` gets all heads."""
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
