"""Conversations with thoughts, calls of tools or arguments of the template: each answer behind the prompt it is served with.

For each answer the template is asked twice, for the messages before it with the request for an answer (the prompt), and for
the messages up to it. What the second has behind the first is what the model writes: the thought, the content, the calls
with their markup, the end token. Nothing else is ever trained.

A template may lay out earlier messages anew: it drops earlier thoughts, or closes an answer with another token once it is
history. An answer whose prompt goes on from the answer before it stands in one document with it; else it begins a document
of its own. So each answer is trained once, behind what the target reads when it is served.

That a template writes all parts of an answer is tried once for each kind of answer (answer_forms.py), and every answer is
compared with what its record says; one that is altered or not written out is a LayoutError.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from longspec.data.chat.answer_forms import EMPTY_THOUGHT, Asked, end_of, form_of, written_behind
from longspec.data.chat.chat_template import ChatTemplate, Conversation
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.conversations import Chat

# What closes a thought: a mark such as </think>, [/THINK] or <|end|>.
_CLOSES_THOUGHT = re.compile(r"\s*(</[\w:]+>|\[/\w+\]|<[|\uff5c][^<>]*?[|\uff5c]>)")


@dataclass(frozen=True)
class _Turn:
    """An answer as it is served: `said` behind `prompt`, trained from `start` on."""

    prompt: str
    said: str
    start: int
    as_served: bool


def lay_out(template: ChatTemplate, chat: Chat) -> list[Conversation]:
    """The documents of a conversation, in order. Raises LayoutError when the template does not lay it out exactly."""
    asked = Asked(template, chat.tools, json.dumps(chat.template_arguments))
    _check_arguments(template, chat)
    numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    documents: list[Conversation] = []
    if chat.tools:
        _check_tools(asked, chat.tools, chat.messages[: numbers[0]])
    for before, number in zip([-1, *numbers], numbers, strict=False):
        turn = _turn(asked, chat, number)
        _check_results(chat.messages, range(before + 1, number), turn.prompt)
        _add(documents, turn)
    documents[-1] = replace(documents[-1], left_out=len(chat.messages) - 1 - numbers[-1])
    return documents


def request(template: ChatTemplate, chat: Chat) -> str:
    """The text with which the target is asked to go on with a conversation. Raises LayoutError when the template refuses it."""
    asked = Asked(template, chat.tools, json.dumps(chat.template_arguments))
    _check_arguments(template, chat)
    if chat.tools:
        _check_tools(asked, chat.tools, chat.messages)
    return asked.render(chat.messages, True)


def _add(documents: list[Conversation], turn: _Turn) -> None:
    """Put an answer behind the last document, or begin one with it."""
    answers, as_served = [], turn.as_served
    if documents and turn.prompt.startswith(documents[-1].text):
        last = documents.pop()
        answers, as_served = last.answers, as_served and last.as_served
    start, end = len(turn.prompt) + turn.start, len(turn.prompt) + len(turn.said)
    documents.append(Conversation(turn.prompt + turn.said, [*answers, (start, end)], as_served, shortened=0))


def _turn(asked: Asked, chat: Chat, number: int) -> _Turn:
    """The answer of one message. Raises LayoutError with its field when it cannot be laid out."""
    message, place = chat.messages[number], f"messages[{number}]"
    form = form_of(asked, message, place)
    before = [
        form_of(asked, each, f"messages[{at}]").given(each) if each["role"] == "assistant" else each
        for at, each in enumerate(chat.messages[:number])
    ]
    written = written_behind(asked, before, form.given(message), place)
    prompt, said = written.prompt, written.said
    thought = message.get("reasoning_content", "").strip()
    is_closed = EMPTY_THOUGHT.fullmatch(written.opener) is not None
    if thought and is_closed:
        raise LayoutError(f"{place}.reasoning_content: the chat template asks for an answer without a thought")
    lead = form.lead
    if form.lost_thought:
        # The template drops even the last thought: it is put where the prompt asks for it, as the model writes it.
        lead = "" if written.opener else "<think>\n"
        prompt, said = prompt + written.opener, f"{lead}{thought}\n</think>\n\n{said}"
    elif is_closed:
        prompt += written.opener
    said = _up_to_end(asked, said, place)
    _check_said(said, message, place)
    if thought:
        start = 0 if chat.train_thoughts else _behind_thought(said, thought, lead, place)
        return _Turn(prompt, said, start, as_served=True)
    empty = EMPTY_THOUGHT.match(said)
    # Nobody wrote this empty thought: the template puts it before an answer that has none.
    as_served = empty is None and prompt.endswith(written.opener)
    return _Turn(prompt, said, empty.end() if empty else 0, as_served)


def _up_to_end(asked: Asked, said: str, place: str) -> str:
    """What the template writes for an answer through its end token, without what it puts behind that."""
    marker, behind = end_of(asked.template, asked.arguments)
    if said.endswith(marker + behind):
        return said.removesuffix(behind)
    said = said.rstrip()
    if not said.endswith(asked.template.tokens):
        raise LayoutError(f"{place}: the chat template closes this answer with no token")
    return said


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
    for field in ("reasoning_content", "content"):
        if message.get(field, "").strip() not in said:
            raise LayoutError(f"{place}.{field}: the chat template alters it")
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


def _check_tools(asked: Asked, tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Raises LayoutError when the template says nothing of the tools."""
    prompt = asked.render(messages, True)
    names = [tool["function"]["name"] for tool in tools]
    if prompt == replace(asked, tools=None).render(messages, True) or not all(name in prompt for name in names):
        raise LayoutError("tools: the chat template does not write them out; drop them with `align` to train without")


def _check_arguments(template: ChatTemplate, chat: Chat) -> None:
    """Raises LayoutError for an argument that the template does not ask for."""
    for name in chat.template_arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template.template):
            raise LayoutError(f"chat_template_kwargs.{name}: the chat template does not ask for it; correct or drop it")
