"""Where a text ends: at an eos token, or with the token that completes a stop string."""

from collections.abc import Collection
from typing import Any


class Stops:
    """Ends of text. Stop strings are looked for in what was decoded, not in the prompt; the token that completes one stays.

    Raises ValueError for stop strings that are empty or come without the target's tokenizer.
    """

    def __init__(self, eos: int | Collection[int] | None = None, strings: Collection[str] = (), tokenizer: Any = None) -> None:
        if isinstance(strings, str) or not all(strings):
            raise ValueError(f"stop_strings: {strings!r}: give a list of strings, none of them empty")
        if strings and tokenizer is None:
            raise ValueError("stop_strings: tokens become text by the target's tokenizer; give it as tokenizer=...")
        self.eos = {eos} if isinstance(eos, int) else set(eos or ())
        self.strings, self.tokenizer = tuple(strings), tokenizer
        # A token holds a byte or more, and a tokenizer may strip the first one's space or leave half a character there.
        self.reach = max((len(string.encode()) for string in strings), default=0) + 4

    def end(self, before: list[int], new: list[int]) -> int | None:
        """The place in `new`, which follows the decoded tokens `before`, of the token that ends the text; None if none does."""
        for place, token in enumerate(new):
            if token in self.eos or (self.strings and self._completes(before, new[: place + 1])):
                return place
        return None

    def _completes(self, before: list[int], new: list[int]) -> bool:
        """Whether a stop string stands at the end of the text; one that stood there earlier has ended it already."""
        tail = (before[-self.reach :] + new)[-self.reach :]
        text = self.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)
