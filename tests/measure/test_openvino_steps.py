"""What is read of OpenVINO's steps, and which files it is given. OpenVINO itself is asked in test_openvino.py."""

from pathlib import Path

import pytest

from longspec.measure.engines import openvino, openvino_ir
from longspec.measure.engines.openvino import rounds_within
from longspec.measure.engines.protocol import Job, Request
from tests.refusals import refused

REQUESTS = [Request("a", [3, 4], 3, 0.0, 0, [0])]


def job(target: Path, draft: Path | None, scratch: Path) -> Job:
    return Job(str(target), "eagle3", None if draft is None else str(draft), 3, "float32", 64, 1, REQUESTS, str(scratch))


@pytest.mark.parametrize(
    ("sizes", "length", "rounds"),
    [
        ([1, 4, 2, 1, 4], 8, [3, 1, 0]),  # the round behind the text is none of it
        ([1, 4, 2, 1, 4], 6, [3, 1]),  # the last round is told uncut
        ([1, 4], 1, []),  # a text that ends with the prompt's step
    ],
)
def test_the_rounds_are_those_that_reach_a_texts_end(sizes: list[int], length: int, rounds: list[int]) -> None:
    assert rounds_within(sizes, length) == rounds


@pytest.mark.parametrize("sizes", [[1, 4], [2, 4, 4], []])
def test_steps_that_are_not_of_the_text_are_refused(sizes: list[int]) -> None:
    with refused("OpenVINO", f"{sizes} tokens", "of 6", "serve/openvino.txt"):
        rounds_within(sizes, 6)


def test_files_in_openvinos_format_are_loaded_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft", "export"):
        (tmp_path / name).mkdir()
    for name in ("target", "draft"):
        (tmp_path / name / openvino_ir.MODEL).touch()
    target, draft, scratch = tmp_path / "target", tmp_path / "draft", tmp_path / "scratch"
    assert openvino._converted(job(target, draft, scratch)) == (target, draft)
    assert openvino._converted(job(target, None, scratch)) == (target, None)
    with refused(target, "OpenVINO", tmp_path / "export", "give both"):
        openvino._converted(job(target, tmp_path / "export", scratch))
    assert not scratch.exists()
    monkeypatch.setattr(openvino, "CONVERTER", "json.tool")  # stands in for one that ends with its reason
    with refused("evaluation.engine: openvino", "No such file"):
        openvino._converted(job(target / "none", None, scratch))


def test_a_draft_folder_that_is_not_of_this_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are not known then, and OpenVINO would take others."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with refused(f"{tmp_path}: config.json", "hidden_layers_list", "`longspec export DRAFT --layout openvino`"):
        openvino_ir.layers_of(tmp_path)
