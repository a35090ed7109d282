"""Texts while they are decoded, and where they end: at an eos token, or with the token that completes a stop string."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from torch import Tensor

STOP, LENGTH = "stop", "length"
OnTokens = Callable[[int, list[int]], None]


@dataclass
class Row:
    """Hold one text: its tokens after the prompt, and the number of drafted tokens kept in each round.

    The first token comes from the prompt's forward, in no round. A round brings the kept tokens and one of the target's own;
    a token that ends the text counts as the target's own. The last round may have brought more than were asked for.
    """

    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish: str = ""  # "stop" (eos or a stop string) | "length"

    @property
    def rounds(self) -> int:
        """Count the target's forwards, without the prompt's."""
        return len(self.accepted)

    @property
    def new_tokens(self) -> int:
        """Count the tokens the rounds brought."""
        return sum(self.accepted) + len(self.accepted)

    def position_acceptance(self, depth: int) -> list[tuple[int, int]]:
        """Return for each drafted token 1 .. depth how often it was kept, and how often all before it were kept.

        The round that ended the text does not count for the token that ended it.
        """
        kept = [sum(count >= place for count in self.accepted) for place in range(depth + 1)]
        reached = kept[:-1]
        if self.finish == STOP and self.accepted and self.accepted[-1] < depth:
            reached[self.accepted[-1]] -= 1
        return list(zip(kept[1:], reached, strict=True))


def ends_of_text(target: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a text, by the target's generation_config and its tokenizer."""
    told = target.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])} - {None}


class Stops:
    """Find ends of text. As in transformers' StopStringCriteria a stop string may begin in the prompt, but a decoded token must
    complete it; that token stays whole.

    Raises ValueError if stop strings are empty, or come without the target's tokenizer.
    """

    def __init__(
        self, eos: int | Collection[int] | Tensor | None = None, strings: Collection[str] = (), tokenizer: Any = None
    ) -> None:
        if isinstance(strings, str) or not all(strings):
            raise ValueError(f"stop_strings: {strings!r}: give a list of strings, none of them empty")
        if strings and tokenizer is None:
            raise ValueError("stop_strings: tokens become text by the target's tokenizer; give it as tokenizer=...")
        if isinstance(eos, Tensor):  # its elements are tensors, which no set contains
            eos = eos.flatten().tolist()
        self.eos = {eos} if isinstance(eos, int) else {int(token) for token in eos or ()}
        self.strings, self.tokenizer = tuple(strings), tokenizer
        # A token holds at least one byte; a tokenizer may strip the first one's space, or leave half a character there.
        self.reach = max((len(string.encode()) for string in strings), default=0) + 4

    def end(self, before: list[int], new: list[int]) -> int | None:
        """Return the place in `new` of the token that ends the text; None if none does. before: the tokens before `new`."""
        tail = before[-self.reach :]
        for place, token in enumerate(new):
            if token in self.eos or (self.strings and self._completes(tail, token)):
                return place
            tail = [*tail[1 - self.reach :], token]
        return None

    def _completes(self, tail: list[int], token: int) -> bool:
        """Tell whether a stop string ends within what this token adds to the text."""
        old, text = (self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (tail, [*tail, token]))
        # Character by character, since a token may also complete a character that began before it.
        same = len(commonprefix([old, text]))  # noqa: RUF071
        return any(text.find(string, max(0, same - len(string) + 1)) >= 0 for string in self.strings)


class Texts:
    """Hold the texts decoded so far, on the host."""

    def __init__(self, prompts: list[list[int]], stops: Stops, max_new_tokens: int, on_tokens: OnTokens | None) -> None:
        self.rows = [Row() for _ in prompts]
        self.whole = [list(prompt) for prompt in prompts]
        self.active = list(range(len(prompts)))
        self.stops, self.max_new_tokens, self.on_tokens = stops, max_new_tokens, on_tokens

    def add(self, number: int, new: list[int]) -> int:
        """Take in a row's new tokens up to the text's end; return how many of them count as kept drafts, all but the last."""
        row = self.rows[number]
        end = self.stops.end(self.whole[number], new)
        kept = len(new) - 1 if end is None else end
        room = self.max_new_tokens - len(row.ids)
        row.finish = STOP if end is not None and kept < room else LENGTH if kept + 1 >= room else ""
        added = new[: min(kept + 1, room)]
        row.ids += added
        self.whole[number] += added
        if self.on_tokens is not None:
            self.on_tokens(number, added)
        return kept
