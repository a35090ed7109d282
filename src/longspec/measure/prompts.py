"""Make prompts: from a benchmark's file with its template; from held-out records stretches, or whole questions."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longspec import jsonl
from longspec.atomic_files import checked_file
from longspec.data.align.fields import compose, found
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.record_checks import RecordError, check_characters
from longspec.data.read.records import Chat, to_messages_or_text
from longspec.distributed import log
from longspec.measure.prompt_files import files_of, read_records
from longspec.measure.section import AUTO
from longspec.measure.tasks import Benchmark, HeldOut, Prompt, Settings, check_room

# Tokens that a record must still hold after a prompt, so that the text goes on.
ROOM_AFTER = 16


def all_prompts(raw: Mapping[str, Path], section: Settings, tokenizer: Any, positions: int) -> list[Prompt]:
    """Return the prompts of every task. raw: dataset -> manifest of its records. Raises ValueError if one is missing."""
    section.check_raw(raw)
    prompts = []
    for name, task in section.tasks.items():
        if isinstance(task, Benchmark):
            prompts += read_prompts(name, task, section.prompts, tokenizer, section.seed, positions)
            continue
        check_room(name, task, positions)
        prompts += draw_prompts(name, task, raw[task.data], section.prompts, tokenizer, section.seed)
    return prompts


def draw_prompts(name: str, task: HeldOut, raw_manifest: Path, count: int, tokenizer: Any, seed: int) -> list[Prompt]:
    """Draw `count` prompts of a task; they depend on (seed, name) alone.

    From plain text any stretch is taken, from a conversation its beginning. With whole_questions, each prompt is a question
    from another record, so there may be fewer than `count`; AUTO does this for conversations alone. Raises ValueError if no
    held-out record is long enough.
    """
    generator = np.random.default_rng([seed, *name.encode()])
    path, (shortest, longest) = checked_file(raw_manifest, "held_out.jsonl"), task.context
    encoder, refused, whole = Encoder(tokenizer), list[str](), False
    stretches, questions = list[tuple[int, Any]](), list[tuple[int, Any]]()
    for line, record in enumerate(jsonl.read(path)):
        try:
            chat = task.whole_questions == AUTO and isinstance(to_messages_or_text(record, unanswered=True), Chat)
            if whole := task.whole_questions is True or chat:
                fitting = [ids for ids in _questions(encoder, record) if shortest <= len(ids) <= longest]
                questions += [(line, fitting)] if fitting else []
            else:
                made = encoder.documents(record)[-1]
                stretches += [(line, (made.ids, made.answer_mask.all()))] if len(made.ids) >= shortest + ROOM_AFTER else []
        except LayoutError as error:  # the chat template refuses it, as in training, which counts such records too
            refused.append(str(error))
    if refused:
        log(f"{path}: {len(refused)} held-out records left out: they cannot be laid out, such as: {refused[0]}")
    if questions and stretches:
        log(f"{name}: {len(questions)} conversations, of which questions are asked, and {len(stretches)} texts")
    candidates = [*questions, *stretches]
    if not candidates:
        wanted = f"question has {shortest} to {longest}" if whole else f"record has {shortest + ROOM_AFTER}"
        raise ValueError(
            f"{path}: no {wanted} tokens, as evaluation.tasks.{name}.context asks; widen it, or hold out more of {task.data}"
            + (f"; {len(refused)} cannot be laid out, such as: {refused[0]}" if refused else "")
        )
    order = generator.permutation(len(candidates))
    if questions and len(order) < count:
        log(f"{name}: {len(order)} records of this length, fewer than the {count} prompts asked for; all are taken")
    prompts = []
    for number in range(min(count, len(order)) if questions else count):
        line, found = candidates[order[number % len(order)]]
        if order[number % len(order)] < len(questions):
            ids = found[int(generator.integers(len(found)))]
        else:
            ids_S, is_text = found
            length = int(generator.integers(shortest, min(longest, len(ids_S) - ROOM_AFTER) + 1))
            start = int(generator.integers(0, len(ids_S) - ROOM_AFTER - length + 1)) if is_text else 0
            ids = ids_S[start : start + length].tolist()
        prompts.append(Prompt(name, number, line, ids, task.new_tokens))
    return prompts


def _questions(encoder: Encoder, record: dict[str, Any]) -> list[list[int]]:
    """Return the parts of a conversation that end with a question, as token ids of a request; other text has none.

    Each has the record's tools and template arguments. Questions after a thought or a tool call are left out. Raises
    LayoutError if the template refuses all of them.
    """
    document = to_messages_or_text(record, unanswered=True)
    if not isinstance(document, Chat):
        return []
    roles = [message["role"] for message in document.messages] + ["assistant"]  # the answer to the last message
    ends = [end for end in range(1, len(roles)) if roles[end - 1 : end + 1] == ["user", "assistant"]]
    chats = [replace(document, messages=document.messages[:end]) for end in ends]
    asked = encoder.requests([chat for chat in chats if Chat(chat.messages).is_plain])
    whole = [ids for ids in asked if not isinstance(ids, LayoutError)]
    if asked and not whole:
        raise next(error for error in asked if isinstance(error, LayoutError))
    return whole


def read_prompts(name: str, task: Benchmark, count: int, tokenizer: Any, seed: int, positions: int) -> list[Prompt]:
    """Draw `count` prompts without repetition, all where there are no more; of a larger count the first ones are the same.

    positions: those of the target.

    As in LongBench, a prompt that is too long is cut in its middle before the chat template is applied. Raises ValueError with
    file, line and field for a record that makes no prompt, and if no prompt fits into the target's positions.
    """
    records = [record for path in files_of(name, task) for record in read_records(path, task.member)]
    if not records:
        raise ValueError(f"{task.source}: holds no record, but evaluation.tasks.{name} needs prompts")
    drawn = np.random.default_rng([seed, *name.encode()]).permutation(len(records))[:count].tolist()
    if len(records) < count:
        log(f"{name}: {len(records)} records, fewer than the {count} prompts asked for; all are taken")
    encoder, lay_out = Encoder(tokenizer), compose(to="prompt", template=task.template, optional=[])
    room = check_room(name, task, positions, len(encoder.prompt("x", chat=task.chat)))
    longest = min(task.longest or room, room)
    prompts = []
    for number, record in enumerate(drawn):
        (place, fields), cut = records[record], 0
        try:
            made = lay_out(fields)
            assert isinstance(made, dict)
            text = made["prompt"]
            if len(whole := encoder.prompt(text, chat=False)) > longest:
                ends = (whole[: longest // 2], whole[len(whole) - longest // 2 :])
                text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
                cut = len(whole) - sum(map(len, ends))
            ids = encoder.prompt(text, chat=task.chat)
            beside = found(fields, task.reference) if task.reference else None  # an answer to read next to the target's
            reference = None if beside is None else check_characters(beside, task.reference)
        except (RecordError, LayoutError) as error:
            raise ValueError(f"{place}: {error}; correct it, or evaluation.tasks.{name}") from error
        prompts.append(Prompt(name, number, record, ids, task.new_tokens, reference, cut))
    if count_cut := sum(prompt.cut_tokens > 0 for prompt in prompts):
        log(f"{name}: {count_cut} of {len(prompts)} prompts cut in their middle to {longest} tokens")
    return prompts
