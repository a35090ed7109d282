"""Caches while a text is decoded: a transformers cache that grows in place and follows the text, and windows of a draft.

Shapes: B rows, T cached tokens of the longest row, S nodes of a tree, E tokens of a path, P tokens of a window, K key/value
heads, D head width.
"""

from collections.abc import Collection
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from longspec.models.attention.chains import KeysValues
from longspec.models.target import Group, group_of, of_ranks, own_heads, splits_heads

ROOM = 1 / 8  # of the length, made ahead once a layer's room is used up
LONGEST_AHEAD = 4096  # tokens of a text for which room is made at once


def tokens_ahead(max_new_tokens: int, nodes: int = 0) -> int:
    """Return how many tokens behind the prompts to make room for at once: the text, or its first part, and a draft tree."""
    return min(max_new_tokens, LONGEST_AHEAD) + 1 + nodes


class RoomyLayer(DynamicLayer):
    """Hold keys and values [B, K, T, D] at the front of larger tensors: tokens come and go behind others that are not copied.

    ahead: how many tokens follow the first ones; room for all of them is made at once. group: the ranks that hold the target
    together, if the layer gathers the heads of all ranks for a drafter; a rank's attention sees its own heads.
    """

    def __init__(self, ahead: int, group: Group | None = None) -> None:
        super().__init__()
        self.ahead, self.group = ahead, group
        self.window: int | None = None  # how many a forward of one token reads; None: all

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for these tokens and those ahead."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.room = (self.keys, self.values)
        self.make_room(key_states.shape[2] + self.ahead)

    def make_room(self, total: int) -> None:
        """Make room for `total` tokens in all; copy the tokens if there was less."""
        if self.room[0].shape[2] < total:
            count = self.keys.shape[2]
            self.room = (_roomy(self.keys, total), _roomy(self.values, total))
            self.end_at(count)

    def end_at(self, count: int) -> None:
        """Keep only the first `count` tokens; the room behind them stays."""
        keys, values = self.room
        self.keys, self.values = keys.narrow(2, 0, count), values.narrow(2, 0, count)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add a forward's tokens; return all keys and values that its attention sees."""
        shown = slice(None if self.window is None or key_states.shape[2] > 1 else -self.window, None)
        if self.group is None:
            self.add(key_states, value_states)
            return self.keys[:, :, shown], self.values[:, :, shown]
        self.add(*(torch.cat(of_ranks(x_BKTD, self.group), dim=1) for x_BKTD in (key_states, value_states)))
        return own_heads(self.keys[:, :, shown], self.group), own_heads(self.values[:, :, shown], self.group)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a forward's attention sees, and how many stand before them."""
        total = self.get_seq_length() + query_length
        shown = total if self.window is None or query_length > 1 else min(total, self.window)
        return shown, total - shown

    def add(self, key_states: Tensor, value_states: Tensor) -> None:
        """Add tokens, with all heads that the layer holds."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = self.keys.shape[2]
        total = count + key_states.shape[2]
        if self.room[0].shape[2] < total:
            self.make_room(int(total * (1 + ROOM)) + 1)
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, count:total] = new
        self.end_at(total)


def _roomy(x_BKTD: Tensor, total: int) -> Tensor:
    """Return a copy at the front of a tensor with room for `total` tokens."""
    room = x_BKTD.new_empty(*x_BKTD.shape[:2], total, x_BKTD.shape[3])
    room[:, :, : x_BKTD.shape[2]] = x_BKTD
    return room


def target_cache(target: Any, ahead: int, read: Collection[int] = ()) -> Cache:
    """Return an empty cache for a target's text and `ahead` tokens behind it.

    read: the layers whose keys and values a drafter reads. No layer slides: a sliding one could not take back rejected tokens.
    """
    group = group_of(target) if splits_heads(target) else None
    numbers = range(target.config.num_hidden_layers)
    return Cache(layers=[RoomyLayer(ahead, group if number in read else None) for number in numbers])


def slide(cache: Cache, windows: list[int | None]) -> None:
    """Have a forward of one token see only its window in each layer that has one, as in transformers' own cache."""
    for number, window in enumerate(windows):
        if window is not None:
            layer = cache.layers[number] = copy(cache.layers[number])  # the cache that lends it shows the whole text
            layer.window, layer.is_sliding = window, True


def cut(cache: Cache, longest: int) -> None:
    """Keep only the first `longest` tokens of every row."""
    for layer in cache.layers:
        layer.end_at(longest)


def compact(cache: Cache, nodes: int, path_BE: Tensor, lengths_B: Tensor, longest: int) -> None:
    """Keep each row's path of the `nodes` newest keys and values, behind its lengths_B[b] tokens, and cut to `longest`.

    Moves E tokens per row and layer, in place. Path entries beyond a row's kept ones land behind its end, where nothing is.
    """
    rows_B1 = torch.arange(len(path_BE), device=path_BE.device)[:, None]
    to_BE = lengths_B[:, None] + torch.arange(path_BE.shape[1], device=path_BE.device)
    from_BE = cache.get_seq_length() - nodes + path_BE
    for layer in cache.layers:
        rows_B1, to_BE, from_BE = (x.to(layer.keys.device) for x in (rows_B1, to_BE, from_BE))
        for x_BKTD in (layer.keys, layer.values):
            x_BKTD[rows_B1, :, to_BE] = x_BKTD[rows_B1, :, from_BE]
    cut(cache, longest)


def keep_path(cache: Cache, start: int, path: list[int]) -> None:
    """Keep only this path of a single row's tree, in the path's order. start: the place of the tree's root in the cache."""
    first = next(place for place, node in enumerate(path) if place != node)  # the nodes before it are in their places
    from_N = torch.tensor([start + node for node in path[first:]])
    for layer in cache.layers:
        from_N = from_N.to(layer.keys.device)
        for x_BKTD in (layer.keys, layer.values):
            x_BKTD.narrow(2, start + first, len(from_N)).copy_(x_BKTD.index_select(2, from_N))
    cut(cache, start + len(path))


def select(cache: Cache, rows_B: Tensor, longest: int, ahead: int) -> None:
    """Keep only these rows, cut to `longest` tokens, with room for `ahead` more.

    They go into new layers, one by one: another cache that holds the former layers keeps all its rows, and if none does, only
    one layer is held twice at a time.
    """
    for number, layer in enumerate(cache.layers):
        chosen, rows_B = RoomyLayer(ahead, layer.group), rows_B.to(layer.keys.device)
        chosen.add(layer.keys[:, :, :longest][rows_B], layer.values[:, :, :longest][rows_B])
        cache.layers[number] = chosen


@torch.inference_mode()
def restore(cache: Cache, lengths: list[int]) -> None:
    """Keep only row b's first lengths[b] tokens, and put zeros behind those of the shorter rows."""
    cut(cache, max(lengths))
    for layer in cache.layers:
        for row, length in enumerate(lengths):
            layer.keys[row, :, length:] = 0
            layer.values[row, :, length:] = 0


class WholeText:
    """Hold a draft's own keys and values of the whole text, left-aligned, in a cache that grows in place: a round copies
    neither text nor tree.

    Every row's key 0 belongs to its first token, and the last one is key lengths_B[b] - 1.
    """

    def __init__(self) -> None:
        self.cache = Cache(layers=[RoomyLayer(0)])
        self.longest = 0  # tokens of the longest row's text

    def extend(self, new: KeysValues, counts_B: Tensor, lengths: tuple[int, ...], lengths_B: Tensor) -> None:
        """Forget the tree, and put counts_B[b] of the E new tokens behind row b's text, which then has lengths_B[b] tokens."""
        count = new[0].shape[2]
        path_BE = torch.arange(count, device=counts_B.device).expand(len(counts_B), -1)
        if self.longest:
            cut(self.cache, self.longest)
        self.longest = max(lengths)
        self.cache.update(*new, 0)
        compact(self.cache, count, path_BE, lengths_B - counts_B, self.longest)

    def with_nodes(self, new: KeysValues) -> KeysValues:
        """Add a level's nodes behind the longest row; return the keys and values of the text and of all levels."""
        keys, values = self.cache.update(*new, 0)
        return keys, values

    def of_text(self) -> KeysValues:
        """Return the keys and values of the text, as of a tree without nodes."""
        return self.cache.layers[0].keys, self.cache.layers[0].values

    def first_B(self, lengths_B: Tensor) -> None:
        """Return None: key 0 of every row belongs to its token 0."""

    def select(self, rows_B: Tensor) -> None:
        """Cut to the text of these rows; the next round says how long it is in each."""
        if self.longest:
            select(self.cache, rows_B, self.longest, 0)


class NewestTokens:
    """Hold the text's newest tokens, as many as a window has, right-aligned. The methods do what WholeText's do."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.text: KeysValues | None = None
        self.nodes: list[KeysValues] = []

    def extend(self, new: KeysValues, counts_B: Tensor, *_: Any) -> None:
        """Forget the tree, and keep each row's newest tokens, of its own and of counts_B[b] new ones.

        Rows with fewer tokens than the longest begin with keys and values that stand for nothing.
        """
        own, self.nodes = self.text or (new[0][:, :, :0], new[1][:, :, :0]), []
        old, width = own[0].shape[2], min(self.window, own[0].shape[2] + new[0].shape[2])
        place_BP = (old + counts_B - width)[:, None] + torch.arange(width, device=counts_B.device)
        place_B1P1 = place_BP.clamp_min(0)[:, None, :, None]
        both = (torch.cat(parts, dim=2) for parts in zip(own, new, strict=True))
        keys, values = (x.gather(2, place_B1P1.expand(-1, x.shape[1], -1, x.shape[3])) for x in both)
        self.text = (keys, values)

    def with_nodes(self, new: KeysValues) -> KeysValues:
        self.nodes.append(new)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(self.of_text(), *self.nodes, strict=True))
        return keys, values

    def of_text(self) -> KeysValues:
        """Return the window, right-aligned."""
        assert self.text is not None
        return self.text

    def first_B(self, lengths_B: Tensor) -> Tensor:
        """Return the token of each row's key 0; it is below 0 where the row's text is shorter than what the longest holds."""
        return lengths_B - self.of_text()[0].shape[2]

    def select(self, rows_B: Tensor) -> None:
        if self.text is not None:
            self.text, self.nodes = (self.text[0][rows_B], self.text[1][rows_B]), []


OwnCache = WholeText | NewestTokens
