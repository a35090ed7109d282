"""An EAGLE-3 draft's own keys and values: of the text's slots, all of them or a window, and behind them of a tree's nodes.

Shapes: B rows, E slots that become text at once, W nodes of a level, T keys, K key/value heads, D head width.
"""

import torch
from torch import Tensor

from longspec.decode.cache import compact, cut, empty_cache, select, slide
from longspec.models.attention.chains import KeysValues


class WholeText:
    """All slots of the text, left-aligned, in a cache that grows in place: neither text nor tree is copied by a round.

    Key 0 of every row is slot 0 of its text, whose last slot is lengths_B[b] - 1.
    """

    def __init__(self) -> None:
        self.cache = empty_cache(1, 0)
        self.longest = 0  # slots of the longest row's text

    def extend(self, new: KeysValues, counts_B: Tensor, lengths: tuple[int, ...], lengths_B: Tensor) -> None:
        """Forget the tree, and put counts_B[b] of the E new slots behind the former ones, so that the text has lengths_B[b]."""
        count = new[0].shape[2]
        path_BE = torch.arange(count, device=counts_B.device).expand(len(counts_B), -1)
        if self.longest:
            cut(self.cache, self.longest)
        self.cache.update(*new, 0)
        compact(self.cache, count, path_BE, lengths_B - counts_B, max(lengths))
        self.longest = max(lengths)

    def with_nodes(self, new: KeysValues) -> KeysValues:
        """Take the nodes of a level in, behind the longest row; the keys and values of the text and of all levels."""
        keys, values = self.cache.update(*new, 0)
        return keys, values

    def of_text(self) -> KeysValues:
        """The keys and values of the text, of a tree without nodes."""
        return self.cache.layers[0].keys, self.cache.layers[0].values

    def first_B(self, lengths_B: Tensor) -> None:
        """The slot of each row's key 0; None: 0."""

    def select(self, rows_B: Tensor) -> None:
        """Cut to the text; how long it is in the rows that are left, the next round says."""
        if self.longest:
            select(self.cache, rows_B, self.longest, 0)


class NewestSlots:
    """The text's newest slots, as many as a window has, right-aligned. Its methods do what those of WholeText do."""

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
        """The slot of each row's key 0: below 0 where a row's text is shorter than what is held of the longest."""
        return lengths_B - self.of_text()[0].shape[2]

    def select(self, rows_B: Tensor) -> None:
        """Keys and values of the text alone; the tree is forgotten."""
        if self.text is not None:
            self.text, self.nodes = (self.text[0][rows_B], self.text[1][rows_B]), []


Slots = WholeText | NewestSlots
