"""Conversations as the target's own chat template lays them out, and where the answers stand in that text.

An answer is what the model itself writes: from the end of the request for it (the generation prompt) through its end token.
Where the template marks what is generated ({% generation %}) that is taken; else placeholders tell (answer_spans.py).

* The text of a conversation is the template's final rendering. An earlier answer that it shortens there, as templates of
  reasoning models leave out the reasoning of all answers but the last, is trained as it stands there and counted.
* If it shortens the last answer too, training on that would never show the reasoning. That answer is laid out as it is
  served: the messages before it, the template's request for an answer, the whole content.
* A conversation that the template refuses (no system role, roles that do not alternate) or whose answers cannot be told is
  a LayoutError; `tokenize` leaves it out and counts it.
* Conversations with thoughts, calls of tools or arguments of the template are laid out otherwise (turns.py).
* The date that some templates write is always the same, so that the same records give the same tokens on any day.
"""

import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from longspec.data.chat import answer_spans
from longspec.data.chat.answer_spans import Answer, Messages, Skeleton
from longspec.data.chat.special_tokens import LayoutError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The day that Llama 3.1's template falls back to. A macro, since transformers hands no function of ours to a template.
DAY = {"%Y": "2024", "%m": "07", "%d": "26", "%b": "Jul", "%B": "July", "%y": "24", "%A": "Friday", "%a": "Fri", "%j": "208"}
DAY |= {"%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM", "%-d": "26", "%-m": "7"}
_DAY_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('{code}', '{value}')" for code, value in DAY.items())
    + " }}{% endmacro %}\n"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_log = logging.getLogger(__name__)
_without_template: set[str] = set()


def template_of(tokenizer: Any) -> str:
    """The tokenizer's chat template; ChatML, said in the log, when it has none."""
    if tokenizer.chat_template:
        return tokenizer.get_chat_template()
    if tokenizer.name_or_path not in _without_template:
        _without_template.add(tokenizer.name_or_path)
        _log.warning("%s: no chat template in this tokenizer; conversations are laid out as ChatML", tokenizer.name_or_path)
    return CHATML


@dataclass(frozen=True)
class Conversation:
    """A conversation laid out: its text and the character range [start, end) of each answer, its end marker included."""

    text: str
    answers: list[tuple[int, int]]
    as_served: bool  # the last answer stands behind the template's own request for an answer
    shortened: int  # answers whose beginning the template leaves out
    left_out: int = 0  # messages behind the last answer that are not laid out


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with what it may write: the named special tokens, and all added tokens' names."""

    template: str
    words: tuple[tuple[str, Any], ...]
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatTemplate":
        """The template of a tokenizer, or ChatML."""
        template = template_of(tokenizer)
        if "strftime_now" in template:
            template = _DAY_MACRO + template
        words = {name: tuple(word) if isinstance(word, list) else word for name, word in tokenizer.special_tokens_map.items()}
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        return cls(template, tuple(sorted(words.items())), tuple(sorted(added)))

    def of_today(self) -> "ChatTemplate":
        """The template as a server has it, which tells the day on which it is asked."""
        return replace(self, template=self.template.removeprefix(_DAY_MACRO))

    def render(
        self,
        messages: list[dict[str, Any]],
        ask: bool,
        tools: list[dict[str, Any]] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, with the request for an answer or not, and what the template marks as generated in it.

        arguments: those of the template itself, such as `enable_thinking`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marked = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            return_assistant_tokens_mask=bool(_GENERATION.search(self.template)),
            add_generation_prompt=ask,
            **dict(self.words),
            **(arguments or {}),
        )
        return texts[0], marked[0] if marked else []

    def end_of_answer(self) -> str:
        """What closes an answer to a user's message, through its end token. Raises LayoutError when the template refuses it."""
        try:
            bones = _skeleton(self, ("user", "assistant"), False)
        except TemplateError as error:
            raise LayoutError(f"the chat template refuses a question with its answer: {error}") from error
        return bones.ends.get(1, "")

    def lay_out(self, messages: Messages) -> Conversation:
        """The whole conversation. Raises LayoutError when the template refuses it or its answers cannot be located."""
        try:
            text, answers = self._answers(messages, ask=False)
            if messages[-1]["role"] == "assistant" and not answers[-1].whole:
                text, answers = self._as_served(messages)
        except TemplateError as error:
            raise LayoutError(f"the chat template refuses it: {error}") from error
        spans = [(answer.start, answer.end) for answer in answers]
        end = spans[-1][1]
        # Text of the template after the last end marker is never generated; the document ends with the answer.
        text = text[:end] if not text[end:].strip() else text
        return Conversation(text, spans, answers[-1].as_served, sum(not answer.whole for answer in answers))

    def _answers(self, messages: Messages, ask: bool) -> tuple[str, list[Answer]]:
        text, marked = self.render(messages, ask)
        bones = _skeleton(self, tuple(message["role"] for message in messages), ask)
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if marked:
            if len(marked) != len(numbers):
                raise LayoutError(f"the chat template marks {len(marked)} answers of {len(numbers)}")
            spans = zip(numbers, marked, strict=True)
            return text, [answer_spans.generated(bones, text, messages, number, span) for number, span in spans]
        found = answer_spans.match(bones, text, messages)
        if found is not None:
            return text, [answer_spans.close(bones, text, number, found[number], True) for number in numbers]
        answers = []
        for number in numbers:
            start, end, whole = answer_spans.locate(self.render, ask, bones, text, messages, number)
            answers.append(answer_spans.close(bones, text, number, (start, end), whole))
        return text, answers

    def _as_served(self, messages: Messages) -> tuple[str, list[Answer]]:
        """The last answer in full behind the template's request for it."""
        last, content = len(messages) - 1, messages[-1]["content"]
        bones = _skeleton(self, tuple(message["role"] for message in messages), False)
        if last not in bones.requests:
            raise LayoutError("the chat template shortens the last answer, and writes no request for one to put it behind")
        text, answers = self._answers(messages[:-1], ask=True)
        # The request may already open the reasoning; a content that opens it too does not do so twice. White space alone opens
        # nothing: behind "<think>\n" a content "\n</think>..." is an empty thought, whose line end the model writes.
        request = bones.requests[last]
        sizes = range(min(len(request), len(content)), 0, -1)
        overlap = next((size for size in sizes if content.startswith(request[-size:]) and request[-size:].strip()), 0)
        start, text = len(text), text + content[overlap:] + bones.ends[last]
        return text, [*answers, Answer(start, len(text), whole=True, as_served=True)]


@lru_cache(maxsize=4096)
def _skeleton(template: ChatTemplate, roles: tuple[str, ...], ask: bool) -> Skeleton:
    """The template's text for a sequence of roles, computed once."""
    return answer_spans.skeleton(template.render, roles, ask, template.tokens)
