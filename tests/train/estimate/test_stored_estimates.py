"""Estimates of a stage that reads stored states: no target's layers in memory, and none of its operations."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from longspec.atomic_files import write_text
from longspec.config import compose, to_yaml
from longspec.train.estimate import plan
from longspec.train.estimate.memory import estimate, peak, setup_of

# The shape of an 8B target.
CONFIG = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
LENGTH, VH = 4096, 128_256 * 4096
GLIDE = ["run=demo", "stage=long", "variant=sinkpi-slicing", f"recipe.data.sequence_length={LENGTH}"]
EAGLE3 = ["run=demo-eagle3", "stage=long", "recipe.method.layers=null", f"recipe.data.sequence_length={LENGTH}"]


def items(*overrides: str, device: str = "cuda") -> tuple[Any, dict[str, int]]:
    config = compose("train", list(overrides))
    setup = setup_of(CONFIG, config.recipe, config.runtime, 2, 1, torch.bfloat16, torch.device(device))
    found: dict[str, int] = {}
    for item in estimate(setup):
        found[f"{item.name}, {'host' if item.on_host else item.phase}"] = item.bytes
    return setup, found


def test_embedding_and_head_alone_are_held_and_two_micro_batches_are_read() -> None:
    for base, token in ((GLIDE, 4096 + 2 * 4096), (EAGLE3, 8 * 4096)):
        online, _ = items(*base)
        setup, found = items(*base, "recipe.states.source=offline")
        assert setup.target_bytes == 2 * (2 * VH + 4096)
        assert found["target's embedding and head, always"] == setup.target_bytes
        assert found["stored states, read ahead, host"] == 2 * token * 2 * LENGTH
        assert found["stored states, in use, target's forward"] == token * 2 * LENGTH
        assert not any("target weights" in name or "target activations" in name for name in found)
        assert peak(estimate(setup)) < peak(estimate(online)) - 12 * 2**30
        _, on_cpu = items(*base, "recipe.states.source=offline", device="cpu")
        assert on_cpu["stored states, read ahead, always"] == 2 * token * 2 * LENGTH


def test_disk_and_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """240 rows of 512 tokens; a step takes two of them."""
    CONFIG.save_pretrained(tmp_path / "target")
    steps = ["recipe.steps=360", "recipe.data.sequence_length=512", "recipe.global_batch=2", "runtime.held_out_rows=2"]
    config = compose("train", [*EAGLE3, *steps, "recipe.states.source=offline"])
    options = ["--ranks", "1", "--gpu-memory-gib", "1000", "--rows", "240", "--flops", "1e15"]
    for name in ("recipe", "runtime", "target"):
        options += [f"--{name}", str(tmp_path / name)]
        if name != "target":
            write_text(tmp_path / name, to_yaml(config[name]))
    assert plan.main(options) == 0
    text = capsys.readouterr().out
    assert f"{32768 * 512 * 242 / 2**30:.2f} GiB of 240 rows and 2 held-out ones" in text
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # of a token
    building = re.search(r"building them: (\S+) operations, (\S+) hours at 1e\+03 TFLOP/s", text)
    assert building is not None
    assert float(building[1]) == pytest.approx(32 * layer * 512 * 240, rel=0.03)  # attention beside the products
    assert float(building[2]) == pytest.approx(float(building[1]) / 1e15 / 3600, rel=0.1)
    full = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert plan.main(options) == 0
    assert "DOES NOT FIT: 0.93 GiB free at" in capsys.readouterr().out
