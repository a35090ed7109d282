"""An EAGLE-3 draft in OpenVINO GenAI: its text, and its acceptance by the sizes of OpenVINO's steps.

The other side is our own decoding of the same prompts. Target and draft are made here, since OpenVINO reads outputs of layers
and the demo's draft reads the input of layer 0.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspec.atomic_files import read_json, write_json
from longspec.draft.layouts import write_layout
from tests.measure.demo_draft import ROOT, Line, Measured, assert_as_ours, is_seen
from tests.measure.small_draft import LAYERS, make

STAMP = ".venv-serve/openvino/.stamp"
pytestmark = [pytest.mark.serve, pytest.mark.skipif(not (ROOT / STAMP).is_file(), reason=f"{STAMP} missing: make test-serve")]
PYTHON = ROOT / ".venv-serve/openvino/bin/python"
ENGINE = ["--engine", "openvino", "--serve-python", str(PYTHON)]
Spoil = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return make(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def ours(small: Measured, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    return small.lines(tmp_path_factory.mktemp("ours") / "ours.jsonl")


def test_text_and_acceptance_in_openvino_are_ours(small: Measured, ours: list[Line], tmp_path: Path) -> None:
    assert_as_ours(small.lines(tmp_path / "theirs.jsonl", *ENGINE), ours, "openvino", 20 * 30)


def wrong_layers(config: dict[str, Any], _: dict[str, Tensor]) -> None:
    """As OpenVINO takes them where a file names none: outputs for inputs."""
    config["hidden_layers_list"] = list(LAYERS)


def absolute_tokens(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    own_V = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = torch.minimum(tensors["d2t"] + own_V, len(tensors["t2d"]) - 1 - own_V)  # a target's token in any case


SPOILT = (wrong_layers, absolute_tokens)
# In one process, since its imports take most of the time.
CONVERT = """
import sys
from pathlib import Path
from longspec.measure.engines.openvino_ir import convert_draft, convert_target
target, folder, *drafts = map(Path, sys.argv[1:])
convert_target(target, folder / "target")
for draft in drafts:
    convert_draft(draft, target, folder / draft.name)
"""


@pytest.fixture(scope="module")
def converted(small: Measured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the target and the drafts that are not as trained, in OpenVINO's format."""
    exports, out, target = (
        tmp_path_factory.mktemp("exports"),
        tmp_path_factory.mktemp("converted"),
        read_json(small.target)["path"],
    )
    for spoil in SPOILT:
        export = exports / spoil.__name__
        write_layout(small.draft, "openvino", export)
        config, tensors = read_json(export / "config.json"), load_file(export / "model.safetensors")
        spoil(config, tensors)
        write_json(export / "config.json", config)
        save_file(tensors, export / "model.safetensors", metadata={"format": "pt"})
    words = [str(PYTHON), "-c", CONVERT, target, str(out), *map(str, sorted(exports.iterdir()))]
    subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=True)
    return out


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_draft_that_is_not_as_trained_is_seen(
    small: Measured, ours: list[Line], converted: Path, tmp_path: Path, spoil: Spoil
) -> None:
    """The text is OpenVINO's own all the same: acceptance alone shows it."""
    given = ["--served-target", str(converted / "target"), "--served-draft", str(converted / spoil.__name__)]
    theirs = small.lines(tmp_path / "theirs.jsonl", *ENGINE, *given)
    assert is_seen(theirs, ours)
