"""A draft vocabulary counted on packed rows: the `vocabulary` verb.

Rows are read one record batch at a time; only counts of the target's tokens stay in memory. V: tokens of the target.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from longspec.atomic_files import named_folder, read_json
from longspec.data.pack.arrow_shards import PackedRows, view
from longspec.draft_vocabulary import ALL, DraftVocabulary, read_draft_vocabulary

IDS, MASK = range(2)  # columns of packed rows


def trained_tokens(rows: PackedRows, size: int) -> NDArray[np.int64]:
    """Return how often each of the target's tokens is a label of these rows, [V]. Raises ValueError for a token it lacks."""
    counts_V = np.zeros(size, dtype=np.int64)
    for batch in tqdm(rows.batches(), disable=None):
        ids, mask = (view(batch.column(number).values) for number in (IDS, MASK))
        found = np.bincount(ids[mask > 0])
        if len(found) > size:
            raise ValueError(
                f"{rows.path}: holds token {len(found) - 1}, the target's embedding ends at {size - 1}: its tokenizer has more "
                "tokens; enlarge the embedding (transformers: resize_token_embeddings), or take them out of the tokenizer"
            )
        counts_V[: len(found)] += found
    return counts_V


def make(packed: list[tuple[str, Path]], target: Path, count: int, ids_of: Path | None, out: Path) -> dict[str, Any]:
    """Write the `count` most frequent trained tokens, or those of the file `ids_of`, and what they cover of these rows.

    Returns numbers to report. Raises ValueError for rows of several tokenizers, for a size that leaves nothing out, and for a
    file of another tokenizer, target or size.
    """
    # The rows of its embedding, perhaps more than its tokenizer's entries.
    size = int(read_json(Path(named_folder(target)) / "config.json")["vocab_size"])
    if not 0 < count < size:
        raise ValueError(f"--size: {count}: the target has {size} tokens; give fewer, or recipe.method.vocabulary: null")
    rows = {name: PackedRows(path) for name, path in packed}
    tokenizers = {name: each.manifest["tokenizer"] for name, each in rows.items()}
    if len(set(tokenizers.values())) > 1:
        raise ValueError(f"--packed: {', '.join(tokenizers)}: rows of different tokenizers; pack all of them for one target")
    counts = {name: trained_tokens(each, size) for name, each in rows.items()}
    total_V, tokenizer = np.sum(list(counts.values()), axis=0), next(iter(tokenizers.values()))
    if ids_of is None:
        # Of equally frequent tokens, the lower ids.
        ids = tuple(sorted(np.argsort(-total_V, kind="stable")[:count].tolist()))
    else:
        taken = read_draft_vocabulary(ids_of)
        taken.check_tokenizer(ids_of, tokenizer, packed[0][1])
        taken.check_tokens(ids_of, size, target)
        if len(taken.ids) != count:
            raise ValueError(f"{ids_of}: ids: are {len(taken.ids)}, --size is {count}; give the file of that size")
        ids = taken.ids
    of_each = {**counts, ALL: total_V}
    shares = {name: float(counts_V[list(ids)].sum() / max(1, counts_V.sum())) for name, counts_V in of_each.items()}
    made = DraftVocabulary(ids, size, tokenizer, shares)
    made.write(out)
    return {"tokens": count, "of": size, "trained": int(total_V.sum()), "coverage": shares, "warning": made.low_coverage}
