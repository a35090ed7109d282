"""GGUF files of drafts that are not as trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec.draft.layouts import write_layout
from longspec.models import gguf_writer

Read = Callable[[str], Tensor]
Spoil = Callable[[dict[str, Any], Read], tuple[dict[str, Any], Read]]


def write_spoilt(draft: Path, out: Path, context: int, spoil: Spoil) -> None:
    """Write a draft folder's file with its keys and tensors spoilt on the way."""
    real = gguf_writer.write

    def spoilt(out: Path, architecture: str, keys: dict[str, Any], shapes: Any, read: Read, dtype: Any) -> None:
        keys, read = spoil(keys, read)
        real(out, architecture, keys, shapes, read, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_writer, "write", spoilt)
        write_layout(draft, "gguf", out, "f32", context)


def relative_tokens(keys: dict[str, Any], read: Read) -> tuple[dict[str, Any], Read]:
    return keys, lambda name: read(name) - torch.arange(len(read(name))) if name == "d2t" else read(name)
