"""An EAGLE-3 draft's own keys and values: of the text's slots, all of them or a window, and behind them of a tree's nodes.

Shapes: B rows, E slots that become text at once, W nodes of a level, T keys, K key/value heads, D head width.
"""

from typing import Protocol

import torch
from torch import Tensor

from longspec.decode.cache import compact, cut, empty_cache, select, slide
from longspec.models.attention.chains import KeysValues


class Slots(Protocol):
    """The drafter's own cache: keys and values of the text's slots, and of the tree's nodes behind them.

    Key 0 of row b is slot first_B[b] of its text, or slot 0 where first_B is None; its last slot is lengths_B[b] - 1.
    """

    def extend(self, new: KeysValues, counts_B: Tensor, lengths: tuple[int, ...], lengths_B: Tensor) -> None:
        """Forget the tree, and take counts_B[b] of the E new slots in, so that the text has lengths_B[b]."""

    def with_nodes(self, new: KeysValues) -> KeysValues:
        """Take the nodes of a level in; the keys and values of the text and of all levels behind it."""
        ...

    def of_text(self) -> KeysValues:
        """The keys and values of the text, of a tree without nodes."""
        ...

    def first_B(self, lengths_B: Tensor) -> Tensor | None:
        """The slot of each row's key 0."""
        ...

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone, which may be before any text was taken in."""


class WholeText:
    """All slots of the text, left-aligned, in a cache that grows in place: neither text nor tree is copied by a round."""

    def __init__(self) -> None:
        self.cache = empty_cache(1, 0)
        self.longest = 0  # slots of the longest row's text

    def extend(self, new: KeysValues, counts_B: Tensor, lengths: tuple[int, ...], lengths_B: Tensor) -> None:
        """Each row's new slots go behind its own former ones."""
        count = new[0].shape[2]
        path_BE = torch.arange(count, device=counts_B.device).expand(len(counts_B), -1)
        if self.longest:
            cut(self.cache, self.longest)
        self.cache.update(*new, 0)
        compact(self.cache, count, path_BE, lengths_B - counts_B, max(lengths))
        self.longest = max(lengths)

    def with_nodes(self, new: KeysValues) -> KeysValues:
        """Nodes go behind the longest row."""
        keys, values = self.cache.update(*new, 0)
        return keys, values

    def of_text(self) -> KeysValues:
        """Left-aligned."""
        return self.cache.layers[0].keys, self.cache.layers[0].values

    def first_B(self, lengths_B: Tensor) -> None:
        """Every row begins with its text."""

    def select(self, rows_B: Tensor) -> None:
        """Cut to the text; how long it is in the rows that are left, the next round says."""
        if self.longest:
            select(self.cache, rows_B, self.longest, 0)


class NewestSlots:
    """The text's newest slots, as many as a window has, right-aligned."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.text: KeysValues | None = None
        self.nodes: list[KeysValues] = []

    def extend(self, new: KeysValues, counts_B: Tensor, lengths: tuple[int, ...], lengths_B: Tensor) -> None:
        """The window moves on."""
        empty = (new[0][:, :, :0], new[1][:, :, :0])
        self.text, self.nodes = slide(self.text or empty, new, counts_B, self.window), []

    def with_nodes(self, new: KeysValues) -> KeysValues:
        """Level by level behind the window."""
        self.nodes.append(new)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(self.of_text(), *self.nodes, strict=True))
        return keys, values

    def of_text(self) -> KeysValues:
        """Right-aligned."""
        assert self.text is not None
        return self.text

    def first_B(self, lengths_B: Tensor) -> Tensor:
        """Below 0 where a row's text is shorter than what is held of the longest."""
        return lengths_B - self.of_text()[0].shape[2]

    def select(self, rows_B: Tensor) -> None:
        """Keys and values of the text alone; the tree is forgotten."""
        if self.text is not None:
            self.text, self.nodes = (self.text[0][rows_B], self.text[1][rows_B]), []
