"""Records as documents: conversations as the target's own chat template lays them out, and where answers stand in that text.

For each answer the template is rendered twice: the messages before it with the request for an answer (the prompt), and the
messages up to it. What the second text has behind the first is what the model writes: the thought, the content, the calls
with their markup, the end token. Nothing else is ever trained.

* An answer whose prompt goes on from the answer before it shares a document with it. But a template may lay out earlier
  messages anew: it drops earlier thoughts, or closes an answer with another token once it is history. Then the answer begins a
  document of its own. So each answer is trained once, behind what the target reads when it is served.
* If a template drops the thought of the last answer too, the thought is put behind the request, as the model writes it.
* Whether a template writes all parts of an answer is tried once for each kind of answer (chat_template.py), and every answer
  is compared with its record. A conversation that the template refuses, or an answer that it alters or does not write out, is
  a LayoutError; `tokenize` leaves the record out and counts it.
"""

import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from longspec.data.chat.chat_template import (
    EMPTY_THOUGHT,
    AnswerForm,
    ChatTemplate,
    Message,
    end_of,
    form_of,
    is_content_alone,
    written_behind,
)
from longspec.data.chat.special_tokens import LayoutError, Piece, Plan, hide, pieces
from longspec.data.read.record_checks import RecordError, closes_one
from longspec.data.read.records import ANSWER_IDS, Chat, Text, to_messages_or_text

Span = tuple[int, int]  # characters [start, end) of a text


def plan(record: dict[str, Any], template: ChatTemplate, special: tuple[str, ...]) -> list[Plan]:
    """Return the plan of each document of a record. Raises RecordError or LayoutError."""
    document = to_messages_or_text(record)
    if isinstance(document, Text):
        if not document.prompt:
            return [Plan([Piece(document.text, literal=True, opens=True)], None)]
        # Tokenized apart, so that no token belongs to both, as when the target is given the prompt alone.
        start = len(document.prompt)
        parts = [Piece(document.prompt, literal=True, opens=True), Piece(document.text, literal=True, start=start)]
        return [Plan(parts, [(start, start + len(document.text))])]
    if ANSWER_IDS in record:
        return _generated(document, record[ANSWER_IDS], template, special)
    return lay_out(template, *_hidden(document, special))


def _generated(chat: Chat, ids: Any, template: ChatTemplate, special: tuple[str, ...]) -> list[Plan]:
    """Return a plan for each answer: its own tokens behind the request that it answers.

    ids: the tokens of each answer, in order. Raises RecordError if they are not that, and LayoutError as request does.
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
    """Return the plan of a conversation as the target gets it, the template's request for an answer at its end.

    Raises LayoutError if the template refuses it.
    """
    hidden, names = _hidden(chat, special)
    text = _for_chat(template, hidden, hidden.messages).render(hidden.messages, True, hidden.tools)
    return Plan(pieces(text, names), None)


def _hidden(chat: Chat, special: tuple[str, ...]) -> tuple[Chat, dict[str, str]]:
    """Return a conversation with special tokens' names hidden in it and its tools, and these names, as hide does."""
    [*messages, beside], names = hide([*chat.messages, {"tools": chat.tools}], special)
    return replace(chat, messages=messages, tools=beside["tools"]), names


def cut_at_answers(made: Plan) -> Plan:
    """Return the plan with a piece ending wherever an answer begins or ends."""
    places = {place for span in made.answers or [] for place in span}
    cut = []
    for piece in made.pieces:
        inside = sorted(place - piece.start for place in places if 0 < place - piece.start < len(piece.text))
        for start, end in pairwise([0, *inside, len(piece.text)]):
            opens = piece.opens and start == 0
            cut.append(replace(piece, text=piece.text[start:end], start=piece.start + start, opens=opens))
    return replace(made, pieces=cut)


@dataclass(frozen=True)
class _Turn:
    """Hold an answer as it is served: `said` follows `prompt` and is trained from character `start` on."""

    prompt: str
    said: str  # through the end token
    rest: str  # what the template writes behind that token
    start: int
    as_served: bool

    @property
    def text(self) -> str:
        return self.prompt + self.said

    @property
    def place(self) -> Span:
        return len(self.prompt) + self.start, len(self.text)

    def place_in(self, later: str) -> Span | None:
        """Return the place of this answer in a later prompt; None if that does not go on from it."""
        if later.startswith(self.text):
            return self.place
        # The empty thought before an answer without one, which nobody wrote, disappears once the answer is history.
        bare = self.prompt + self.said[self.start :]
        if EMPTY_THOUGHT.fullmatch(self.said[: self.start]) and later.startswith(bare):
            return len(self.prompt), len(bare)
        return None


def lay_out(template: ChatTemplate, chat: Chat, names: dict[str, str]) -> list[Plan]:
    """Return a conversation's documents, in order. names: the names hidden in it, as hide returns them.

    Raises LayoutError if the template does not lay it out exactly.
    """
    numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    template = _for_chat(template, chat, chat.messages[: numbers[0]])
    forms = {number: form_of(template, chat.messages[number], f"messages[{number}]") for number in numbers}
    given = [forms[at].given(message) if at in forms else message for at, message in enumerate(chat.messages)]
    documents, answers, as_served = list[Plan](), list[Span](), True
    last: _Turn | None = None
    for before, number in zip([-1, *numbers], numbers, strict=False):
        turn = _turn(template, chat, number, forms[number], given)
        _check_results(chat.messages, range(before + 1, number), turn.prompt)
        place = last.place_in(turn.prompt) if last else None
        last = turn
        if place is None:
            answers, as_served = [turn.place], turn.as_served
        else:  # it goes on from the answer before it
            documents.pop()
            answers, as_served = [*answers[:-1], place, turn.place], as_served and turn.as_served
        documents.append(Plan(pieces(turn.text, names), answers, as_served))
    # What stands behind the last answer: further messages, or a token after all.
    behind = len(given) - 1 - numbers[-1]
    whole = template.render(given, False, chat.tools) if behind else turn.text + turn.rest
    place = turn.place_in(whole)
    if place is None:
        documents[-1] = replace(documents[-1], left_out=behind)
    elif whole[place[1] :].strip():
        documents[-1] = Plan(pieces(whole, names), [*answers[:-1], place], as_served)
    return documents


def _for_chat(template: ChatTemplate, chat: Chat, messages: list[Message]) -> ChatTemplate:
    """Return the template with what a conversation has for it. messages: those of its first prompt.

    Raises LayoutError for an argument that the template does not ask for, and if it does not write the tools out.
    """
    if chat.tools:
        template = replace(template, template=template.with_tools)
    for name in chat.template_arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template.template):
            raise LayoutError(f"chat_template_kwargs.{name}: the chat template does not ask for it; correct or drop it")
    template = replace(template, arguments=json.dumps(chat.template_arguments))
    if chat.tools:
        prompt = template.render(messages, True, chat.tools)
        named = all(tool["function"]["name"] in prompt for tool in chat.tools)
        if not named or prompt == template.render(messages, True):
            raise LayoutError("tools: the chat template does not write them out; drop them with `align` to train without")
    return template


def _turn(template: ChatTemplate, chat: Chat, number: int, form: AnswerForm, given: list[Message]) -> _Turn:
    """Return the turn of one answer. Raises LayoutError, with its field, if it cannot be laid out.

    given: all messages, as the template reads them.
    """
    message, place = chat.messages[number], f"messages[{number}]"
    prompt, opener, text = written_behind(template, given[:number], given[number], place, chat.tools)
    body, end, rest = _parts(template, text, place)
    if is_content_alone(message):
        return _content_turn(prompt, opener, (body, end, rest), form.lead, message["content"], place)
    thought = message.get("reasoning_content", "").strip()
    asks_without = EMPTY_THOUGHT.fullmatch(opener)
    if thought and asks_without:
        raise LayoutError(f"{place}.reasoning_content: the chat template asks for an answer without a thought")
    if form.lost_thought:
        # The template drops even the last thought: it is put where the prompt asks for it, as the model writes it.
        body = ("" if opener else "<think>\n") + f"{thought}\n</think>\n\n{body}"
    if form.lost_thought or asks_without:
        prompt += opener
    said = body + end
    for name in ("reasoning_content", "content"):
        if message.get(name, "").strip() not in said:
            raise LayoutError(f"{place}.{name}: the chat template alters it")
    if thought:
        return _Turn(prompt, said, rest, 0, as_served=True)
    empty = EMPTY_THOUGHT.match(said)
    # Nobody wrote this empty thought: the template puts it before an answer that has none.
    return _Turn(prompt, said, rest, empty.end() if empty else 0, empty is None and prompt.endswith(opener))


def _content_turn(prompt: str, opener: str, parts: tuple[str, str, str], lead: str, content: str, place: str) -> _Turn:
    """Return the turn of an answer of content alone. parts: as of _parts; lead: what the template writes before contents."""
    body, end, rest = parts
    if EMPTY_THOUGHT.fullmatch(opener):
        prompt, opener = prompt + opener, ""
    own = len(content) - len(body)
    if content[: max(0, own)].strip() and (prompt + body).endswith(content):  # the prompt ends as the content begins
        prompt, opener, body = prompt[:-own], prompt[-own:], content
    start = _start_of(body, lead, content)
    if start is None:
        return _Turn(prompt + opener, _shortened(body, content, opener, place) + end, rest, 0, as_served=True)
    # White space between the request and the content is for the model to write.
    start = start if opener or body[:start].strip() else 0
    return _Turn(prompt, body + end, rest, start, as_served=not (start or opener))


def _parts(template: ChatTemplate, text: str, place: str) -> tuple[str, str, str]:
    """Return what a template writes for an answer, what closes it, through its end token, and what stands behind that."""
    marker, behind = end_of(template)
    if text.endswith(marker + behind):
        return text[: len(text) - len(marker + behind)], marker, behind
    said = text.rstrip()
    token = max((token for token in template.tokens if said.endswith(token)), key=len, default="")
    if not token:
        raise LayoutError(f"{place}: the chat template closes this answer with no token")
    return said.removesuffix(token), token, text[len(said) :]


def _squeeze(text: str) -> str:
    """Return the text without white space, which templates add and drop."""
    return "".join(text.split())


def _start_of(body: str, lead: str, content: str) -> int | None:
    """Return where a content begins in what a template writes for it; None unless that ends with the whole content.

    lead: what the template writes before such contents.
    """
    written, wanted = _squeeze(body), _squeeze(content)
    if not written.endswith(wanted):
        return None
    if body.startswith(lead) and _squeeze(body[len(lead) :]) == wanted:
        return len(lead)
    if not wanted:  # white space, for which the template writes something else
        return None
    visible = [place for place, character in enumerate(body) if not character.isspace()]
    return visible[len(written) - len(wanted)]


def _shortened(body: str, content: str, opener: str, place: str) -> str:
    """Return a content as the model writes it behind the request, if the template leaves out the thought at its beginning.

    Raises LayoutError if it leaves out another part.
    """
    written, wanted = _squeeze(body), _squeeze(content)
    if not written or not wanted.endswith(written) or not closes_one(wanted.removesuffix(written)):
        raise LayoutError(f"{place}.content: the chat template does not write this answer out")
    # The request may open the thought already; a content that opens it too must not do so twice. White space alone opens
    # nothing: behind "<think>\n" a content "\n</think>..." is an empty thought, whose line end the model writes.
    sizes = range(min(len(opener), len(content)), 0, -1)
    overlap = next((size for size in sizes if content.startswith(opener[-size:]) and opener[-size:].strip()), 0)
    return content[overlap:]


def _check_results(messages: list[Message], numbers: range, prompt: str) -> None:
    """Raise LayoutError if a tool's result does not stand in the prompt behind it, as it is or within JSON."""
    for number in numbers:
        said = messages[number]["content"].strip()
        forms = (said, *(json.dumps(said, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
        if messages[number]["role"] == "tool" and not any(form in prompt for form in forms):
            raise LayoutError(f"messages[{number}].content: the chat template does not write this tool's result out")
