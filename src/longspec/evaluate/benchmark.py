"""Prompts of a benchmark: a file's records, laid out as the benchmark does."""

from typing import Any

import numpy as np

from longspec.data.align.align_base import found
from longspec.data.align.fields import compose
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.record_checks import RecordError, check_characters
from longspec.distributed import log
from longspec.evaluate.prompt_files import files_of, read_records
from longspec.evaluate.tasks import Benchmark, Prompt, check_room


def read_prompts(name: str, task: Benchmark, count: int, tokenizer: Any, seed: int, positions: int) -> list[Prompt]:
    """`count` prompts drawn without repetition, all in order where there are no more; `positions`: those of the target.

    As in LongBench a prompt that is too long is cut in its middle before the chat template is laid around it. Raises ValueError
    with file, line and field for a record that makes no prompt, and when the target's positions hold no prompt.
    """
    records = [record for path in files_of(name, task) for record in read_records(path, task.member)]
    if not records:
        raise ValueError(f"{task.source}: holds no record, but evaluation.tasks.{name} needs prompts")
    drawn = sorted(np.random.default_rng([seed, *name.encode()]).permutation(len(records))[:count].tolist())
    if len(records) < count:
        log(f"{name}: {len(records)} records, fewer than the {count} prompts asked for; all are taken")
    encoder, lay_out = Encoder(tokenizer), compose(to="prompt", template=task.template, optional=[])
    room = check_room(name, task, positions, len(encoder.prompt("x", chat=task.chat)))
    longest = min(task.longest or room, room)
    prompts = []
    for number, record in enumerate(drawn):
        place, fields = records[record]
        try:
            made = lay_out(fields)
            assert isinstance(made, dict)
            text, cut = _cut(tokenizer, encoder, made["prompt"], longest)
            ids = encoder.prompt(text, chat=task.chat)
            beside = found(fields, task.reference) if task.reference else None  # the answer to read beside the target's
            reference = None if beside is None else check_characters(beside, task.reference)
        except (RecordError, LayoutError) as error:
            raise ValueError(f"{place}: {error}; correct it, or evaluation.tasks.{name}") from error
        prompts.append(Prompt(name, number, record, ids, task.new_tokens, reference, cut))
    if any(prompt.cut_tokens for prompt in prompts):
        count_cut = sum(prompt.cut_tokens > 0 for prompt in prompts)
        log(f"{name}: {count_cut} of {len(prompts)} prompts cut in their middle to {longest} tokens")
    return prompts


def _cut(tokenizer: Any, encoder: Encoder, text: str, longest: int) -> tuple[str, int]:
    """The text without its middle, and how many tokens that was; as it is when it is short enough."""
    ids = encoder.prompt(text, chat=False)
    if len(ids) <= longest:
        return text, 0
    half = longest // 2
    ends = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])]
    return "".join(ends), len(ids) - 2 * half
