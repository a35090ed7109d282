"""An EAGLE-3 draft for the demo's target in llama.cpp, as GGUF files: its text, and its acceptance by llama.cpp's own counters.

The other side is our own decoding of the same prompts. The draft's window is 512, and every text stays within it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec.draft.layouts import write_layout
from longspec.models import gguf_writer
from tests.measure.demo_draft import CHAIN, DRAFT, NEEDED, ROOT, Line, Measured, assert_as_ours, at_root, demo, is_seen

__all__ = ["at_root"]  # a fixture
MISSING = [name for name in (".venv-serve/llama.cpp/.stamp", NEEDED) if not (ROOT / name).is_file()]
pytestmark = [pytest.mark.serve, pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing: make test-serve")]
ENGINE = ["--engine", "llama.cpp", "--serve-python", str(ROOT / ".venv-serve/llama.cpp/bin/python")]
WINDOW = 512


@pytest.fixture(scope="module")
def measured() -> Measured:
    """20 prompts of 64 tokens and 20 of 440, which with their answers stay within the window."""
    return demo(20, 64, 440)


@pytest.fixture(scope="module")
def ours(measured: Measured, at_root: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    return measured.lines(tmp_path_factory.mktemp("llama.cpp") / "ours.jsonl")


def test_text_and_acceptance_in_llama_cpp_are_ours(measured: Measured, ours: list[Line], tmp_path: Path) -> None:
    theirs = measured.lines(tmp_path / "theirs.jsonl", *ENGINE)
    assert max(line["context_tokens"] + 64 + CHAIN for line in theirs) <= WINDOW
    assert_as_ours(theirs, ours, "llama.cpp", 40 * 60)


def test_a_file_that_is_not_as_trained_is_seen(
    measured: Measured, ours: list[Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is llama.cpp's own all the same: acceptance alone shows that a vocabulary's tokens are relative ones."""
    real = gguf_writer.write

    def spoilt(out: Path, architecture: str, keys: Any, shapes: Any, read: Callable[[str], Tensor], dtype: Any) -> None:
        def relative(name: str) -> Tensor:
            return read(name) - torch.arange(len(read(name))) if name == "d2t" else read(name)

        real(out, architecture, keys, shapes, relative, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_writer, "write", spoilt)
        write_layout(DRAFT, "gguf", tmp_path / "d.gguf", "f32", WINDOW)
    assert is_seen(measured.lines(tmp_path / "theirs.jsonl", *ENGINE, "--served-draft", str(tmp_path / "d.gguf")), ours)
