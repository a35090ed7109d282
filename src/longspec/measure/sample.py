"""Describe one text with the drafts made and kept, round by round; the report colours the text by this."""

from os.path import commonprefix
from typing import Any

BEFORE = 48  # tokens of the prompt shown before the text
LONGEST = 200  # tokens of the text
READ_ALONG = 16  # tokens decoded with a token to get its text: some tokenizers drop a leading space otherwise


def sample_of(tokenizer: Any, prompt: list[int], ids: list[int], accepted: list[int]) -> dict[str, Any]:
    """Return the end of the prompt as text, and for each token its text and its depth in its round's draft, 0: the target's.

    ids: the text; accepted: tokens kept in each round. The first token comes from the prompt's forward and has no round.
    """
    depths = [0, *(depth for kept in accepted for depth in (*range(1, kept + 1), 0))]
    before, shown = prompt[-BEFORE:], ids[:LONGEST]
    pieces = Pieces(tokenizer, before)
    texts = [pieces.text_of(token, place + 1 == len(shown)) for place, token in enumerate(shown)]
    tokens = [{"text": text, "depth": depth} for text, depth in zip(texts, depths, strict=False)]
    return {"before": tokenizer.decode(before), "tokens": tokens}


class Pieces:
    """Turn tokens into text one by one, after the tokens `before`.

    A character made of several tokens comes with the last of them; the tokens before it add nothing.
    """

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        self.tokenizer, self.ids, self.begun = tokenizer, list(before), len(before)

    def text_of(self, token: int, is_last: bool = False) -> str:
        """Return the text that a token adds. is_last: also return a character that is not whole."""
        self.ids.append(token)
        first = max(0, self.begun - READ_ALONG)
        without, together = (str(self.tokenizer.decode(self.ids[first:end])) for end in (self.begun, len(self.ids)))
        added = together[len(commonprefix([without, together])) :]  # noqa: RUF071
        if added.endswith("\ufffd") and not is_last:
            return ""
        self.begun = len(self.ids)
        return added
