"""The target's cache while it decodes: a transformers cache that grows in place, and how it follows the text.

Shapes: B rows, T cached tokens of the longest row, S nodes of a tree, E tokens of a path, K key/value heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 1 / 8  # of the length, made ahead when a layer's room is used up


class RoomyLayer(DynamicLayer):
    """Keys and values [B, K, T, D] at the front of a larger tensor, so that a round writes its nodes and copies no context."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """The given tensors are read and left as they are."""
        super().__init__()
        self.hold(keys, values)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Go on from these; room for more is made when more comes."""
        self.keys, self.values = keys, values
        self.room: tuple[Tensor, Tensor] | None = None

    def keep(self, count: int) -> None:
        """The first `count` tokens alone; the room behind them stays."""
        self.keys, self.values = self.keys[:, :, :count], self.values[:, :, :count]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add tokens; all keys and values."""
        count = self.keys.shape[2]
        total = count + key_states.shape[2]
        if self.room is None or self.room[0].shape[2] < total:
            self.room = (_roomy(self.keys, total), _roomy(self.values, total))
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, count:total] = new
        self.keys, self.values = (room[:, :, :total] for room in self.room)
        return self.keys, self.values


def _roomy(x_BKTD: Tensor, total: int) -> Tensor:
    """The same at the front of room for more than `total` tokens."""
    room = x_BKTD.new_empty(*x_BKTD.shape[:2], int(total * (1 + ROOM)) + 1, x_BKTD.shape[3])
    room[:, :, : x_BKTD.shape[2]] = x_BKTD
    return room


def growing(cache: DynamicCache) -> DynamicCache:
    """The same keys and values in a cache that grows in place; `cache` stays as it is."""
    grown = DynamicCache()
    grown.layers = [RoomyLayer(layer.keys, layer.values) for layer in cache.layers]
    return grown


def compact(cache: DynamicCache, nodes: int, path_BE: Tensor, lengths_B: Tensor, longest: int) -> None:
    """Of the `nodes` newest keys and values keep each row's path, behind its lengths_B[b] tokens, and cut to `longest`.

    Moves E tokens a row and layer, in place. Path entries beyond a row's kept ones land behind its end, where nothing is.
    """
    rows_B1 = torch.arange(len(path_BE), device=path_BE.device)[:, None]
    to_BE = lengths_B[:, None] + torch.arange(path_BE.shape[1], device=path_BE.device)
    from_BE = cache.get_seq_length() - nodes + path_BE
    for layer in cache.layers:
        for x_BKTD in (layer.keys, layer.values):
            x_BKTD[rows_B1, :, to_BE] = x_BKTD[rows_B1, :, from_BE]
        layer.keep(longest)


def select(cache: DynamicCache, rows_B: Tensor, longest: int) -> None:
    """These rows alone, cut to `longest` tokens."""
    for layer in cache.layers:
        layer.hold(layer.keys[:, :, :longest][rows_B], layer.values[:, :, :longest][rows_B])
