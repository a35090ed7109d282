"""What `plan` tells of stored states, against counts by hand."""

import re
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from longspec.atomic_files import write_text
from longspec.config import compose, to_yaml
from longspec.train.estimate import plan
from longspec.train.estimate.plan import speed_up

TARGET = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


EAGLE3 = ["run=demo-eagle3", "variant=ttt", "stage=base", "recipe.method.layers=null"]


def told(folder: Path, overrides: list[str], *more: str, capsys: pytest.CaptureFixture[str]) -> str:
    TARGET.save_pretrained(folder / "target")
    config = compose("train", [*overrides, "recipe.states.source=offline"])
    for section in ("recipe", "runtime"):
        write_text(folder / section, to_yaml(config[section]))
    files = ["--recipe", str(folder / "recipe"), "--runtime", str(folder / "runtime"), "--target", str(folder / "target")]
    assert plan.main([*files, "--ranks", "1", "--states-only", "--states-folder", str(folder / "states"), *more]) == 0
    return capsys.readouterr().out


def test_disk_hours_and_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """240 rows of 512 tokens; a step takes two of them."""
    steps = ["recipe.steps=360", "recipe.data.sequence_length=512", "recipe.global_batch=2", "runtime.held_out_rows=2"]
    text = told(tmp_path, [*EAGLE3, *steps], "--rows", "240", "--flops", "1e15", capsys=capsys)
    assert f"{32768 * 512 * 242 / 2**30:.2f} GiB of 240 rows and 2 held-out ones" in text
    assert re.search(r"^  3 epochs from them are up to [\d.]+ times as fast as online", text, re.MULTILINE)
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # of a token
    building = re.search(r"building them: (\S+) operations, (\S+) hours at 1e\+03 TFLOP/s", text)
    assert building is not None
    assert float(building[1]) == pytest.approx(32 * layer * 512 * 240, rel=0.03)  # attention beside the products
    assert float(building[2]) == pytest.approx(float(building[1]) / 1e15 / 3600, rel=0.1)
    full = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    text = told(tmp_path, [*EAGLE3, *steps], "--rows", "240", capsys=capsys)
    assert "DOES NOT FIT: 0.93 GiB free at" in text


def test_how_many_times_as_fast() -> None:
    """Three epochs of 10 + 1 take 33 online; 10 for the building and 3 offline."""
    assert speed_up(10, 1, 3) == pytest.approx(33 / 13)
