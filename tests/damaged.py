"""Weight files that are none: what torn copies, other programs and hasty edits leave."""

import io
import json
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

State = dict[str, Tensor]
RANDOM = torch.randint(0, 256, (3000,), generator=torch.Generator().manual_seed(4), dtype=torch.uint8).numpy().tobytes()


def saved(content: Any, *, zipped: bool = True) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def with_header(state: State, header: bytes, size: int | None = None) -> bytes:
    """A .safetensors file of another header, or one that says it is larger."""
    return struct.pack("<Q", len(header) if size is None else size) + header + save(state)


def cut(whole: bytes, share: float = 0.5) -> bytes:
    return whole[: int(len(whole) * share)]


def first(state: State, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """The state with its first tensor changed."""
    name = next(iter(state))
    return state | {name: change(state[name])}


def strange_entry(state: State) -> bytes:
    entry = {name: {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]} for name in state}
    return with_header(state, json.dumps(entry).encode())


# Name of the file -> its bytes. All must be refused in one line that begins with the file's name.
FILES: dict[str, Callable[[State], bytes]] = {
    "empty.pth": lambda _: b"",
    "cut.pth": lambda state: cut(saved(state)),
    "end-missing.pth": lambda state: saved(state)[:-30],
    "random.pth": lambda _: RANDOM,
    "text.pth": lambda _: b"version https://git-lfs.github.com/spec/v1\n",
    "old-cut.bin": lambda state: cut(saved(state, zipped=False), 0.9),
    "old-begins.bin": lambda state: saved(state, zipped=False)[:40],
    "safetensors.pt": save,
    "integer-keys.pth": lambda state: saved(dict(enumerate(state.values()))),
    "list.pth": lambda state: saved(list(state.values())),
    "number-for-a-tensor.pth": lambda state: saved(first(state, lambda _: 5)),
    "sparse.pth": lambda state: saved(first(state, lambda tensor: tensor.to_sparse())),
    "without-numbers.pth": lambda state: saved(first(state, lambda tensor: tensor.to("meta"))),
    "empty.safetensors": lambda _: b"",
    "short.safetensors": lambda _: b"abc",
    "cut.safetensors": lambda state: cut(save(state)),
    "random.safetensors": lambda _: RANDOM,
    "header-too-large.safetensors": lambda state: with_header(state, b"{}", 2**62),
    "header-beyond-the-end.safetensors": lambda state: with_header(state, b"{}", 10**6),
    "header-of-a-list.safetensors": lambda state: with_header(state, b"[]"),
    "header-of-strange-entries.safetensors": strange_entry,
    "torch-save.safetensors": lambda state: saved(state),
    "nan.pth": lambda state: saved({name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}),
    "one-infinite.safetensors": lambda state: save(first(state, lambda tensor: tensor.clone().fill_(torch.inf))),
    "integers.safetensors": lambda state: save({name: tensor.to(torch.int32) for name, tensor in state.items()}),
    "complex.pth": lambda state: saved(first(state, lambda tensor: tensor.to(torch.complex64))),
}
