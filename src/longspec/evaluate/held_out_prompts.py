"""Held-out prompts: stretches of held-out records, of a length drawn per prompt."""

from pathlib import Path
from typing import Any

import numpy as np

from longspec import jsonl
from longspec.atomic_files import read_json
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.tokenize import encode
from longspec.distributed import log
from longspec.evaluate.prompts import Prompt
from longspec.evaluate.tasks import HeldOut

# Tokens a record must still hold after a prompt, so that there is something to go on with.
ROOM_AFTER = 16


def draw_prompts(name: str, task: HeldOut, raw_manifest: Path, count: int, tokenizer: Any, seed: int) -> list[Prompt]:
    """`count` prompts of a task, a function of (seed, name) alone.

    Of plain text any stretch is taken, of a conversation its beginning, since a chat does not start in its middle. Raises
    ValueError when no held-out record is long enough.
    """
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
    if refused:
        log(f"{path}: {refused} held-out records left out: the target's chat template cannot lay them out")
    if not documents:
        raise ValueError(
            f"{path}: no record has {context[0] + ROOM_AFTER} tokens, as evaluation.tasks.{name}.context needs; lower it, "
            f"or hold out more of {read_json(raw_manifest)['name']}"
        )
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))
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
