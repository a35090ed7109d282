"""Questions to a target as its chat template lays them out, and its tokens as the text of an answer. No torch."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from longspec.answers.conversation import Answer, Conversation, Key
from longspec.answers.settings import Regenerate
from longspec.atomic_files import read_json_object
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import REASONING, LayoutError, special_names
from longspec.data.read.conversations import Chat
from longspec.data.read.thoughts import opened_at_end

TOGETHER = 1024  # questions whose tokens are held in memory at a time
OPENER_TOKENS = 8  # more than a mark such as <think> and a line's end have in any vocabulary
# Answers in channels, as harmony's chat template (GPT-OSS) lays them out: a thought, and what is said.
# <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>said
HEAD, BETWEEN = ["<|channel|>", "<|message|>"], ["<|end|>", "<|start|>"]
OTHER = "the answer is written in other channels than analysis and final, as calls of tools are"
TORN = "\ufffd"  # what bytes that are no character are decoded to


class Asker:
    """Lays out what is asked, within the target's positions. Raises ValueError where answers would leave no room for a prompt.

    ends: the tokens that end an answer: the tokenizer's, those of the target's generation settings, the chat template's.
    """

    def __init__(self, tokenizer: Any, target: Path, positions: int, settings: Regenerate, key: str) -> None:
        room = positions - settings.new_tokens
        if room < 1:
            raise ValueError(
                f"{key}.new_tokens: {settings.new_tokens} leave no room for a prompt in the target's {positions} positions; "
                "lower it"
            )
        if settings.longest_prompt is not None and settings.longest_prompt > room:
            raise ValueError(
                f"{key}.longest_prompt: {settings.longest_prompt} and {settings.new_tokens} new tokens do not fit the target's "
                f"{positions} positions; {room} is the most"
            )
        self.longest = settings.longest_prompt or room
        self.tokenizer, self._encoder = tokenizer, Encoder(tokenizer)
        self.ends = ends_of(tokenizer, target, self._encoder)
        names = [name for name in special_names(tokenizer) if name not in REASONING]
        self._special = dict(zip(tokenizer.convert_tokens_to_ids(names), names, strict=True))
        template, special = self._encoder.template.template, self._encoder.special
        self._in_channels = all(mark in template and mark in special for mark in HEAD + BETWEEN)

    def prompts(self, conversations: Sequence[Conversation]) -> list[list[int] | None]:
        """The token ids of each one's next question; None where it cannot be asked, which ends the conversation."""
        found: list[list[int] | None] = []
        for each, made in zip(conversations, self._encoder.requests([each.asked for each in conversations]), strict=True):
            found.append(None)
            if isinstance(made, LayoutError):
                each.refuse(str(made))
            elif len(made) > self.longest:
                each.refuse(f"a prompt of more than {self.longest} tokens")
            else:
                found[-1] = made
                each.opened = opened_at_end(self.tokenizer.decode(made[-OPENER_TOKENS:]))
        return found

    def first_lengths(self, conversations: Sequence[Conversation]) -> dict[Key, int]:
        """The tokens of each first question; those that cannot be asked end, and are left out."""
        lengths: dict[Key, int] = {}
        for start in range(0, len(conversations), TOGETHER):
            some = conversations[start : start + TOGETHER]
            prompts = zip(some, self.prompts(some), strict=True)
            lengths |= {each.key: len(prompt) for each, prompt in prompts if prompt is not None}
        return lengths

    def sent_length(self, chat: Chat) -> int:
        """The tokens that a server of the target makes of a conversation. Raises LayoutError when the template refuses it."""
        return len(self._encoder.as_sent(chat))

    def answer(self, tokens: list[int]) -> Answer:
        """The answer that these tokens are. Its last character may be torn: half of one is what a limit of tokens may leave."""
        ended = tokens[-1] in self.ends
        said = tokens[:-1] if ended else tokens
        if self._in_channels:
            text, thought, fault = read_channels(said, self._special, self._decode)
        else:
            control = next((self._special[token] for token in said if token in self._special), None)
            text, thought = self._decode(said), ""
            fault = f"the answer holds the special token {control}" if control is not None else ""
        if not fault and (TORN in text.rstrip(TORN) or TORN in thought):
            fault = "the answer holds bytes that are no text"
        return Answer(text, len(tokens), cut=not ended, fault=fault, thought=thought)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def ends_of(tokenizer: Any, target: Path, encoder: Encoder) -> Collection[int]:
    """The tokens that end an answer. Raises ValueError for a chat template that lays out no answer."""
    told: Any = None
    for name in ("config.json", "generation_config.json"):  # the second one's word counts
        if (target / name).is_file():
            told = read_json_object(target / name).get("eos_token_id", told)
    try:
        marker = encoder.template.end_of_answer()
    except LayoutError as error:
        raise ValueError(f"{target}: {error}; this target answers no questions") from error
    special = set(tokenizer.convert_tokens_to_ids(list(encoder.special)))
    closing = [token for token in tokenizer(marker, add_special_tokens=False)["input_ids"] if token in special]
    return frozenset({tokenizer.eos_token_id, *(told if isinstance(told, list) else [told]), *closing[:1]} - {None})


def read_channels(tokens: list[int], special: dict[int, str], decode: Callable[[list[int]], str]) -> tuple[str, str, str]:
    """An answer read: its text, the thought before it, and the fault that makes it no answer; each empty where there is none.

    tokens: those of an answer, less the one that ends it; one that ends within its thought says nothing. special: the names of
    special tokens.
    """
    names: list[str] = []
    runs: list[list[int]] = [[]]  # the tokens between them
    for token in tokens:
        if token in special:
            names.append(special[token])
            runs.append([])
        else:
            runs[-1].append(token)
    texts = [decode(run) for run in runs]
    if names == HEAD and texts[:2] == ["", "final"]:
        return texts[2], "", ""
    thought = texts[2] if len(texts) > 2 else ""
    whole, words = HEAD + BETWEEN + HEAD, ["", "analysis", thought, "", "assistant", "final"]
    if names == whole and texts[:6] == words:
        return texts[6], thought, ""
    is_torn = names == whole[: len(names)] and texts[:-1] == words[: len(names)]
    return "", thought, "" if is_torn and len(names) < 6 and words[len(names)].startswith(texts[-1]) else OTHER
