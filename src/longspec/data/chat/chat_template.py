"""The target's own chat template: the text that it makes of a conversation.

Which of that text the model writes: layout.py. The date that some templates write is always the same, so that the same records
give the same tokens on any day.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

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
    ) -> str:
        """Render messages, with the request for an answer or not.

        arguments: those of the template itself, such as `enable_thinking`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        [text], _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=ask,
            **dict(self.words),
            **(arguments or {}),
        )
        return str(text)
