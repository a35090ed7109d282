"""The Python of docs/generate.md runs as it stands, line by line, on a small target and a draft in the places that it names."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from longspec.decode import speculate
from tests.cli import small_draft
from tests.corpus import Corpus


def test_its_lines_run_and_say_how_many_tokens_a_round_brings(
    root: Path, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    small_draft.save(Path("models/demo/target"), Path("results/demo/sinkpi-slicing/final_draft"), corpus)
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/generate.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    forwards: list[int] = []
    forward = speculate._Run.forward
    monkeypatch.setattr(speculate._Run, "forward", lambda *given: forwards.append(1) or forward(*given))
    told: dict[str, Any] = {}  # the names that the blocks leave
    with redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            exec(block, told)
            assert forwards, "the draft is used"
            forwards.clear()
    assert told["out"].shape[0] == 1
    assert told["row"].new_tokens >= 63
    assert re.search(r"^[\d.]+ tokens a round, kept in each: \[", printed.getvalue(), re.MULTILINE)
