"""One text with what was drafted and kept of it, round by round: the report colours it by that."""

from typing import Any

BEFORE = 48  # tokens of the prompt that are shown before the text
LONGEST = 200  # tokens of the text
READ_ALONG = 16  # tokens before a token with which it is turned into text: some tokenizers drop a leading space otherwise


def sample_of(tokenizer: Any, prompt: list[int], ids: list[int], accepted: list[int]) -> dict[str, Any]:
    """The end of the prompt as text, and of each token of the text its own text and its depth in the draft of its round, 0: the
    target's own.

    ids: the text; accepted: tokens kept in each round. The first token comes from the prompt's forward, of no round.
    """
    depths = [0, *(depth for kept in accepted for depth in (*range(1, kept + 1), 0))]
    whole = prompt[-BEFORE:] + ids[:LONGEST]
    start = len(whole) - len(ids[:LONGEST])
    tokens = [{"text": text, "depth": depth} for text, depth in zip(_pieces(tokenizer, whole, start), depths, strict=False)]
    return {"before": tokenizer.decode(whole[:start]), "tokens": tokens}


def _pieces(tokenizer: Any, ids: list[int], start: int) -> list[str]:
    """The text of each token from `start` on; a character that several tokens make up stands with the last of them."""
    texts, begun = [], start
    for place in range(start, len(ids)):
        text = _added(tokenizer, ids[:begun], ids[begun : place + 1])
        whole = not text.endswith("\ufffd") or place + 1 == len(ids)
        texts.append(text if whole else "")
        begun = place + 1 if whole else begun
    return texts


def _added(tokenizer: Any, before: list[int], new: list[int]) -> str:
    """The text that new tokens add behind others."""
    before = before[-READ_ALONG:]
    without, together = tokenizer.decode(before), tokenizer.decode(before + new)
    same = next((place for place, (a, b) in enumerate(zip(without, together, strict=False)) if a != b), len(without))
    return str(together[same:])
