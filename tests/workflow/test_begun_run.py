"""A run that begins with a draft made elsewhere: fetched, imported, its tokens taken over, measured, named by the recipe."""

import json
import re
from pathlib import Path

import pytest

from longspec.config import to_yaml
from tests.workflow.planning import Settings, Workflow

RUN = "config/run/demo-eagle3.yaml"
HUB = "hf:owner/draft@v1"
P = "results/demo-eagle3/ttt"
VARIANT = "run 'demo-eagle3', variant 'ttt'"


def begun(settings: Settings | Workflow, source: str) -> None:
    settings.edit(RUN, r"^recipe:$", f"recipe:\n  init: {json.dumps(source)}")


def draft_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    return folder


def test_the_first_stage_begins_with_it_and_is_measured_after_it(settings: Settings) -> None:
    begun(settings, HUB)
    plan = settings.plan(runs=["demo-eagle3", "demo"])
    (draft,) = plan.beginnings
    assert (plan.draft_source(draft), plan.draft_files(draft), plan.begun_runs) == (HUB, [], ["demo-eagle3"])
    names = [Path(path).stem for path in plan.evaluations("demo-eagle3")]
    assert names == ["untrained", "lookup", "imported", "base", "long", "longcot"]
    assert plan.previous_weights("demo", "sinkpi-slicing", "base") == plan.imported_config("demo", "sinkpi-slicing") == []
    for stage in plan.stages_of("demo-eagle3", None):
        assert f"init: {HUB}\n" in to_yaml(plan.configs[stage].recipe)
    assert all("init" not in to_yaml(plan.configs[stage].recipe) for stage in plan.stages_of("demo", None))


@pytest.mark.parametrize(
    ("source", "config", "told"),
    [
        ("nowhere", "", (": recipe.init: nowhere", "such folder")),
        ("hf:draft", "", (", stage 'base': recipe.init: 'hf:draft'", "hf:<owner>/<repository>[@revision]")),
        ("mine", '{"draft": "glide"}', (": recipe.init: mine", "of glide,", "recipe.method.name is eagle3")),
        ("mine", '{"architectures": ["Foo"]}', (": recipe.init: mine: architectures: ['Foo']",)),
    ],
)
def test_what_is_no_draft_of_the_method_is_named_at_the_plan(
    settings: Settings, source: str, config: str, told: tuple[str, ...]
) -> None:
    (draft_folder(settings.folder / "mine") / "config.json").write_text(config)
    begun(settings, source)
    settings.refuses(f"{VARIANT}{told[0]}", *told[1:], runs=["demo-eagle3"])


def test_it_brings_its_own_tokens(settings: Settings) -> None:
    begun(settings, HUB)
    settings.edit(RUN, r"method: \{", "method: {vocabulary_from: demo-eagle3, ")
    settings.refuses(f"{VARIANT}: recipe.init: {HUB}", "recipe.method.vocabulary_from", "to null", runs=["demo-eagle3"])


def test_the_jobs_are_planned(workflow: Workflow) -> None:
    begun(workflow, str(draft_folder(workflow.folder / "mine")))
    jobs = workflow.plan("--config", "runs=[demo-eagle3]")
    imported = jobs[f"{P}/imported/draft/model.safetensors"]
    assert imported["rule"] == "import_draft"
    assert f"{P}/base/recipe.yaml" in imported["input"].split(", ")
    (fetch,) = [fields for fields in jobs.values() if fields["rule"] == "fetch_draft"]
    assert re.fullmatch(r"models/drafts/\S+-mine-\w{8}/manifest\.json", fetch["output"])
    assert "pytorch_model.bin" in fetch["input"]
    assert f"--init-weights {P}/imported/draft/model.safetensors" in jobs[f"{P}/base/checkpoint.json"]["command"]
    assert f"--init-weights {P}/base/draft/model.safetensors" in jobs[f"{P}/long/checkpoint.json"]["command"]
    assert f"--ids-of {P}/imported/draft/draft_vocabulary.json" in jobs[f"{P}/draft_vocabulary_768.json"]["command"]
    assert f"--draft {P}/imported/draft" in jobs[f"{P}/evaluation/imported.jsonl"]["command"]
    assert f"--imported {P}/imported/draft/config.json" in jobs[f"{P}/final_draft/model.safetensors"]["command"]


def test_a_run_of_glide_begins_with_a_published_folder_or_file(settings: Settings) -> None:
    run, folder = "config/run/demo.yaml", draft_folder(settings.folder / "mine")
    (folder / "config.json").write_text('{"architectures": ["Qwen2GlideDecoderLayer"]}')
    (folder / "weights.pth").write_bytes(b"weights")
    settings.edit(run, r"^recipe:$", "recipe:\n  init: mine")
    assert settings.plan(runs=["demo"]).begun_runs == ["demo"]
    settings.edit(run, "init: mine", "init: mine/weights.pth")
    plan = settings.plan(runs=["demo"])
    assert plan.draft_files(next(iter(plan.beginnings))) == ["mine/weights.pth"]
    settings.edit(run, "init: mine/weights.pth", "init: mine/config.json")
    place = "run 'demo', variant 'sinkpi-slicing': recipe.init: mine/config.json"
    settings.refuses(place, "a file", ".pth, .bin, .safetensors", runs=["demo"])
    begun(settings, "mine/weights.pth")
    told = ("a file", "glide draft (recipe.method.name is eagle3)")
    settings.refuses(f"{VARIANT}: recipe.init: mine/weights.pth", *told, runs=["demo-eagle3"])
