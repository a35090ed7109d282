"""What stored states are made of, and which tensors they hold: equal declarations are equal states.

Shapes: S tokens of a row, H hidden width, K key/value heads, D head width, k likeliest tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, sha256_text
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import method_of
from longspec.states.stored.rows import RowSource
from longspec.states.tensors import BEST_TOKEN, FINAL, TOP, StateTensor

FLOAT8 = "float8"  # of recipe.states.dtype
WORDS = {"bfloat16": "BF16", FLOAT8: "F8_E4M3", "float32": "F32"}  # as safetensors names them
SIZES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}  # bytes of an element
SCALE = ".scale"
# Of TOP, in its order. float16: log-probabilities lie mostly between -64 and 0, where it is at most 0.016 off, bfloat16 0.13.
TOP_DTYPES = ("I32", "F16", "F32", "I32", "F32")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the files: [rows, S, *token_shape] of a dtype as safetensors names it."""

    name: str
    dtype: str
    token_shape: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return SIZES[self.dtype] * prod(self.token_shape)


def stored_tensors(reads: Sequence[StateTensor], dtype: str, top_k: int | None) -> tuple[StoredTensor, ...]:
    """The tensors that are stored for those that a method reads (Method.reads), by name.

    dtype, top_k: of recipe.states. float8 brings a float32 scale a token and head, [K] of keys [K, D] and [] of a hidden state
    [H], and the most likely token as it was before the rounding: it decides which tokens have a loss where a draft has a
    vocabulary of its own. With top_k the likeliest tokens take the place of `final`.
    """
    found: list[StoredTensor] = []
    for tensor in reads:
        if tensor.name == FINAL and top_k is not None:
            continue
        found.append(StoredTensor(tensor.name, WORDS[dtype], tensor.token_shape))
        if dtype == FLOAT8:
            found.append(StoredTensor(tensor.name + SCALE, "F32", tensor.token_shape[:-1]))
    if FINAL in [tensor.name for tensor in reads]:
        if top_k is not None:
            shapes: tuple[tuple[int, ...], ...] = ((top_k,), (top_k,), (), (), ())
            found += map(StoredTensor, TOP, TOP_DTYPES, shapes)
        elif dtype == FLOAT8:
            found.append(StoredTensor(BEST_TOKEN, TOP_DTYPES[TOP.index(BEST_TOKEN)], ()))
    return tuple(sorted(found, key=lambda tensor: tensor.name))


def bytes_a_token(tensors: Sequence[StoredTensor]) -> int:
    """Bytes of one token in the files, whose headers come to far below a thousandth."""
    return sum(tensor.token_bytes for tensor in tensors)


@dataclass(frozen=True)
class Declaration:
    """All that decides the numbers in a set of stored states; two sets of equal declarations are equal."""

    target: str  # hash of the target's files
    tokenizer: str
    rows: str  # hash of the packed rows' manifest, or of the held-out rows
    num_rows: int
    sequence_length: int
    computed_in: str  # torch's dtype of the target's forward
    tensors: tuple[StoredTensor, ...]
    temperature: float | None  # of the likeliest tokens' distribution; None: there are none
    vocabulary: str | None  # hash of the draft vocabulary that these are taken from; None: all tokens

    def plain(self) -> dict[str, Any]:
        """The declaration as values of JSON, its tensors by their names."""
        tensors = {tensor.name: [tensor.dtype, *tensor.token_shape] for tensor in self.tensors}
        return asdict(self) | {"tensors": tensors}

    @classmethod
    def of_plain(cls, content: dict[str, Any]) -> "Declaration":
        """The declaration that `plain` made this content of."""
        tensors = tuple(StoredTensor(name, dtype, tuple(shape)) for name, (dtype, *shape) in content["tensors"].items())
        return cls(**content | {"tensors": tensors})

    @property
    def hash(self) -> str:
        """A hash of all of it."""
        return hash_of(self.plain())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.sequence_length * bytes_a_token(self.tensors)


def hash_of(plain: Any) -> str:
    """Return a hash of a declaration's plain content, or of another JSON value."""
    return sha256_text(json.dumps(plain, sort_keys=True))


def target_hash(manifest: Path) -> str:
    """Return the hash of a target's files alone: its manifest also says how long the target was trained."""
    return hash_of(read_json(manifest)["files"])


def declare(
    recipe: Any, config: Any, target_manifest: Path, rows: RowSource, dtype: Any, vocabulary: DraftVocabulary | None
) -> Declaration:
    """The declaration of a recipe's states; config: of the target; dtype: torch's, in which the target runs.

    Hard labels want no final hidden states, so that the target's own loss is measured on held-out rows alone. Raises ValueError
    for a recipe.states.top_k that this draft or target has not.
    """
    states, (method, settings) = recipe.states, method_of(recipe, vocabulary)
    learnt, top_k = method.learnt(settings), states.top_k
    if top_k is not None and learnt is None:
        raise ValueError(f"recipe.states.top_k: {top_k}: {method.name} learns no distribution alone; set it to null")
    if top_k is not None and top_k > config.vocab_size:
        raise ValueError(f"recipe.states.top_k: {top_k}: the target has {config.vocab_size} tokens; give as many or fewer")
    over = None if top_k is None or learnt is None or learnt.ids is None else vocabulary
    return Declaration(
        target=target_hash(target_manifest),
        tokenizer=rows.tokenizer,
        rows=rows.hash,
        num_rows=len(rows),
        sequence_length=rows.sequence_length,
        computed_in=str(dtype),
        tensors=stored_tensors(method.reads(config, settings, with_llm_loss=rows.held_out), states.dtype, top_k),
        temperature=None if top_k is None or learnt is None else learnt.temperature,
        vocabulary=None if over is None else over.hash,
    )
