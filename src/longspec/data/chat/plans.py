"""Plan how a record is tokenized: a document or several, cut into pieces, and where the answers stand in their text."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from longspec.data.chat import layout
from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.special_tokens import Piece, Plan, hide, pieces
from longspec.data.read.record_checks import RecordError
from longspec.data.read.records import ANSWER_IDS, Chat, Text, to_messages_or_text


def plan(record: dict[str, Any], template: ChatTemplate, special: tuple[str, ...]) -> list[Plan]:
    """How a record is to be tokenized: one document, or several (layout.py). Raises RecordError or LayoutError."""
    document = to_messages_or_text(record)
    if isinstance(document, Text):
        if not document.prompt:
            return [Plan([Piece(document.text, literal=True, opens=True)], None)]
        # Tokenized apart, so that no token belongs to both, as none does when the prompt alone is given to the target.
        start = len(document.prompt)
        parts = [Piece(document.prompt, literal=True, opens=True), Piece(document.text, literal=True, start=start)]
        return [Plan(parts, [(start, start + len(document.text))])]
    if ANSWER_IDS in record:
        return _generated(document, record[ANSWER_IDS], template, special)
    hidden, names = _hidden(document, special)
    return [replace(each, pieces=pieces(each.text, names)) for each in layout.lay_out(template, hidden)]


def _generated(chat: Chat, ids: Any, template: ChatTemplate, special: tuple[str, ...]) -> list[Plan]:
    """Plan a document for each answer: its own tokens behind the request that it answers.

    ids: of each answer, in order. Raises RecordError where they are not, and LayoutError as of request.
    """
    numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not isinstance(ids, list) or [isinstance(each, list) and bool(each) for each in ids] != [True] * len(numbers):
        raise RecordError(ANSWER_IDS, f"must be the tokens of each of {len(numbers)} answers")
    if not all(type(token) is int and token >= 0 for each in ids for token in each):
        raise RecordError(ANSWER_IDS, "must be token ids, from 0 on")
    asked = [request(replace(chat, messages=chat.messages[:number]), template, special) for number in numbers]
    plans = [replace(made, answers=[], said=tuple(each)) for made, each in zip(asked, ids, strict=True)]
    return [*plans[:-1], replace(plans[-1], left_out=len(chat.messages) - 1 - numbers[-1])]


def request(chat: Chat, template: ChatTemplate, special: tuple[str, ...]) -> Plan:
    """Plan a conversation so far as it is given to the target: with the template's request for an answer behind it.

    Raises LayoutError when the template refuses it.
    """
    hidden, names = _hidden(chat, special)
    return Plan(pieces(layout.request(template, hidden), names), None)


def _hidden(chat: Chat, special: tuple[str, ...]) -> tuple[Chat, dict[str, str]]:
    """A conversation and its tools, special tokens' names in them hidden as by hide."""
    [*messages, beside], names = hide([*chat.messages, {"tools": chat.tools}], special)
    return replace(chat, messages=messages, tools=beside["tools"]), names


def cut_at_answers(made: Plan) -> Plan:
    """Have a piece end wherever an answer begins or ends."""
    places = {place for span in made.answers or [] for place in span}
    cut = []
    for piece in made.pieces:
        inside = sorted(place - piece.start for place in places if 0 < place - piece.start < len(piece.text))
        for start, end in pairwise([0, *inside, len(piece.text)]):
            opens = piece.opens and start == 0
            cut.append(replace(piece, text=piece.text[start:end], start=piece.start + start, opens=opens))
    return replace(made, pieces=cut)
