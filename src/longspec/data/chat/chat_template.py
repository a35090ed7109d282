"""The target's own chat template: the text that it makes of a conversation, and how it writes answers of each kind.

layout.py says which of that text the model writes. The date that some templates write is always the same, so that the same
records give the same tokens on any day. Marks in trial messages show where a template puts an answer's thought and its end.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from longspec.data.chat.special_tokens import LayoutError, pattern_of, unused_characters
from longspec.data.read.record_checks import MARKS, THINK, Marks
from longspec.distributed import log

Message = dict[str, Any]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The day that Llama 3.1's template falls back to. A macro, since transformers gives a template no function of ours.
DAY = {"%Y": "2024", "%m": "07", "%d": "26", "%b": "Jul", "%B": "July", "%y": "24", "%A": "Friday", "%a": "Fri", "%j": "208"}
DAY |= {"%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM", "%-d": "26", "%-m": "7"}
_DAY_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{code}', '{value}')" for code, value in DAY.items())
    + " }}{% endmacro %}\n"
)
EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>\s*")
# A prompt's end that the template does not repeat when it lays out the answer: an opened thought, or an empty one.
_OPENER = re.compile(r"<think>\s*(</think>\s*)?$")


def template_of(tokenizer: Any) -> str:
    """Return the tokenizer's chat template. If it has none, return ChatML, and log that."""
    if tokenizer.chat_template:
        return tokenizer.get_chat_template()
    log(f"WARNING {tokenizer.name_or_path}: no chat template in this tokenizer; conversations are laid out as ChatML")
    return CHATML


@dataclass(frozen=True)
class ChatTemplate:
    """Hold a tokenizer's chat template and what it may write: the named special tokens, and all added tokens' names.

    with_tools: the template of conversations with tools, often the same. arguments: the template's own arguments, such as
    `enable_thinking`, as JSON text.
    """

    template: str
    with_tools: str
    words: tuple[tuple[str, Any], ...]
    tokens: tuple[str, ...]
    arguments: str = "{}"

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatTemplate":
        """Return the template of a tokenizer, or ChatML if it has none."""
        template = template_of(tokenizer)
        with_tools = tokenizer.get_chat_template(tools=[]) if tokenizer.chat_template else template
        template, with_tools = (_DAY_MACRO + text if "strftime_now" in text else text for text in (template, with_tools))
        words = {name: tuple(word) if isinstance(word, list) else word for name, word in tokenizer.special_tokens_map.items()}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        return cls(template, with_tools, tuple(sorted(words.items())), tuple(sorted(added)))

    def of_today(self) -> "ChatTemplate":
        """Return the template as a server has it, which writes the day of the request."""
        template, with_tools = (text.removeprefix(_DAY_MACRO) for text in (self.template, self.with_tools))
        return replace(self, template=template, with_tools=with_tools)

    def render(self, messages: list[Message], ask: bool, tools: list[dict[str, Any]] | None = None) -> str:
        """Return messages as text. ask: with the request for an answer. Raises LayoutError if the template refuses them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [text], _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=ask,
                **dict(self.words),
                **json.loads(self.arguments),
            )
        except (TemplateError, TypeError) as error:
            raise LayoutError(f"the chat template refuses it: {error}") from error
        return str(text)


@dataclass(frozen=True)
class AnswerForm:
    """Say how a template is given an answer, and where it writes the answer's thought."""

    in_content: Marks | None = None  # marks between which it reads the thought, at the beginning of the content
    lost_thought: bool = False  # it writes no thought, not even the last answer's
    calls_as_text: bool = False  # it reads the arguments of calls as JSON text
    no_content: bool = False  # it takes empty content beside calls for an answer of its own
    lead: str = ""  # what it writes after the prompt, before the thought or a content alone

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


def _behind(text: str, mark: str, what: str) -> str:
    if text.count(mark) != 1:
        raise LayoutError(f"{what} {text.count(mark)} times")
    return text.partition(mark)[2]


def written_behind(
    template: ChatTemplate, before: list[Message], message: Message, place: str, tools: list[dict[str, Any]] | None = None
) -> tuple[str, str, str]:
    """Return the prompt, its end, and the text that a template writes for an answer behind the messages before it.

    The end is the part, often none, that the template does not repeat once there is an answer; the returned prompt lacks it.
    Raises LayoutError if these parts cannot be told.
    """
    prompt, whole = template.render(before, True, tools), template.render([*before, message], False, tools)
    if whole.startswith(prompt):
        return prompt, "", whole[len(prompt) :]
    # Once there is an answer, the template lays out the earlier messages in another way. A mark in place of the last message
    # before the answer shows what follows it in both texts, which is then compared.
    mark = next(unused_characters(prompt + whole))
    marked = [*before[:-1], before[-1] | {"content": mark}]
    what = f"{place}: the chat template writes the message before this answer"
    request = _behind(template.render(marked, True, tools), mark, what)
    answered = _behind(template.render([*marked, message], False, tools), mark, what)
    thought = _OPENER.search(request)
    openers = ["", *([thought[0]] if thought else [])]
    if is_content_alone(message):  # then the content shows its place in the text
        same = takewhile(lambda pair: pair[0] == pair[1], zip(request, answered, strict=False))
        openers.append(request[len(list(same)) :])
    if prompt.endswith(request) and whole.endswith(answered):
        for opener in openers:
            common = request.removesuffix(opener)
            if answered.startswith(common):
                return prompt.removesuffix(opener), opener, answered[len(common) :]
    raise LayoutError(f"{place}: the chat template does not lay this answer out behind its own request for it")


def form_of(template: ChatTemplate, message: Message, place: str) -> AnswerForm:
    """Return the form of an answer. Raises LayoutError if the template leaves a part of such answers out."""
    kind = "reasoning_content" in message, bool(message["content"].strip()), len(message.get("tool_calls", []))
    return _form_of_kind(template, kind, place)


@lru_cache(maxsize=1024)
def _form_of_kind(template: ChatTemplate, kind: tuple[bool, bool, int], place: str) -> AnswerForm:
    """Return the first form in which a whole answer is written. kind: with thought, with content, number of calls."""
    thought, content, calls = kind
    forms = [
        AnswerForm(in_content=in_content, calls_as_text=as_text, no_content=no_content)
        for as_text in ((False, True) if calls else (False,))
        for no_content in ((False, True) if calls and not content and not thought else (False,))
        for in_content in (None, *(marks for marks in MARKS if thought and marks.closer in template.template))
    ]
    # If it never writes the thought, but knows </think>, the thought is put before what it writes.
    forms += [replace(form, in_content=None, lost_thought=True) for form in forms if form.in_content == THINK]
    forms += [replace(form, no_content=True) for form in forms if form.lost_thought and calls and not content]
    faults = []
    for form in forms:
        try:
            return _tried(template, kind, place, form)
        except LayoutError as fault:
            faults.append(fault)
    # A part that it leaves out says more than its refusal of a form that is not its own.
    raise next((fault for fault in faults if fault.__cause__ is None), faults[0])


def _tried(template: ChatTemplate, kind: tuple[bool, bool, int], place: str, form: AnswerForm) -> AnswerForm:
    """Return the form with its lead, tried with marks behind a question. Raises LayoutError for a part that is not written."""
    thought, content, calls = kind
    marks = [chr(0xF000 + number) for number in range(2 + 2 * calls)]
    message: Message = {"role": "assistant", "content": marks[1] if content else ""}
    message |= {"reasoning_content": marks[0]} if thought else {}
    functions = [{"name": marks[2 + 2 * call], "arguments": {"a": marks[3 + 2 * call]}} for call in range(calls)]
    message |= {"tool_calls": [{"id": "a" * 9, "type": "function", "function": each} for each in functions]} if calls else {}
    _, _, text = written_behind(template, [{"role": "user", "content": "q"}], form.given(message), place)
    wanted = {"reasoning_content": marks[0]} if thought and not form.lost_thought else {}
    wanted |= {"content": marks[1]} if content else {}
    wanted |= {f"tool_calls[{number // 2}]": mark for number, mark in enumerate(marks[2:])}
    for field, mark in wanted.items():
        if mark not in text:
            raise LayoutError(f"{place}.{field}: the chat template does not write it out in such an answer")
    marker, behind = end_of(template)
    if marker.strip() and marker in text.removesuffix(behind).removesuffix(marker):
        raise LayoutError(f"{place}: the chat template ends such an answer before all of it is written")
    first = marks[1] if content and not (thought or calls) else marks[0]
    return replace(form, lead=text.partition(first)[0]) if first in text else form


@lru_cache(maxsize=256)
def end_of(template: ChatTemplate) -> tuple[str, str]:
    """Return what closes an answer of content alone, through its end token, and what the template writes behind that token.

    Without a named token the close is all visible text. Raises LayoutError unless the template writes the answer to a user's
    message out once.
    """
    mark, place = chr(0xF000), "messages[1]"
    before, message = [{"role": "user", "content": "q"}], {"role": "assistant", "content": mark}
    _, _, text = written_behind(template, before, message, place)
    behind = _behind(text, mark, f"{place}.content: the chat template writes it")
    token = pattern_of(template.tokens).search(behind) if template.tokens else None
    marker = behind[: token.end()] if token else behind.rstrip()
    return marker, behind[len(marker) :]
