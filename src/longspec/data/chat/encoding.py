"""Records as token ids and answer masks. A mask comes from places in the text, and decoding verifies it."""

import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspec.atomic_files import checked_manifest
from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.layout import cut_at_answers, plan, request
from longspec.data.chat.special_tokens import LayoutError, Piece, Plan, special_names
from longspec.data.read.record_checks import RecordError
from longspec.data.read.records import ANSWER_IDS, Chat
from longspec.draft_vocabulary import tokenizer_hash

BEFORE = 16  # tokens before an answer that are decoded with it, since decoding may depend on them


def _token_at(pieces: list[Piece], encodings: list[Any], place: int) -> int:
    """Return the first token that begins at a character or behind it."""
    before = 0
    for piece, encoding in zip(pieces, encodings, strict=True):
        local = place - piece.start
        if local <= 0:
            return before
        # A tokenizer may give no position for white space; then the next character counts.
        for probe in range(local, len(piece.text)):
            token = encoding.char_to_token(probe)
            if token is not None:
                return before + token + (encoding.token_to_chars(token)[0] < local)
        before += len(encoding)
    return before


def _is_same(expected: str, decoded: str) -> bool:
    """Tell whether two texts are equal as they are, or in the form NFKC, into which some tokenizers bring them.

    Some begin each stretch between special tokens with a space of their own.
    """
    normal = unicodedata.normalize("NFKC", expected)
    forms = (decoded, decoded.removeprefix(" "))
    return expected in forms or any(normal == unicodedata.normalize("NFKC", form) for form in forms)


def verified(
    tokenizer: Any, plans: list[Plan], encodings: list[list[Any]], ids: list[list[int]]
) -> list[list[tuple[int, int]] | None]:
    """Return the tokens [start, end) of each plan's answers; None if they decode to another text.

    They do where a token reaches over an answer's edge.
    """
    found: list[list[tuple[int, int]] | None] = []
    checks: list[tuple[int, str]] = []
    stretches: list[list[int]] = []
    for i, (made, parts) in enumerate(zip(plans, encodings, strict=True)):
        text, spans = made.text, made.answers or []
        edges = [[_token_at(made.pieces, parts, place) for place in span] for span in spans]
        found.append([(start, end) for start, end in edges])
        for (start, end), (first, last) in zip(edges, spans, strict=True):
            checks.append((i, text[first:last]))
            stretches += [ids[i][max(0, start - BEFORE) : place] for place in (start, end)]
    decoded = tokenizer.backend_tokenizer.decode_batch(stretches, skip_special_tokens=False)
    for (i, expected), before, whole in zip(checks, decoded[::2], decoded[1::2], strict=True):
        if not whole.startswith(before) or not _is_same(expected, whole[len(before) :]):
            found[i] = None
    return found


def load_tokenizer(manifest_path: Path) -> tuple[Any, str]:
    """Return a manifest's tokenizer, its files checked, and their hash. Raises ValueError if it is not fast or has no eos."""
    from transformers import AutoTokenizer

    manifest = checked_manifest(manifest_path)
    tokenizer = AutoTokenizer.from_pretrained(manifest["path"], trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ValueError(f"{manifest['path']}: no fast tokenizer (tokenizer.json); convert it with transformers first")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{manifest['path']}: the tokenizer has no eos token; set eos_token in tokenizer_config.json")
    found = tokenizer_hash(manifest["files"])
    assert found is not None, "it was loaded from these files"
    return tokenizer, found


Planned = list[Plan] | LayoutError  # a record's documents, or why it cannot be laid out


@dataclass(frozen=True)
class Encoded:
    """Hold one document: token ids int32 [n], closed with eos, and a mask uint8 [n], 1 on answers."""

    ids: NDArray[np.int32]
    answer_mask: NDArray[np.uint8]
    as_served: bool = True  # of a conversation, see longspec.data.chat.layout
    left_out: int = 0
    said_end: int = 0  # where an answer in the target's own tokens ends


def _ids(encodings: list[Any]) -> list[int]:
    return list(chain.from_iterable(encoding.ids for encoding in encodings))


class Encoder:
    """Hold a tokenizer with what is asked of it again and again."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate.of(tokenizer)
        self.special = special_names(tokenizer)
        self.eos = int(tokenizer.eos_token_id)
        self.highest = max(tokenizer.get_vocab().values())
        self._special_ids = set(tokenizer.convert_tokens_to_ids(list(self.special)))
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._alone = threading.Lock()  # special tokens are a setting of the backend, and requests are laid out in threads

    def plan(self, record: dict[str, Any]) -> Planned:
        """Return the plans of a record's documents, or why its conversation cannot be laid out. Raises RecordError."""
        try:
            plans = plan(record, self.template, self.special)
        except LayoutError as error:
            return error
        highest = max((token for made in plans for token in made.said or ()), default=0)
        if highest > self.highest:
            raise RecordError(ANSWER_IDS, f"{highest} is none of the tokenizer's tokens, which end at {self.highest}")
        return plans

    def _run(self, plans: Sequence[Plan]) -> list[list[Any]]:
        """Return the backend's encodings of each plan's pieces, made on all of its threads.

        Character offsets take time, so they are made only where a mask needs them.
        """
        encodings: list[list[Any]] = [[None] * len(made.pieces) for made in plans]
        chosen: dict[tuple[bool, bool, bool], list[tuple[int, int, str]]] = {}
        for i, made in enumerate(plans):
            for j, piece in enumerate(made.pieces):
                chosen.setdefault((piece.literal, piece.opens, made.answers is not None), []).append((i, j, piece.text))
        with self._alone:
            for (as_text, opens, offsets), those in sorted(chosen.items()):
                encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
                self._backend.encode_special_tokens = as_text
                made_now = encode([text for _, _, text in those], add_special_tokens=opens)
                for (i, j, _), encoding in zip(those, made_now, strict=True):
                    encodings[i][j] = encoding
            self._backend.encode_special_tokens = False
        return encodings

    def encode(self, planned: Sequence[Planned]) -> list[list[Encoded] | LayoutError]:
        """Return the documents of each record; one LayoutError stands for its whole record."""
        plans = [made for each in planned if not isinstance(each, LayoutError) for made in each]
        documents = self._documents(plans)
        # None: a token reaches over an answer's edge, so the text is cut there. When served, the request ends there, and the
        # model never writes such a token. All others are tokenized in one piece, as the template's text is when served.
        again = [i for i, document in enumerate(documents) if document is None]
        for i, document in zip(again, self._documents([cut_at_answers(plans[i]) for i in again]), strict=True):
            documents[i] = document
        left = iter(documents)
        return [each if isinstance(each, LayoutError) else _joined([next(left) for _ in each]) for each in planned]

    def documents(self, record: dict[str, Any]) -> list[Encoded]:
        """Return the documents of one record. Raises RecordError, and LayoutError if its conversation cannot be laid out."""
        [made] = self.encode([self.plan(record)])
        if isinstance(made, LayoutError):
            raise made
        return made

    def prompt(self, text: str, *, chat: bool) -> list[int]:
        """Return a prompt's token ids; chat: as a user's message and the request for an answer. Raises LayoutError."""
        if not chat:
            return self._ids_of(Plan([Piece(text, literal=True, opens=True)], None))
        return self._ids_of(request(Chat([{"role": "user", "content": text}]), self.template, self.special))

    def as_sent(self, chat: Chat) -> list[int]:
        """Return the token ids that a server of the target makes of a conversation sent to it as messages.

        A template that writes the day writes today's. Raises LayoutError, also for names of special tokens that somebody
        typed: a server reads them as tokens.
        """
        today = self.template.of_today()
        sent, meant = (self._ids_of(request(chat, today, special)) for special in ((), self.special))
        if sent != meant:
            raise LayoutError("a message holds the name of a special token, which a server would read as the token itself")
        return sent

    def _ids_of(self, made: Plan) -> list[int]:
        return _ids(self._run([made])[0])

    def requests(self, conversations: Sequence[Chat]) -> list[list[int] | LayoutError]:
        """Return the token ids that ask the target to go on with each conversation; a LayoutError where that is refused."""
        asked: list[Plan | LayoutError] = []
        for chat in conversations:
            try:
                asked.append(request(chat, self.template, self.special))
            except LayoutError as error:
                asked.append(error)
        made = iter(self._run([each for each in asked if isinstance(each, Plan)]))
        return [_ids(next(made)) if isinstance(each, Plan) else each for each in asked]

    def _documents(self, plans: list[Plan]) -> list[Encoded | None]:
        """Return the documents; None for one whose answers decode to another text."""
        encodings = self._run(plans)
        ids = [_ids(parts) for parts in encodings]
        of_each = zip(plans, ids, verified(self.tokenizer, plans, encodings, ids), strict=True)
        return [None if ranges is None else self._close(tokens, ranges, made) for made, tokens, ranges in of_each]

    def _close(self, tokens: list[int], ranges: list[tuple[int, int]], made: Plan) -> Encoded:
        """Return the document closed with eos. ranges: the tokens of the answers in its text."""
        said_end = 0
        if made.said is not None:
            said_end = len(tokens) + len(made.said)
            ranges.append((len(tokens), said_end))
            tokens += made.said
        last, at = (tokens[-1], len(tokens) - 1) if tokens else (None, 0)
        if last != self.eos:
            tokens.append(self.eos)
        mask = np.full(len(tokens), made.answers is None, dtype=np.uint8)
        for start, end in ranges:
            mask[start:end] = 1
        if made.said is not None and last != self.eos:
            mask[-1] = 0  # the target ended it by its own end token, or was cut
        elif made.answers is not None and last != self.eos:
            # A document learns to end, but not again after an answer's own end token, and not after a question.
            mask[-1] = mask[at] and last not in self._special_ids
        return Encoded(np.array(tokens, dtype=np.int32), mask, made.as_served, made.left_out, said_end)


def _joined(documents: list[Encoded | None]) -> list[Encoded] | LayoutError:
    """Return a record's documents; a LayoutError if one of them is missing.

    An answer in the target's own tokens joins the document before it if its request goes on from that one's tokens.
    """
    joined: list[Encoded] = []
    for document in documents:
        if document is None:
            return LayoutError("its tokens do not decode to its answers")
        end = joined[-1].said_end if joined else 0
        if end and np.array_equal(document.ids[:end], joined[-1].ids[:end]):
            mask = document.answer_mask.copy()
            mask[:end] = joined.pop().answer_mask[:end]
            document = replace(document, answer_mask=mask)
        joined.append(document)
    return joined
