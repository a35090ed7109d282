"""`plan`: figures against hand-made ones, no weights needed, and an answer for every mistake."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from longspec.atomic_files import write_json, write_text
from longspec.config import Recipe, Runtime, compose, load, to_yaml
from longspec.data.pack.arrow_shards import PackedRows
from longspec.draft.folder import write_draft
from longspec.methods import method_of
from longspec.methods.glide.layer import GlideLayer, published_layout
from longspec.train.estimate import flops, memory, plan
from longspec.train.estimate.plan import Rows
from tests.corpus import LENGTH, Corpus
from tests.jobs import Job
from tests.targets import SHAPES

TARGET = LlamaConfig(**SHAPES | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target's folder without its weights, and a stage's frozen files."""
    TARGET.save_pretrained(tmp_path / "target")
    base = ["run=demo", "recipe.global_batch=4", "recipe.steps=null", f"recipe.data.sequence_length={LENGTH}"]
    Job(tmp_path, tmp_path, tmp_path, base=base).freeze()
    write_json(tmp_path / "target_manifest.json", {"path": str(tmp_path / "target"), "files": {}})
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    files = ["--recipe", str(folder / "recipe.yaml"), "--runtime", str(folder / "runtime.yaml")]
    return [*files, "--target", str(folder / "target"), "--ranks", "2", *more]


def frozen(folder: Path) -> tuple[Any, Any]:
    return load(folder / "recipe.yaml", Recipe), load(folder / "runtime.yaml", Runtime)


def operations_of_a_step(folder: Path) -> float:
    """Of four rows of one document each."""
    method, settings = method_of(frozen(folder)[0])
    documents, labels = [LENGTH] * 4, 4 * (LENGTH - 1)
    return sum(flops.operations(TARGET, method, settings, 4 * LENGTH, documents, labels, with_llm_loss=True))


def test_steps_hours_and_batches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """21 rows are 5 whole global batches of 4; hours are operations by what both ranks do in an hour."""
    assert plan.main(command(folder, "--rows", "21", "--flops", "1e6", "--device", "cpu", "--gpu-memory-gib", "10")) == 0
    text = capsys.readouterr().out
    assert "5 steps of 4 rows" in text
    assert "2 ranks x 1 micro batches of 2 rows" in text
    each = operations_of_a_step(folder)
    assert f"{each:.3g} operations a step" in text
    assert f"{each / 2e6:.1f} s a step, {5 * each / 2e6 / 3600:.1f} hours in all" in text


def test_another_json_file_is_no_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(folder / "shard.json", {"path": "x"})
    assert plan.main(command(folder, "--rows", "21", "--target", str(folder / "shard.json"))) == 1
    assert f"{folder}/shard.json: files: missing" in capsys.readouterr().err


def test_packed_data_are_counted(folder: Path, corpus: Corpus) -> None:
    """Labels and documents of real rows, each counted."""
    data, (recipe, runtime) = PackedRows(corpus.answers), frozen(folder)
    made = plan.plan_stage(TARGET, recipe, runtime, [plan.counted_rows(corpus.answers)], 2, torch.device("cpu"))
    assert made.steps == len(data) // 4
    method, settings = method_of(recipe)
    labels = sum(int(data[number].loss_mask_S.sum()) for number in range(len(data)))
    shape = (LENGTH * len(data), flops.document_lengths(data, range(len(data))), labels)
    whole = flops.operations(TARGET, method, settings, *shape, with_llm_loss=True)
    assert made.operations == pytest.approx([4 * part / len(data) for part in whole], rel=0.1)


def test_the_drafts_folder_is_as_large_as_planned(folder: Path) -> None:
    recipe, runtime = frozen(folder)
    setup = plan.plan_stage(TARGET, recipe, runtime, [Rows(8, [LENGTH], LENGTH)], 1, torch.device("cpu")).setup
    state = GlideLayer(TARGET).state_dict()
    write_draft(folder / "draft", published_layout(state), {})
    files = sum(path.stat().st_size for path in (folder / "draft").iterdir())
    parameters = sum(tensor.numel() for tensor in state.values())
    checkpoints = 3 * 12 * parameters  # last, last_2 and a new one; weights and two moments in float32
    assert plan.disk_bytes(setup) < files + checkpoints < 1.05 * plan.disk_bytes(setup)


def test_what_does_not_fit_ends_with_1_and_what_to_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(command(folder, "--rows", "21", "--gpu-memory-gib", "1")) == 1
    assert "DOES NOT FIT" in (text := capsys.readouterr().out)
    assert "Change one or several of: " in text


def test_a_stage_of_several_sources_is_counted_by_their_shares(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own rows are seen as often as without; their number and the operations are counted by hand."""
    recipe, runtime = frozen(folder)
    recipe = copy.deepcopy(recipe)
    recipe._set_flag("readonly", False)
    full, tenth = Rows(400, [LENGTH], 40), Rows(100, [LENGTH], 4)
    alone = plan.plan_stage(TARGET, recipe, runtime, [full], 1, torch.device("cpu"))
    recipe.data.replay = {"base": 0.5}
    equal = plan.plan_stage(TARGET, recipe, runtime, [full], 1, torch.device("cpu"))
    assert (alone.steps, equal.steps) == (100, 200)
    assert sum(equal.operations) == pytest.approx(sum(alone.operations))
    of_ten = plan.plan_stage(TARGET, frozen(folder)[0], runtime, [tenth], 1, torch.device("cpu")).operations
    recipe.data.replay, recipe.data.name = {}, {"books": 0.5, "chats": 0.5}
    mixed = plan.plan_stage(TARGET, recipe, runtime, [full, tenth], 1, torch.device("cpu"))
    assert mixed.steps == 125  # as many rows as both have
    assert sum(mixed.operations) == pytest.approx((sum(alone.operations) + 10 * sum(of_ten)) / 11)
    write_text(folder / "recipe.yaml", to_yaml(recipe))
    assert plan.main(command(folder, "--rows", "400")) == 1
    assert "give --data or --rows for each of the stages' 2 data sets" in capsys.readouterr().err
    assert plan.main(command(folder, "--rows", "400", "100")) == 0


def test_of_a_stage_that_reads_stored_states_embedding_and_head_alone_are_held() -> None:
    """With the shape of an 8B target; two micro batches are read ahead."""
    wide: dict[str, Any] = {"vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(**wide, intermediate_size=14336, num_key_value_heads=8, tie_word_embeddings=False)

    def setup_for(*overrides: str) -> memory.Setup:
        made = compose("train", [*overrides, "stage=long", "recipe.data.sequence_length=4096"])
        return memory.setup_of(config, made.recipe, made.runtime, 2, 1, torch.bfloat16, torch.device("cuda"))

    def items(setup: memory.Setup) -> dict[str, int]:
        return {f"{item.name}, {'host' if item.on_host else item.phase}": item.bytes for item in memory.estimate(setup)}

    glide, eagle3 = ["run=demo", "variant=sinkpi-slicing"], ["run=demo-eagle3", "recipe.method.layers=null"]
    for base, token in ((glide, 4096 + 2 * 4096), (eagle3, 8 * 4096)):
        setup = setup_for(*base, "recipe.states.source=offline")
        found, on_cpu = items(setup), items(replace(setup, device=torch.device("cpu")))
        assert setup.target_bytes == 2 * (2 * 128_256 * 4096 + 4096)
        assert found["target's embedding and head, always"] == setup.target_bytes
        assert found["stored states, read ahead, host"] == 2 * token * 2 * 4096
        assert found["stored states, in use, target's forward"] == token * 2 * 4096
        assert not any("target weights" in name or "target activations" in name for name in found)
        assert memory.peak(memory.estimate(setup)) < memory.peak(memory.estimate(setup_for(*base))) - 12 * 2**30
        assert on_cpu["stored states, read ahead, always"] == 2 * token * 2 * 4096
