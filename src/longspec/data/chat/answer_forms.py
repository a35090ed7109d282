"""How a chat template writes answers of one kind: where their thought goes, and what closes them, tried with marks."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.special_tokens import LayoutError, unused_characters
from longspec.data.read.record_checks import MARKS, THINK, Marks

Message = dict[str, Any]
EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>\s*")
# With which a prompt may end that the template does not repeat when it lays out the answer: a thought opened, or an empty one.
_OPENER = re.compile(r"<think>\s*(</think>\s*)?$")


@dataclass(frozen=True)
class Renderer:
    """A chat template with all that it is given beside the messages; `arguments` as JSON text."""

    template: ChatTemplate
    tools: list[dict[str, Any]] | None = None
    arguments: str = "{}"

    def render(self, messages: list[Message], ask: bool) -> str:
        """Render messages, with the request for an answer or not. Raises LayoutError when the template refuses them."""
        try:
            return self.template.render(messages, ask, self.tools, json.loads(self.arguments))
        except (TemplateError, TypeError) as error:
            raise LayoutError(f"the chat template refuses it: {error}") from error


@dataclass(frozen=True)
class Written:
    """Return what a template writes for an answer behind its prompt; the prompt's end, `opener`, is not repeated."""

    prompt: str  # without the opener
    opener: str
    text: str


@dataclass(frozen=True)
class AnswerForm:
    """How a template is to be given an answer, and where it writes the thought of it."""

    in_content: Marks | None = None  # between which it reads the thought at the beginning of the content
    lost_thought: bool = False  # it writes no thought, not even the last answer's
    calls_as_text: bool = False  # it reads arguments of calls as JSON text
    no_content: bool = False  # it takes an empty content beside calls for an answer of its own
    lead: str = ""  # what stands behind the prompt before the thought, or before a content alone

    def given(self, message: Message) -> Message:
        """Return the message as the template reads it."""
        form = dict(message)
        if self.in_content:
            form["content"] = self.in_content.written(form.pop("reasoning_content"), form["content"])
        if self.calls_as_text:
            form["tool_calls"] = [call | {"function": _as_text(call["function"])} for call in form["tool_calls"]]
        if self.no_content:
            form["content"] = None
        return form


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    return function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def is_content_alone(message: Message) -> bool:
    """Tell whether an answer is its content alone: no separate thought, no calls."""
    return not message.keys() & {"reasoning_content", "tool_calls"}


def form_of(renderer: Renderer, message: Message, place: str) -> AnswerForm:
    """Find the form of an answer. Raises LayoutError when the template leaves a part of such answers out."""
    kind = "reasoning_content" in message, bool(message["content"].strip()), len(message.get("tool_calls", []))
    return _form_of_kind(renderer.template, kind, renderer.arguments, place)


def _behind(text: str, mark: str, what: str) -> str:
    if text.count(mark) != 1:
        raise LayoutError(f"{what} {text.count(mark)} times")
    return text.partition(mark)[2]


def written_behind(renderer: Renderer, before: list[Message], message: Message, place: str) -> Written:
    """Find what the template writes for a message behind those before it. Raises LayoutError when it cannot be told."""
    prompt, whole = renderer.render(before, True), renderer.render([*before, message], False)
    if whole.startswith(prompt):
        return Written(prompt, "", whole[len(prompt) :])
    # The template lays out what was before otherwise, now that there is an answer. What stands behind the last message before
    # the answer is compared, by a mark in its place.
    mark = next(unused_characters(prompt + whole))
    marked = [*before[:-1], before[-1] | {"content": mark}]
    what = f"{place}: the chat template writes the message before this answer"
    request = _behind(renderer.render(marked, True), mark, what)
    answered = _behind(renderer.render([*marked, message], False), mark, what)
    thought = _OPENER.search(request)
    openers = ["", *([thought[0]] if thought else [])]
    if is_content_alone(message):  # then its place in the text is seen by the content
        same = takewhile(lambda pair: pair[0] == pair[1], zip(request, answered, strict=False))
        openers.append(request[len(list(same)) :])
    if prompt.endswith(request) and whole.endswith(answered):
        for opener in openers:
            common = request.removesuffix(opener)
            if answered.startswith(common):
                return Written(prompt.removesuffix(opener), opener, answered[len(common) :])
    raise LayoutError(f"{place}: the chat template does not lay this answer out behind its own request for it")


@lru_cache(maxsize=1024)
def _form_of_kind(template: ChatTemplate, kind: tuple[bool, bool, int], arguments: str, place: str) -> AnswerForm:
    """The first form in which the template writes all of an answer of a kind: with thought, with content, number of calls."""
    thought, content, calls = kind
    forms = [
        AnswerForm(in_content=in_content, calls_as_text=as_text, no_content=no_content)
        for as_text in ((False, True) if calls else (False,))
        for no_content in ((False, True) if calls and not content and not thought else (False,))
        for in_content in (None, *(marks for marks in MARKS if thought and marks.closer in template.template))
    ]
    # Where it never writes the thought, but knows </think>, the thought is put before what it writes.
    forms += [replace(form, in_content=None, lost_thought=True) for form in forms if form.in_content == THINK]
    forms += [replace(form, no_content=True) for form in forms if form.lost_thought and calls and not content]
    faults = []
    for form in forms:
        try:
            return _tried(template, kind, arguments, place, form)
        except LayoutError as fault:
            faults.append(fault)
    # What a template leaves out tells more than what it refuses in a form that is not its own.
    raise next((fault for fault in faults if fault.__cause__ is None), faults[0])


def _tried(template: ChatTemplate, kind: tuple[bool, bool, int], arguments: str, place: str, form: AnswerForm) -> AnswerForm:
    """The form with its lead, tried with marks behind a question. Raises LayoutError for a part that is not written."""
    thought, content, calls = kind
    marks = [chr(0xF000 + number) for number in range(2 + 2 * calls)]
    message: Message = {"role": "assistant", "content": marks[1] if content else ""}
    message |= {"reasoning_content": marks[0]} if thought else {}
    functions = [{"name": marks[2 + 2 * call], "arguments": {"a": marks[3 + 2 * call]}} for call in range(calls)]
    message |= {"tool_calls": [{"id": "a" * 9, "type": "function", "function": each} for each in functions]} if calls else {}
    before = [{"role": "user", "content": "q"}]
    text = written_behind(Renderer(template, None, arguments), before, form.given(message), place).text
    wanted = {"reasoning_content": marks[0]} if thought and not form.lost_thought else {}
    wanted |= {"content": marks[1]} if content else {}
    wanted |= {f"tool_calls[{number // 2}]": mark for number, mark in enumerate(marks[2:])}
    for field, mark in wanted.items():
        if mark not in text:
            raise LayoutError(f"{place}.{field}: the chat template does not write it out in such an answer")
    marker, behind = end_of(template, arguments)
    if marker.strip() and marker in text.removesuffix(behind).removesuffix(marker):
        raise LayoutError(f"{place}: the chat template ends such an answer before all of it is written")
    first = marks[1] if content and not (thought or calls) else marks[0]
    return replace(form, lead=text.partition(first)[0]) if first in text else form


@lru_cache(maxsize=256)
def end_of(template: ChatTemplate, arguments: str = "{}") -> tuple[str, str]:
    """Find what closes an answer of content alone, through its end token, and what the template writes behind that token.

    Raises LayoutError for a template that does not write the answer to a user's message out, once.
    """
    mark = chr(0xF000)
    message, place = {"role": "assistant", "content": mark}, "messages[1]"
    written = written_behind(Renderer(template, None, arguments), [{"role": "user", "content": "q"}], message, place)
    behind = _behind(written.text, mark, f"{place}.content: the chat template writes it")
    marker = _up_to_token(behind, template.tokens)
    return marker, behind[len(marker) :]


def _up_to_token(text: str, tokens: Iterable[str]) -> str:
    """The text through the first of the named tokens in it; without one, through its last visible character."""
    found = [(place, -len(token)) for token in tokens if (place := text.find(token)) >= 0]
    if not found:
        return text.rstrip()
    place, length = min(found)
    return text[: place - length]
