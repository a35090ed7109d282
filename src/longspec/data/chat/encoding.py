"""Records as token ids and answer masks: the mask comes from places in the text, and is verified by decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspec.data.chat import special_tokens, windows
from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.segments import Plan, cut_at_answers, plan, request, request_for
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.chat.verification import verified
from longspec.data.read.conversations import Chat


@dataclass(frozen=True)
class Encoded:
    """One document: token ids int32 [n], closed with eos, and uint8 [n], 1 on what is an answer."""

    ids: NDArray[np.int32]
    answer_mask: NDArray[np.uint8]
    as_served: bool = True  # of a conversation, see longspec.data.chat.chat_template
    shortened: int = 0
    left_out: int = 0


def _refusal(encodings: list[Any]) -> LayoutError | None:
    """The LayoutError in place of the first piece that could not be tokenized; None where there is none."""
    return next((encoding for encoding in encodings if isinstance(encoding, LayoutError)), None)


def _ids(encodings: list[Any]) -> list[int]:
    """The token ids of a document's pieces in a row."""
    if len(encodings) == 1:
        return encodings[0].ids
    return [token for encoding in encodings for token in encoding.ids]


def by_record(plans: list[Plan | LayoutError], documents: list[Encoded | LayoutError]) -> list[list[Encoded] | LayoutError]:
    """The documents of each record; the LayoutError of one document stands for its whole record."""
    records: list[list[Encoded] | LayoutError] = []
    whole: list[Encoded] = []
    fault: LayoutError | None = None
    for made, document in zip(plans, documents, strict=True):
        if isinstance(document, LayoutError):
            fault = fault or document
        else:
            whole.append(document)
        if isinstance(made, LayoutError) or made.closes_record:
            records.append(fault or whole)
            whole, fault = [], None
    return records


class Encoder:
    """A tokenizer with what is asked of it again and again. One thread may `run` while another does the rest."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate.of(tokenizer)
        self.special = special_tokens.special_names(tokenizer)
        self.eos = int(tokenizer.eos_token_id)
        self._special_ids = set(tokenizer.convert_tokens_to_ids(list(self.special)))
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._lock = Lock()  # whether names of special tokens are text is a setting of the backend

    def plan(self, records: list[dict[str, Any]]) -> list[Plan | LayoutError]:
        """The plans of each record's documents, or why its conversation cannot be laid out. Raises RecordError."""
        plans: list[Plan | LayoutError] = []
        for record in records:
            try:
                plans += plan(record, self.template, self.special)
            except LayoutError as error:
                plans.append(error)
        return plans

    def run(self, plans: Sequence[Plan | LayoutError]) -> list[list[Any]]:
        """The backend's encodings of each plan's pieces, on all of its threads; none for a LayoutError.

        Character offsets take time and are made only where a mask needs them. A piece that is too long for the backend to
        take whole has windows.Tokens for its encoding, or the LayoutError that says why it has none.
        """
        encodings: list[list[Any]] = [[None] * (len(made.pieces) if isinstance(made, Plan) else 0) for made in plans]
        chosen: dict[tuple[bool, bool, bool], list[tuple[int, int, str]]] = {}
        for i, made in enumerate(plans):
            for j, piece in enumerate(made.pieces if isinstance(made, Plan) else []):
                key = piece.literal, piece.opens, made.answers is not None  # type: ignore[union-attr]
                chosen.setdefault(key, []).append((i, j, piece.text))
        with self._lock:
            for (as_text, opens, offsets), those in sorted(chosen.items()):
                pieces = [piece for piece in those if len(piece[2]) <= windows.WINDOW]
                encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
                self._backend.encode_special_tokens = as_text
                made_now = encode([text for _, _, text in pieces], add_special_tokens=opens)
                for (i, j, _), encoding in zip(pieces, made_now, strict=True):
                    encodings[i][j] = encoding
                for i, j, text in (piece for piece in those if len(piece[2]) > windows.WINDOW):
                    encodings[i][j] = self._long(text, opens)
            self._backend.encode_special_tokens = False
        return encodings

    def _long(self, text: str, opens: bool) -> windows.Tokens | LayoutError:
        """The tokens of a long piece."""
        try:
            tokens = windows.tokenize(lambda stretch: self._backend.encode(stretch, add_special_tokens=False), text)
        except LayoutError as error:
            return error
        return windows.framed(tokens, self._backend.encode("x"), len(text)) if opens else tokens

    def finish(self, plans: list[Plan | LayoutError], encodings: list[list[Any]]) -> list[Encoded | LayoutError]:
        """The documents of plans that were run; a LayoutError stays one."""
        results: list[Encoded | LayoutError] = []
        for made, parts in zip(plans, encodings, strict=True):
            refusal = made if isinstance(made, LayoutError) else _refusal(parts)
            if refusal is not None:
                results.append(refusal)
            elif made.answers is None:  # type: ignore[union-attr]
                results.append(self._close(_ids(parts), None, made))  # type: ignore[arg-type]
            else:
                results.append(LayoutError("its tokens do not decode to its answers"))
        masked = [
            i
            for i, made in enumerate(plans)
            if isinstance(made, Plan) and made.answers is not None and _refusal(encodings[i]) is None
        ]
        again = self._mask(masked, [plans[i] for i in masked], [encodings[i] for i in masked], results)  # type: ignore[misc]
        # A token reaches over an answer's edge there, so the text is cut: when served the request ends there, and the model
        # never writes such a token. All others are tokenized in one piece, as the template's text is when served.
        cut = {i: cut_at_answers(plans[i]) for i in again}  # type: ignore[arg-type]
        made_anew = zip(cut, self.run(list(cut.values())), strict=True)
        whole = {i: parts for i, parts in made_anew if _refusal(parts) is None}
        self._mask(list(whole), [cut[i] for i in whole], list(whole.values()), results)
        return results

    def encode(self, plans: list[Plan | LayoutError]) -> list[Encoded | LayoutError]:
        """The documents of several plans at once."""
        return self.finish(plans, self.run(plans))

    def prompt(self, text: str, *, chat: bool) -> list[int]:
        """The token ids of a prompt, laid out by the chat template or as it is. Raises LayoutError."""
        return self._ids_of(request(text, self.template if chat else None, self.special))

    def as_sent(self, chat: Chat) -> list[int]:
        """The token ids that a server of the target makes of a conversation which it is sent as messages. Raises LayoutError.

        Names of special tokens that somebody typed are tokens to it, and where the template tells the day it tells today's.
        """
        return self._ids_of(request_for(chat, self.template.of_today(), ()))

    def _ids_of(self, made: Plan) -> list[int]:
        [encodings] = self.run([made])
        refusal = _refusal(encodings)
        if refusal is not None:
            raise refusal
        return _ids(encodings)

    def requests(self, conversations: Sequence[Chat]) -> list[list[int] | LayoutError]:
        """The token ids with which the target is asked to go on with each conversation; a LayoutError where that is refused."""
        plans: list[Plan | LayoutError] = []
        for chat in conversations:
            try:
                plans.append(request_for(chat, self.template, self.special))
            except LayoutError as error:
                plans.append(error)
        made = zip(plans, self.run(plans), strict=True)
        refused = [(parts, plan if isinstance(plan, LayoutError) else _refusal(parts)) for plan, parts in made]
        return [_ids(parts) if refusal is None else refusal for parts, refusal in refused]

    def _mask(
        self, places: list[int], plans: list[Plan], encodings: list[list[Any]], results: list[Encoded | LayoutError]
    ) -> list[int]:
        """Put documents of which only answers are trained into their places; those where decoding finds another text."""
        ids = [_ids(parts) for parts in encodings]
        found = verified(self.tokenizer, plans, encodings, ids)
        for i, made, tokens, ranges in zip(places, plans, ids, found, strict=True):
            if ranges is not None:
                results[i] = self._close(tokens, ranges, made)
        return [i for i, ranges in zip(places, found, strict=True) if ranges is None]

    def _close(self, tokens: list[int], ranges: list[tuple[int, int]] | None, made: Plan) -> Encoded:
        """The document closed with eos; `ranges`: the tokens of its answers, None for all."""
        last, at = (tokens[-1], len(tokens) - 1) if tokens else (None, 0)
        if last != self.eos:
            tokens.append(self.eos)
        mask = np.zeros(len(tokens), dtype=np.uint8) if ranges is not None else np.ones(len(tokens), dtype=np.uint8)
        for start, end in ranges or []:
            mask[start:end] = 1
        if ranges is not None and last != self.eos:
            # A document learns to end, but not a second time after an answer's own end token, nor after a question.
            mask[-1] = mask[at] and last not in self._special_ids
        return Encoded(np.array(tokens, dtype=np.int32), mask, made.as_served, made.shortened, made.left_out)
