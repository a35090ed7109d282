"""A conversation that is answered anew, turn by turn, and the layout of its questions for the target. No torch."""

import hashlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from longspec.answers.settings import DROP, ENDPOINT, LOCAL, Regenerate, room_for_prompts
from longspec.atomic_files import read_json
from longspec.data.chat.chat_template import end_of
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import REASONING, LayoutError, special_names
from longspec.data.layout_tally import CUT_BY_LIMIT
from longspec.data.read.record_checks import (
    Marks,
    RecordError,
    check_characters,
    check_text,
    closes_one,
    opened_at_end,
    opened_at_start,
)
from longspec.data.read.records import ANSWER_IDS, Chat, Text, to_messages_or_text

Messages = list[dict[str, Any]]
FILES = ("train", "held_out")  # of the raw records
Key = tuple[str, int]  # one of FILES, and the line in it, from 1

ANSWERED = "answered"  # every turn
SHORTENED = "shortened"  # the first turns alone: the next could not be asked, or its answer could not be kept
CUT = "cut"  # its last answer was cut by the limit of new tokens, and kept
DROPPED = "dropped"  # no answer could be kept
SKIPPED = "skipped"  # no question was asked
FAILED = "failed"  # the engine gave no answer
ENDS = (ANSWERED, SHORTENED, CUT, DROPPED, SKIPPED, FAILED)
TAKEN = (ANSWERED, SHORTENED, CUT)  # those that have an answer
OPEN_THOUGHT = "ends inside its thought, behind which a template lays out no answer"
THOUGHT_LEFT_OUT = "a turn behind an answer with a thought, which templates leave out of what they show of earlier turns"
TOOLS_OFFERED = "a turn behind an answer to which tools were offered: what tools said belongs to the old answers"
SEEDS = 2**31  # all servers take seeds below it
TOGETHER = 1024  # questions whose tokens are in memory at a time
OPENER_TOKENS = 8  # more than a mark such as <think> and a line's end have in any vocabulary
CHANNELS = ("<|channel|>", "<|message|>")  # between them harmony's chat template (GPT-OSS) lays out thoughts and answers
HOLDS = "the answer holds the special token"
TORN = "\ufffd"  # decoded from bytes that are no character


@dataclass(frozen=True)
class Answer:
    """Hold an answer of the target: its text, number of tokens, whether the limit of new tokens cut it, and its fault, if any.

    thought: the thought before it, if it comes apart from the text. ids: its tokens and the end token, if the engine returns
    them.
    """

    text: str
    tokens: int
    cut: bool
    fault: str = ""
    thought: str = ""
    ids: tuple[int, ...] | None = None


class Conversation:
    """Hold one record on its way: `history` is what is said so far, `end` one of ENDS once nothing is left to ask."""

    def __init__(self, key: Key, record: dict[str, Any], cut: str) -> None:
        """Take a record. cut: KEEP or DROP answers that the limit ended. Raises RecordError for one in no known format."""
        self.key, self._cut = key, cut
        self.history: Messages = []
        self.opened: Marks | None = None  # marks of the thought that the next answer's prompt has opened
        self.end, self.reason, self.answers, self.tokens = "", "", 0, 0
        self.ids: list[tuple[int, ...] | None] = []  # of each answer
        self._left: deque[dict[str, Any]] = deque()
        self._chat = Chat([])
        chat = _to_answer(record)
        if isinstance(chat, str):
            self.refuse(chat)
        else:
            self._chat, self._left = replace(chat, messages=[]), deque(chat.messages)
            self.turns = 1 if chat.tools else sum(message["role"] == "assistant" for message in chat.messages)
            self._go_on()

    @property
    def asked(self) -> Chat:
        """Return what the target continues: all messages so far, with the record's tools and template arguments."""
        return replace(self._chat, messages=self.history)

    def offer(self, tools: list[dict[str, Any]]) -> None:
        """Replace the record's tools by other words for them, as a server lays them out."""
        self._chat = replace(self._chat, tools=tools)

    def seed(self, seed: int) -> int:
        """Return the next answer's seed, from the settings' seed, record and turn alone; other rows do not change it."""
        name = repr((seed, self.key, self.answers)).encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % SEEDS

    def _go_on(self) -> None:
        """Take over messages up to the next turn to answer; those behind the last answer stay as they are."""
        while self._left and self._left[0]["role"] != "assistant":
            self.history.append(self._left.popleft())
        if not self._left:
            self.end = ANSWERED

    def take(self, answer: Answer) -> None:
        """Take the answer to the last question and go on. An answer that is torn or no text ends the conversation."""
        self.tokens += answer.tokens
        text = answer.text.rstrip("\ufffd") if answer.cut else answer.text  # half a character at the cut is no text
        fault = answer.fault or _fault(text, answer.thought)
        if not answer.fault and self._thinks_on(text, answer.thought):
            fault = OPEN_THOUGHT
        if answer.cut and self._cut == DROP:
            fault = CUT_BY_LIMIT
        if fault:
            self._stop(fault, DROPPED)
            return
        self._left.popleft()
        thought = {"reasoning_content": answer.thought} if answer.thought else {}
        self.history.append({"role": "assistant", "content": text, **thought})
        self.answers += 1
        self.ids.append(answer.ids)
        if answer.cut:
            self.end, self.reason = CUT, CUT_BY_LIMIT
        elif self._chat.tools and self._left:
            self._stop(TOOLS_OFFERED, DROPPED)
        elif (thought or closes_one(text)) and any(message["role"] == "assistant" for message in self._left):
            self._stop(THOUGHT_LEFT_OUT, DROPPED)
        else:
            self._go_on()

    def _thinks_on(self, text: str, thought: str) -> bool:
        """Tell whether an answer ends before its thought does."""
        if thought:
            return not text.strip()
        opened = self.opened or opened_at_start(text)
        return opened is not None and opened.closer not in text

    def refuse(self, reason: str) -> None:
        """End, since the next question cannot be asked."""
        self._stop(reason, SKIPPED)

    def fail(self, reason: str) -> None:
        """End, since the engine gave no answer; the record counts as failed, whatever was answered before."""
        self.end, self.reason = FAILED, reason

    def _stop(self, reason: str, without: str) -> None:
        """End with the last answer. without: the `end` of a conversation that has none."""
        while self.history and self.history[-1]["role"] != "assistant":
            self.history.pop()
        self.end, self.reason = SHORTENED if self.answers else without, reason

    def line(self) -> dict[str, Any]:
        """Return the record's line in the journal."""
        line: dict[str, Any] = {"record": list(self.key), "end": self.end}
        line |= {"reason": self.reason, "answers": self.answers, "tokens": self.tokens}
        if self.end not in TAKEN:
            return line
        known = [list(ids) for ids in self.ids if ids is not None]
        beside: dict[str, Any] = {"tools": self._chat.tools, "chat_template_kwargs": self._chat.template_arguments}
        beside[ANSWER_IDS] = known if len(known) == self.answers else None
        return line | {"messages": self.history} | {name: value for name, value in beside.items() if value}


def _to_answer(record: dict[str, Any]) -> Chat | str:
    """Return the conversation of a record, or the reason why it cannot be answered anew. Raises RecordError."""
    document = to_messages_or_text(record, unanswered=True)
    if isinstance(document, Text):
        return "running text, which asks nothing"
    messages: Messages = list(document.messages)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        messages.append({"role": "assistant", "content": ""})  # a place for the answer to questions alone
    calls = "tool" in roles or any(message.get("tool_calls") for message in messages)
    if calls and not document.tools:
        return "calls of tools that the record does not offer"
    if any(pair == ("assistant", "assistant") for pair in pairwise(roles)):
        return "two answers in a row"
    return replace(document, messages=messages)


def _fault(text: str, thought: str) -> str:
    """Return the reason why a text and the thought before it cannot be an answer; "" if they can."""
    try:
        check_text(text, "it")
        check_characters(thought, "it")
    except RecordError as error:
        return f"the answer {error.reason}"
    return ""


class Asker:
    """Lay out questions within the target's positions, and read answers.

    ends: the tokens that end an answer, of the tokenizer, the target's generation settings and the chat template. Raises
    ValueError if answers leave no room for a prompt, and for a target whose answers only a server can read.
    """

    def __init__(self, tokenizer: Any, target: Path, positions: int, settings: Regenerate, key: str) -> None:
        room = room_for_prompts(settings, positions, key)
        self.target, self.settings = target, settings
        self.longest = settings.longest_prompt or room
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer)
        self.tokens = 1 + self.encoder.highest
        self.ends = ends_of(tokenizer, target, self.encoder)
        names = [name for name in special_names(tokenizer) if name not in REASONING]
        self._special = dict(zip(tokenizer.convert_tokens_to_ids(names), names, strict=True))
        template, special = self.encoder.template.template, self.encoder.special
        if settings.engine == LOCAL and all(mark in template and mark in special for mark in CHANNELS):
            raise ValueError(
                f"{key}.engine: {LOCAL} does not read answers in channels ({', '.join(CHANNELS)}), in which this target writes "
                f"thoughts; set {ENDPOINT}: a server takes them apart"
            )

    def prompts(self, conversations: Sequence[Conversation]) -> list[list[int] | None]:
        """Return the token ids of each one's next question; None where it cannot be asked, which ends that conversation."""
        found: list[list[int] | None] = []
        for each, made in zip(conversations, self.encoder.requests([each.asked for each in conversations]), strict=True):
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
        """Return the number of tokens of each first question; conversations that cannot be asked end, and are left out."""
        lengths: dict[Key, int] = {}
        for start in range(0, len(conversations), TOGETHER):
            some = conversations[start : start + TOGETHER]
            prompts = zip(some, self.prompts(some), strict=True)
            lengths |= {each.key: len(prompt) for each, prompt in prompts if prompt is not None}
        return lengths

    def without_control(self, answer: Answer) -> Answer:
        """Return a server's answer, with a fault if it spells a special token, and without ids that are not its own."""
        control = next((name for name in self._special.values() if name in answer.text or name in answer.thought), None)
        if control is not None and not answer.fault:
            return replace(answer, fault=f"{HOLDS} {control}")
        return answer if answer.ids is None or self._are_of(answer, answer.ids) else replace(answer, ids=None)

    def _are_of(self, answer: Answer, ids: tuple[int, ...]) -> bool:
        """Tell whether a server's answer has these tokens: they end as it does, and decode to its thought and text."""
        if not ids or max(ids) >= self.tokens or (ids[-1] in self.ends) == answer.cut:
            return False
        said = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return answer.text.strip() in said and answer.thought.strip() in said

    def answer(self, tokens: list[int]) -> Answer:
        """Return the answer that these tokens spell. A limit of tokens may have torn its last character."""
        ended = tokens[-1] in self.ends
        said = tokens[:-1] if ended else tokens
        text = str(self.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        control = next((self._special[token] for token in said if token in self._special), None)
        fault = f"{HOLDS} {control}" if control is not None else ""
        if max(tokens) >= self.tokens:  # a padding row of the target's embedding
            fault = "the answer holds a token that the tokenizer does not know"
        if not fault and TORN in text.rstrip(TORN):
            fault = "the answer holds bytes that are no text"
        return Answer(text, len(tokens), cut=not ended, fault=fault, ids=tuple(tokens))


def hashes_of(raw: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of a raw manifest's record files; nothing else of it decides what is answered."""
    return {name: raw["files"][f"{name}.jsonl"]["sha256"] for name in FILES}


def ends_of(tokenizer: Any, target: Path, encoder: Encoder) -> Collection[int]:
    """Return the tokens that end an answer. Raises ValueError if the chat template lays out no answer."""
    eos: Any = None
    for name in ("config.json", "generation_config.json"):  # the second one wins
        if (target / name).is_file():
            eos = read_json(target / name).get("eos_token_id", eos)
    try:
        marker, _ = end_of(encoder.template)
    except LayoutError as error:
        raise ValueError(f"{target}: {error}; this target answers no questions") from error
    special = set(tokenizer.convert_tokens_to_ids(list(encoder.special)))
    closing = [token for token in tokenizer(marker, add_special_tokens=False)["input_ids"] if token in special]
    return frozenset({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos]), *closing[:1]} - {None})
