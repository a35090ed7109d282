"""Held-out prompts: stretches of held-out records, of a length drawn per prompt, or whole questions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longspec import jsonl
from longspec.atomic_files import read_json
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.records import Chat, to_messages_or_text
from longspec.data.tokenize import encode
from longspec.distributed import log
from longspec.evaluate.tasks import HeldOut, Prompt

# Tokens a record must still hold after a prompt, so that there is something to go on with.
ROOM_AFTER = 16


def draw_prompts(name: str, task: HeldOut, raw_manifest: Path, count: int, tokenizer: Any, seed: int) -> list[Prompt]:
    """`count` prompts of a task, a function of (seed, name) alone.

    Of plain text any stretch is taken, of a conversation its beginning, since a chat does not start in its middle. Raises
    ValueError when no held-out record is long enough.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))
    if task.whole_questions:
        return _draw_questions(name, task, raw_manifest, count, tokenizer, generator)
    path, context = raw_manifest.parent / "held_out.jsonl", task.context
    documents, refused = [], 0
    for line, record in enumerate(jsonl.read(path)):
        try:
            ids_S, answer_mask_S = encode(tokenizer, record)
        except LayoutError:  # the chat template refuses it, as it does in training, where such records are counted too
            refused += 1
            continue
        if len(ids_S) >= context[0] + ROOM_AFTER:
            documents.append((line, ids_S, bool(answer_mask_S.all())))
    _tell_refused(path, refused)
    if not documents:
        raise ValueError(
            f"{path}: no record has {context[0] + ROOM_AFTER} tokens, as evaluation.tasks.{name}.context needs; lower it, "
            f"or hold out more of {read_json(raw_manifest)['name']}"
        )
    order = generator.permutation(len(documents))
    prompts = []
    for number in range(count):
        line, ids_S, is_text = documents[order[number % len(documents)]]
        longest = min(context[1], len(ids_S) - ROOM_AFTER)
        length = int(generator.integers(context[0], longest + 1))
        start = int(generator.integers(0, len(ids_S) - ROOM_AFTER - length + 1)) if is_text else 0
        ids = ids_S[start : start + length].tolist()
        prompts.append(Prompt(name, number, line, ids, task.new_tokens))
    return prompts


def _tell_refused(path: Path, refused: int) -> None:
    if refused:
        log(f"{path}: {refused} held-out records left out: they cannot be laid out")


def _questions(record: dict[str, Any]) -> list[Chat]:
    """The parts of a conversation that end with a question: what the target is given when it is asked. None of other text.

    They have the record's tools and template arguments. Questions behind a thought or a call of a tool are left out.
    """
    document = to_messages_or_text(record, unanswered=True)
    if not isinstance(document, Chat):
        return []
    roles = [message["role"] for message in document.messages] + ["assistant"]  # the answer to the last one
    ends = [end for end in range(1, len(roles)) if roles[end - 1 : end + 1] == ["user", "assistant"]]
    asked = [replace(document, messages=document.messages[:end]) for end in ends]
    return [chat for chat in asked if Chat(chat.messages).is_plain]


def _draw_questions(
    name: str, task: HeldOut, raw_manifest: Path, count: int, tokenizer: Any, generator: np.random.Generator
) -> list[Prompt]:
    """`count` whole questions, each of another record; of fewer records that have one of the length asked for, all."""
    path, encoder = raw_manifest.parent / "held_out.jsonl", Encoder(tokenizer)
    candidates, refused = [], []
    for line, record in enumerate(jsonl.read(path)):
        asked = encoder.requests(_questions(record))
        if asked and all(isinstance(ids, LayoutError) for ids in asked):
            refused.append(str(asked[0]))
        fitting = [ids for ids in asked if not isinstance(ids, LayoutError) and task.context[0] <= len(ids) <= task.context[1]]
        if fitting:
            candidates.append((line, fitting))
    _tell_refused(path, len(refused))
    if not candidates and refused:
        raise ValueError(f"{path}: {len(refused)} records hold no question that can be asked whole, such as: {refused[0]}")
    if not candidates:
        raise ValueError(
            f"{path}: no question has {task.context[0]} to {task.context[1]} tokens, as evaluation.tasks.{name}.context asks; "
            f"widen it, or hold out more of {read_json(raw_manifest)['name']}"
        )
    if len(candidates) < count:
        log(f"{name}: {len(candidates)} questions of this length, fewer than the {count} prompts asked for; all are taken")
    prompts = []
    for number, place in enumerate(generator.permutation(len(candidates))[:count]):
        line, fitting = candidates[place]
        ids = fitting[int(generator.integers(len(fitting)))]
        prompts.append(Prompt(name, number, line, ids, task.new_tokens))
    return prompts
