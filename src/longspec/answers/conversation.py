"""A conversation that is answered anew, turn by turn. No torch."""

import hashlib
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from longspec.answers.settings import DROP
from longspec.data.layout_tally import CUT_BY_LIMIT
from longspec.data.read.record_checks import Marks, RecordError, check_characters, check_text, closes_one, opened_at_start
from longspec.data.read.records import ANSWER_IDS, Chat, Text, to_messages_or_text

Messages = list[dict[str, Any]]
FILES = ("train", "held_out")  # of the raw records
Key = tuple[str, int]  # one of FILES, and the line in it, from 1

ANSWERED = "answered"  # every turn
SHORTENED = "shortened"  # the first turns alone: the next one could not be asked, or its answer could not be kept
CUT = "cut"  # its last answer was cut by the limit of new tokens, and kept
DROPPED = "dropped"  # no answer could be kept
SKIPPED = "skipped"  # no question was asked
FAILED = "failed"  # the engine gave no answer
ENDS = (ANSWERED, SHORTENED, CUT, DROPPED, SKIPPED, FAILED)
TAKEN = (ANSWERED, SHORTENED, CUT)  # those that have an answer
OPEN_THOUGHT = "ends inside its thought, behind which a template lays out no answer"
THOUGHT_LEFT_OUT = "a turn behind an answer with a thought, which templates leave out of what they show of earlier turns"
TOOLS_OFFERED = "a turn behind an answer to which tools were offered: what tools said belongs to the old answers"
SEEDS = 2**31  # what all servers take


@dataclass(frozen=True)
class Answer:
    """An answer of the target: its text, its tokens, whether the limit of new tokens ended it, and its fault, if any.

    thought: what it thought before, where that comes apart from the text. ids: its tokens, the end token included, where the
    engine says them.
    """

    text: str
    tokens: int
    cut: bool
    fault: str = ""
    thought: str = ""
    ids: tuple[int, ...] | None = None


class Conversation:
    """One record on its way: `history` has what is said so far, `end` is one of ENDS as soon as nothing is left to ask."""

    def __init__(self, key: Key, record: dict[str, Any], cut: str) -> None:
        """cut: whether an answer that the limit ended is kept. Raises RecordError for a record in no known format."""
        self.key, self._cut = key, cut
        self.history: Messages = []
        self.opened: Marks | None = None  # those of the thought in which the next answer begins, since its prompt has opened it
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
        """Return what the target is to continue: all messages so far, the record's tools and template arguments."""
        return replace(self._chat, messages=self.history)

    def seed(self, seed: int) -> int:
        """Return the seed of the next answer: by the settings' seed, record and turn alone, whoever is answered beside it."""
        name = repr((seed, self.key, self.answers)).encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") % SEEDS

    def _go_on(self) -> None:
        """To the next turn that is answered; what stands behind the last one stays as it is."""
        while self._left and self._left[0]["role"] != "assistant":
            self.history.append(self._left.popleft())
        if not self._left:
            self.end = ANSWERED

    def take(self, answer: Answer) -> None:
        """Go on with the answer to the last question. A conversation ends with an answer that is torn or no text."""
        self.tokens += answer.tokens
        text = answer.text.rstrip("\ufffd") if answer.cut else answer.text  # half a character at a torn end is no text
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
        self.ids.append(answer.ids if text == answer.text else None)
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
        """End where the next question cannot be asked."""
        self._stop(reason, SKIPPED)

    def fail(self, reason: str) -> None:
        """End without the engine's answer; the record counts as failed, whatever was answered before."""
        self.end, self.reason = FAILED, reason

    def _stop(self, reason: str, without: str) -> None:
        """End with the last answer. without: what it is called where there is none."""
        while self.history and self.history[-1]["role"] != "assistant":
            self.history.pop()
        self.end, self.reason = SHORTENED if self.answers else without, reason

    def line(self) -> dict[str, Any]:
        """Return the record as it stands in the journal."""
        line: dict[str, Any] = {"record": list(self.key), "end": self.end}
        line |= {"reason": self.reason, "answers": self.answers, "tokens": self.tokens}
        if self.end not in TAKEN:
            return line
        known = [list(ids) for ids in self.ids if ids is not None]
        beside: dict[str, Any] = {"tools": self._chat.tools, "chat_template_kwargs": self._chat.template_arguments}
        beside[ANSWER_IDS] = known if len(known) == self.answers else None
        return line | {"messages": self.history} | {name: value for name, value in beside.items() if value}


def _to_answer(record: dict[str, Any]) -> Chat | str:
    """Return the conversation of a record, or why nobody can answer it anew. Raises RecordError."""
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
    """Return the reason why a text with the thought before it can be no answer of a record; empty for none."""
    try:
        check_text(text, "it")
        check_characters(thought, "it")
    except RecordError as error:
        return f"the answer {error.reason}"
    return ""
