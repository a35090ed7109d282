"""Where a text ends: at an eos token, or with the token that completes a stop string."""

from collections.abc import Collection
from os.path import commonprefix
from typing import Any

from torch import Tensor


def ends_of_text(target: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the target's generation_config and its tokenizer."""
    told = target.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])} - {None}


class Stops:
    """Ends of text. As in transformers' StopStringCriteria a stop string may begin in the prompt, but a decoded token must
    complete it; that token stays whole.

    Raises ValueError for stop strings that are empty or come without the target's tokenizer.
    """

    def __init__(
        self, eos: int | Collection[int] | Tensor | None = None, strings: Collection[str] = (), tokenizer: Any = None
    ) -> None:
        if isinstance(strings, str) or not all(strings):
            raise ValueError(f"stop_strings: {strings!r}: give a list of strings, none of them empty")
        if strings and tokenizer is None:
            raise ValueError("stop_strings: tokens become text by the target's tokenizer; give it as tokenizer=...")
        if isinstance(eos, Tensor):  # its elements are tensors, which are found in no set
            eos = eos.flatten().tolist()
        self.eos = {eos} if isinstance(eos, int) else {int(token) for token in eos or ()}
        self.strings, self.tokenizer = tuple(strings), tokenizer
        # A token holds a byte or more, and a tokenizer may strip the first one's space or leave half a character there.
        self.reach = max((len(string.encode()) for string in strings), default=0) + 4

    def end(self, before: list[int], new: list[int]) -> int | None:
        """The place in `new`, which follows the tokens `before`, of the token that ends the text; None if none does."""
        if not self.strings:
            return next((place for place, token in enumerate(new) if token in self.eos), None)
        tail = before[-self.reach :]
        for place, token in enumerate(new):
            if token in self.eos or self._completes(tail, token):
                return place
            tail = [*tail[1 - self.reach :], token]
        return None

    def _completes(self, tail: list[int], token: int) -> bool:
        """Whether a stop string ends within what this token adds to the text."""
        old, text = (self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (tail, [*tail, token]))
        # Character by character, since a token may also complete a character that was begun before.
        same = len(commonprefix([old, text]))  # noqa: RUF071
        return any(text.find(string, max(0, same - len(string) + 1)) >= 0 for string in self.strings)
