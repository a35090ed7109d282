"""Questions to a target as its chat template lays them out, and its tokens as the text of an answer. No torch."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspec.answers.conversation import Answer, Conversation, Key
from longspec.answers.settings import ENDPOINT, LOCAL, Regenerate, room_for_prompts
from longspec.atomic_files import read_json_object
from longspec.data.chat.chat_template import end_of
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import REASONING, LayoutError, special_names
from longspec.data.read.record_checks import opened_at_end

TOGETHER = 1024  # questions whose tokens are held in memory at a time
OPENER_TOKENS = 8  # more than a mark such as <think> and a line's end have in any vocabulary
CHANNELS = ("<|channel|>", "<|message|>")  # in which harmony's chat template (GPT-OSS) lays out thoughts and what is said
HOLDS = "the answer holds the special token"
TORN = "\ufffd"  # what bytes that are no character are decoded to


class Asker:
    """Lays out what is asked, within the target's positions. Raises ValueError where answers would leave no room for a prompt,
    and for answers that can be read by a server alone.

    ends: the tokens that end an answer: the tokenizer's, those of the target's generation settings, the chat template's.
    """

    def __init__(self, tokenizer: Any, target: Path, positions: int, settings: Regenerate, key: str) -> None:
        room = room_for_prompts(settings, positions, key)
        self.longest = settings.longest_prompt or room
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer)
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
        """Return the token ids of each one's next question; None where it cannot be asked, which ends the conversation."""
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
        """Return the tokens of each first question; those that cannot be asked end, and are left out."""
        lengths: dict[Key, int] = {}
        for start in range(0, len(conversations), TOGETHER):
            some = conversations[start : start + TOGETHER]
            prompts = zip(some, self.prompts(some), strict=True)
            lengths |= {each.key: len(prompt) for each, prompt in prompts if prompt is not None}
        return lengths

    def without_control(self, answer: Answer) -> Answer:
        """Return a server's answer: with a fault where it spells a special token, without tokens that are not its own."""
        control = next((name for name in self._special.values() if name in answer.text or name in answer.thought), None)
        if control is not None and not answer.fault:
            return replace(answer, fault=f"{HOLDS} {control}")
        return answer if answer.ids is None or self._are_of(answer, answer.ids) else replace(answer, ids=None)

    def _are_of(self, answer: Answer, ids: tuple[int, ...]) -> bool:
        """Tell whether a server's answer has these tokens: they end as it does and decode to its thought and text."""
        if not ids or max(ids) >= len(self.tokenizer) or (ids[-1] in self.ends) == answer.cut:
            return False
        said = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return answer.text.strip() in said and answer.thought.strip() in said

    def answer(self, tokens: list[int]) -> Answer:
        """Return the answer that these tokens are. Its last character may be torn, where a limit of tokens has cut it."""
        ended = tokens[-1] in self.ends
        said = tokens[:-1] if ended else tokens
        text = str(self.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        control = next((self._special[token] for token in said if token in self._special), None)
        fault = f"{HOLDS} {control}" if control is not None else ""
        if not fault and TORN in text.rstrip(TORN):
            fault = "the answer holds bytes that are no text"
        return Answer(text, len(tokens), cut=not ended, fault=fault, ids=tuple(tokens))


def ends_of(tokenizer: Any, target: Path, encoder: Encoder) -> Collection[int]:
    """Return the tokens that end an answer. Raises ValueError for a chat template that lays out no answer."""
    eos: Any = None
    for name in ("config.json", "generation_config.json"):  # the second one's word counts
        if (target / name).is_file():
            eos = read_json_object(target / name).get("eos_token_id", eos)
    try:
        marker, _ = end_of(encoder.template)
    except LayoutError as error:
        raise ValueError(f"{target}: {error}; this target answers no questions") from error
    special = set(tokenizer.convert_tokens_to_ids(list(encoder.special)))
    closing = [token for token in tokenizer(marker, add_special_tokens=False)["input_ids"] if token in special]
    return frozenset({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos]), *closing[:1]} - {None})
