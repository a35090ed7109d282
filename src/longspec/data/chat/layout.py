"""Conversations as the target's own chat template lays them out, and where the answers stand in that text.

For each answer the template is asked twice, for the messages before it with the request for an answer (the prompt), and for
the messages up to it. What the second has behind the first is what the model writes: the thought, the content, the calls
with their markup, the end token. Nothing else is ever trained.

* An answer whose prompt goes on from the answer before it stands in one document with it. A template may lay out earlier
  messages anew: it drops earlier thoughts, or closes an answer with another token once it is history. Then the answer begins a
  document of its own. So each answer is trained once, behind what the target reads when it is served.
* Where a template drops the thought of the last answer too, the thought is put behind the request, as the model writes it.
* That a template writes all parts of an answer is tried once for each kind of answer (answer_forms.py), and every answer is
  compared with what its record says. A conversation that the template refuses, and an answer that it alters or does not write
  out, is a LayoutError; `tokenize` leaves the record out and counts it.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from longspec.data.chat.answer_forms import (
    EMPTY_THOUGHT,
    AnswerForm,
    Message,
    Renderer,
    Written,
    end_of,
    form_of,
    is_content_alone,
    written_behind,
)
from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.record_checks import closes_one
from longspec.data.read.records import Chat

# What closes a thought: a mark such as </think>, [/THINK] or <|end|>.
_CLOSES_THOUGHT = re.compile(r"\s*(</[\w:]+>|\[/\w+\]|<[|\uff5c][^<>]*?[|\uff5c]>)")
Span = tuple[int, int]  # characters [start, end) of a text


@dataclass(frozen=True)
class Conversation:
    """A document of a conversation: its text and the range of each answer in it, end marker included."""

    text: str
    answers: list[Span]
    as_served: bool  # each answer stands behind the template's own request for it
    left_out: int = 0  # messages behind the last answer that are not laid out


@dataclass(frozen=True)
class _Turn:
    """An answer as it is served: `said` behind `prompt`, trained from `start` on."""

    prompt: str
    said: str  # through the end token
    rest: str  # that the template writes behind that token
    start: int
    as_served: bool

    @property
    def text(self) -> str:
        return self.prompt + self.said

    def place_in(self, later: str) -> Span | None:
        """The place of this answer in a later prompt; None where that does not go on from it."""
        if later.startswith(self.text):
            return len(self.prompt) + self.start, len(self.text)
        # The empty thought before an answer without one, which nobody wrote, goes once the answer is history.
        bare = self.prompt + self.said[self.start :]
        if EMPTY_THOUGHT.fullmatch(self.said[: self.start]) and later.startswith(bare):
            return len(self.prompt), len(bare)
        return None


@dataclass
class _Document:
    """Answers each of whose prompts goes on from the one before; `places`: of all but the last."""

    turns: list[_Turn]
    places: list[Span] = field(default_factory=list)

    def conversation(self) -> Conversation:
        last = self.turns[-1]
        place = len(last.prompt) + last.start, len(last.text)
        return Conversation(last.text, [*self.places, place], all(turn.as_served for turn in self.turns))


def lay_out(template: ChatTemplate, chat: Chat) -> list[Conversation]:
    """Lay a conversation out as documents, in order. Raises LayoutError when the template does not do so exactly."""
    numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    renderer = _renderer(template, chat, chat.messages[: numbers[0]])
    forms = {number: form_of(renderer, chat.messages[number], f"messages[{number}]") for number in numbers}
    given = [forms[at].given(message) if at in forms else message for at, message in enumerate(chat.messages)]
    documents: list[_Document] = []
    for before, number in zip([-1, *numbers], numbers, strict=False):
        turn = _turn(renderer, chat, number, forms[number], given)
        _check_results(chat.messages, range(before + 1, number), turn.prompt)
        place = documents[-1].turns[-1].place_in(turn.prompt) if documents else None
        if place is None:
            documents.append(_Document([turn]))
        else:
            documents[-1].turns.append(turn)
            documents[-1].places.append(place)
    whole = renderer.render(given, False) if given[numbers[-1] + 1 :] else turn.text + turn.rest
    *others, last = [document.conversation() for document in documents]
    return [*others, _with_rest(documents[-1], last, whole, len(given) - 1 - numbers[-1])]


def request(template: ChatTemplate, chat: Chat) -> str:
    """Render the text with which the target is asked to go on with a conversation.

    Raises LayoutError when the template refuses it.
    """
    return _renderer(template, chat, chat.messages).render(chat.messages, True)


def _renderer(template: ChatTemplate, chat: Chat, messages: list[dict[str, Any]]) -> Renderer:
    """The template for a conversation; `messages`: those of its first prompt."""
    _check_arguments(template, chat)
    renderer = Renderer(template, chat.tools, json.dumps(chat.template_arguments))
    if chat.tools:
        _check_tools(renderer, chat.tools, messages)
    return renderer


def _with_rest(document: _Document, laid_out: Conversation, whole: str, messages: int) -> Conversation:
    """The last document with what stands behind its last answer in the whole text: so many messages, or a token after all."""
    place = document.turns[-1].place_in(whole)
    if place is None:
        return replace(laid_out, left_out=messages)
    return replace(laid_out, text=whole, answers=[*document.places, place]) if whole[place[1] :].strip() else laid_out


def _turn(renderer: Renderer, chat: Chat, number: int, form: AnswerForm, given: list[Message]) -> _Turn:
    """The answer of one message. Raises LayoutError with its field when it cannot be laid out.

    given: all messages as the template reads them.
    """
    message, place = chat.messages[number], f"messages[{number}]"
    written = written_behind(renderer, given[:number], given[number], place)
    parts = _parts(renderer, written.text, place)
    if is_content_alone(message):
        return _content_turn(written, parts, form.lead, message["content"], place)
    (body, end, rest), prompt, lead = parts, written.prompt + written.opener, form.lead
    thought = message.get("reasoning_content", "").strip()
    if thought and EMPTY_THOUGHT.fullmatch(written.opener):
        raise LayoutError(f"{place}.reasoning_content: the chat template asks for an answer without a thought")
    if form.lost_thought:
        # The template drops even the last thought: it is put where the prompt asks for it, as the model writes it.
        lead = "" if written.opener else "<think>\n"
        body = f"{lead}{thought}\n</think>\n\n{body}"
    elif not EMPTY_THOUGHT.fullmatch(written.opener):
        prompt = written.prompt
    said = body + end
    _check_said(said, message, place)
    if thought:
        start = 0 if chat.train_thoughts else _behind_thought(said, thought, lead, place)
        return _Turn(prompt, said, rest, start, as_served=True)
    empty = EMPTY_THOUGHT.match(said)
    # Nobody wrote this empty thought: the template puts it before an answer that has none.
    return _Turn(prompt, said, rest, empty.end() if empty else 0, empty is None and prompt.endswith(written.opener))


def _content_turn(written: Written, parts: tuple[str, str, str], lead: str, content: str, place: str) -> _Turn:
    """An answer of content alone; `parts`: as of _parts, `lead`: what the template writes before such contents."""
    (body, end, rest), prompt, opener = parts, written.prompt, written.opener
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


def _parts(renderer: Renderer, text: str, place: str) -> tuple[str, str, str]:
    """What a template writes for an answer, what closes it, through its end token, and what stands behind that."""
    marker, behind = end_of(renderer.template, renderer.arguments)
    if text.endswith(marker + behind):
        return text[: len(text) - len(marker + behind)], marker, behind
    said = text.rstrip()
    token = max((token for token in renderer.template.tokens if said.endswith(token)), key=len, default="")
    if not token:
        raise LayoutError(f"{place}: the chat template closes this answer with no token")
    return said.removesuffix(token), token, text[len(said) :]


def _squeeze(text: str) -> str:
    """The text without white space, which templates add and drop."""
    return "".join(text.split())


def _start_of(body: str, lead: str, content: str) -> int | None:
    """The place of a content in what a template writes for it; None where the content does not stand at the end in full.

    lead: what the template writes before such contents.
    """
    written, wanted = _squeeze(body), _squeeze(content)
    if not written.endswith(wanted):
        return None
    if body.startswith(lead) and _squeeze(body[len(lead) :]) == wanted:
        return len(lead)
    visible = [place for place, character in enumerate(body) if not character.isspace()]
    return visible[len(written) - len(wanted)]


def _shortened(body: str, content: str, opener: str, place: str) -> str:
    """The content of which a template leaves the thought at the beginning out, as the model writes it behind the request.

    Raises LayoutError when it leaves out another part.
    """
    written, wanted = _squeeze(body), _squeeze(content)
    if not written or not wanted.endswith(written) or not closes_one(wanted.removesuffix(written)):
        raise LayoutError(f"{place}.content: the chat template does not write this answer out")
    # The request may already open the thought; a content that opens it too does not do so twice. White space alone opens
    # nothing: behind "<think>\n" a content "\n</think>..." is an empty thought, whose line end the model writes.
    sizes = range(min(len(opener), len(content)), 0, -1)
    overlap = next((size for size in sizes if content.startswith(opener[-size:]) and opener[-size:].strip()), 0)
    return content[overlap:]


def _behind_thought(said: str, thought: str, lead: str, place: str) -> int:
    """The place in an answer behind its thought and the mark that closes it; `lead`: what stands before the thought."""
    start = said.find(thought, len(lead))
    close = _CLOSES_THOUGHT.match(said, start + len(thought))
    if not said.startswith(lead) or said[len(lead) : start].strip() or close is None:
        raise LayoutError(
            f"{place}.reasoning_content: no mark of the chat template closes it, so what follows cannot be told from it; "
            "set train_thoughts: true"
        )
    return close.end()


def _forms_of(value: Any) -> list[str]:
    """How a template may write a value of a call's arguments."""
    forms = [json.dumps(value, ensure_ascii=False), json.dumps(value), str(value)]
    return [*forms, *(form[1:-1].strip() for form in forms[:2] if isinstance(value, str)), str(value).strip()]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in (key, *_leaves(part))]
    if isinstance(value, list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _check_said(said: str, message: dict[str, Any], place: str) -> None:
    """Raises LayoutError when a part of a message does not stand in its answer as the record has it."""
    for name in ("reasoning_content", "content"):
        if message.get(name, "").strip() not in said:
            raise LayoutError(f"{place}.{name}: the chat template alters it")
    for number, call in enumerate(message.get("tool_calls", [])):
        for leaf in (call["function"]["name"], *_leaves(call["function"]["arguments"])):
            if not any(form in said for form in _forms_of(leaf)):
                raise LayoutError(f"{place}.tool_calls[{number}]: the chat template alters it, or leaves out a part")


def _check_results(messages: list[dict[str, Any]], numbers: range, prompt: str) -> None:
    """Raises LayoutError when what a tool returned does not stand in the prompt behind it."""
    for number in numbers:
        if messages[number]["role"] == "tool" and not any(
            form in prompt for form in _forms_of(messages[number]["content"].strip())
        ):
            raise LayoutError(f"messages[{number}].content: the chat template does not write this tool's result out")


def _check_tools(renderer: Renderer, tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Raises LayoutError when the template says nothing of the tools."""
    prompt = renderer.render(messages, True)
    names = [tool["function"]["name"] for tool in tools]
    if prompt == replace(renderer, tools=None).render(messages, True) or not all(name in prompt for name in names):
        raise LayoutError("tools: the chat template does not write them out; drop them with `align` to train without")


def _check_arguments(template: ChatTemplate, chat: Chat) -> None:
    """Raises LayoutError for an argument that the template does not ask for."""
    for name in chat.template_arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template.template):
            raise LayoutError(f"chat_template_kwargs.{name}: the chat template does not ask for it; correct or drop it")
