"""A run of three lines: a target, its data and a method; all else follows from these."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from longspec.atomic_files import write_json
from longspec.cli.new import TEMPLATE, scalar
from longspec.config.yaml_files import plain
from longspec.target.fetch import write_facts
from longspec.train.stage_folder import changes
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of, check_prompts
from longspec.workflow.unnoticed import unnoticed
from tests.data.hub_standin import Hub
from tests.gguf_files import random_model
from tests.gguf_files import write as write_gguf
from tests.refusals import check, refused
from tests.workflow.planning import Settings

CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "vocab_size": 128256, "max_position_embeddings": 2048}
ROW = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
MINE = "config/run/mine.yaml"
RUN = "target: my-llama\ndata: {chats: inputs/*.jsonl}\nmethod: eagle3\n"


@pytest.fixture
def own(settings: Settings) -> Settings:
    """A copy with such a run, its data, and its target's configuration."""
    folder = settings.folder
    for name in ("inputs", "my-llama"):
        (folder / name).mkdir()
    (folder / "inputs/chats.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "my-llama/config.json").write_text(json.dumps(CONFIG))
    write(settings, RUN)
    return settings


def write(settings: Settings, text: str) -> None:
    (settings.folder / "config/run/mine.yaml").write_text(text)


def noticed(settings: Settings) -> list[str]:
    plan = settings.plan(run="mine")
    return unnoticed(plan, bench_of(plan))


def recipe_of(settings: Settings, stage: str = "train", variant: str = "ttt") -> Any:
    return settings.plan(run="mine").configs["mine", variant, stage].recipe


def test_three_lines_are_a_whole_run(own: Settings) -> None:
    """Rows as long as the target's positions allow; the numbers of ultrachat; its own records measured. No file is written."""
    before = {path.name: path.read_bytes() for path in (own.folder / "config/run").iterdir()}
    plan = own.plan(run="mine")
    assert {path.name: path.read_bytes() for path in (own.folder / "config/run").iterdir()} == before
    check_prompts(plan)
    assert list(plan.configs) == [("mine", "ttt", "train")]
    recipe = recipe_of(own)
    assert (recipe.data.name, recipe.data.sequence_length, recipe.data.collation) == ("chats", 2048, "long")
    assert (recipe.model.family, recipe.model.source, recipe.method.vocabulary) == ("llama", "my-llama", 32000)
    assert (recipe.optimizer.lr, recipe.epochs, recipe.draft.steps) == (1.0e-4, 10, 7)
    tasks = json.loads(plan.evaluation_settings("mine"))["tasks"]
    assert tasks == {"chats": {"data": "chats", "context": [16, 1536], "whole_questions": "auto"}}
    write(own, f"{RUN}evaluation: {{new_tokens: 1000}}\n")
    longest = json.loads(own.plan(run="mine").evaluation_settings("mine"))["tasks"]["chats"]["context"]
    assert longest == [16, 2048 - 1000 - 64]
    assert plan.data["chats"] == {"source": "inputs/*.jsonl", "held_out": 0.05, "shards": 1}


def test_records_of_another_source_under_its_name_are_told(own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.folder)
    for source, told in (("inputs/*.jsonl", 0), ("other.jsonl", 1)):
        write_json(Path("data/raw/chats/manifest.json"), {"settings": {"source": source}})
        lines = noticed(own)
        assert (len(lines), "".join(lines).startswith("data.chats:")) == (told, bool(told))
    inputs = {path: {"bytes": Path(path).stat().st_size} for path in map(str, Path("inputs").glob("*.jsonl"))}
    write_json(Path("data/raw/chats/manifest.json"), {"settings": {"source": "inputs/*.jsonl"}, "inputs": inputs})
    assert noticed(own) == []
    path = next(iter(inputs))
    Path(path).write_text(Path(path).read_text() * 2)
    assert noticed(own) == []  # newer: Snakemake makes the records again
    os.utime(path, (0, 0))
    [line] = noticed(own)
    assert f"data.chats: {path}:" in line


def test_the_run_that_the_readme_shows_is_planned(own: Settings, root: Path) -> None:
    """With the target in a folder of the test's."""
    page = (root / "README.md").read_text()
    run = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0].replace("/models/my-llama", "my-llama")
    (own.folder / "mine.yaml").write_text(run)
    assert "--config run=mine.yaml" in page
    plan = own.plan(run="mine.yaml")
    assert (plan.stages, plan.variants, len(plan.fetched)) == ({"mine": ["train"]}, {"mine": ["ttt"]}, 1)


def test_long_rows_have_the_length_of_the_stages_file(own: Settings) -> None:
    (own.folder / "my-llama/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 10**6}))
    assert recipe_of(own).data.sequence_length == 4096
    own.edit("config/stage/train.yaml", "sequence_length: 4096", "sequence_length: 1000")
    assert recipe_of(own).data.sequence_length == 1000


def test_gates_of_its_own_are_in_the_place_of_the_workflows(own: Settings) -> None:
    write(own, f"{RUN}gates: {{context: null}}\n")
    assert json.loads(own.plan(runs=["mine", "demo"]).gates("mine")) == {"context": None, "forgetting": 0.3}
    assert json.loads(own.plan(runs=["mine", "demo"]).gates("demo")) == {"context": 0.3, "forgetting": 0.3}
    for wrong, told in (
        ("{contxt: 1}", ("contxt: unknown key", "'context'?")),
        ("{context: 3}", ("context", "0 to 1, or null, is 3")),
    ):
        write(own, f"{RUN}gates: {wrong}\n")
        own.refuses(f"{MINE}: gates.{told[0]}", told[1], run="mine")


def test_several_data_sets_want_a_stage_each(own: Settings) -> None:
    several = RUN.replace("{chats: inputs/*.jsonl}", "{chats: inputs/*.jsonl, asked: {source: puzzles, records: 9}}")
    write(own, several)
    each = "stages: {chats: {data: chats}, asked: {data: asked}}"
    with refused(f"{MINE}: stages: missing", each) as told:
        own.plan(run="mine")
    mix = str(told.value).rpartition("stages: ")[2]  # the advice works
    write(own, f"{several}stages: {mix}\n")
    plan = own.plan(run="mine")
    assert recipe_of(own).data.name == {"asked": 0.5, "chats": 0.5}
    assert set(plan.evaluation_of["mine"].tasks) == {"chats", "asked"}
    write(own, f"{several}{each}\n")
    plan = own.plan(run="mine")
    assert [(stage, config.recipe.data.name) for (*_, stage), config in plan.configs.items()] == [
        ("chats",) * 2,
        ("asked",) * 2,
    ]
    assert set(plan.evaluation_of["mine"].tasks) == {"chats", "asked"}


@pytest.mark.parametrize("stages", ["{train: {recipe: {epochs: 2}}}", "[base]"])
def test_data_that_no_stage_trains_on_is_not_left_out_silently(own: Settings, stages: str) -> None:
    """A stage without data would train on the set that its file of config/stage/ names."""
    write(own, f"{RUN}stages: {stages}\n")
    with refused(f"{MINE}: data.chats", "stages.") as told:
        own.plan(run="mine")
    stage = str(told.value).partition("set stages.")[2].partition(".")[0]
    write(own, f"{RUN}stages: {{{stage}: {{data: chats}}}}\n")  # the advice works
    assert {config.recipe.data.name for config in own.plan(run="mine").configs.values()} == {"chats"}
    write(own, "base: demo\ndata: {chats: inputs/*.jsonl}\n")
    own.refuses(f"{MINE}: data.chats", "set stages.base.data", run="mine")
    write(own, f"{RUN.replace('{chats:', '{books: inputs/*.jsonl, chats:')}stages: {{train: {{data: chats}}}}\n")
    own.refuses(f"{MINE}: data.books", "to a mix", run="mine")


def test_a_changed_target_and_results_without_their_records_are_told(own: Settings) -> None:
    """Snakemake notices neither."""
    manifest = Path("models") / recipe_of(own).model.name / "target_manifest.json"
    write_json(manifest, {"path": "my-llama", "files": {"config.json": {}}})
    assert noticed(own) == []
    os.utime("my-llama/config.json", (later := manifest.stat().st_mtime + 9, later))
    [line] = noticed(own)
    check(line, "my-llama/config.json", "-R fetch_target")
    os.utime("my-llama/config.json", (1, 1))
    write(own, "base: demo\nbuild: {layers: 4}\n")
    deeper = own.plan(run="mine").build_yaml("demo")
    write(own, "base: demo\n")
    (manifest := Path("models/demo/build.yaml")).parent.mkdir(parents=True)
    manifest.write_text(deeper)
    [line] = noticed(own)
    check(line, f"{manifest}: is of another build", "recipe.model.name")
    manifest.unlink()
    write(own, RUN)
    Path("results/mine/ttt/train").mkdir(parents=True)
    Path("results/mine/ttt/train/recipe.yaml").touch()
    [line] = noticed(own)
    check(line, "results/", ".snakemake/")
    Path(".snakemake/metadata").mkdir(parents=True)
    Path(".snakemake/metadata/one").touch()
    assert noticed(own) == []


def test_of_a_target_that_is_not_there_yet_prompts_leave_room_for_the_text(own: Settings) -> None:
    """As after it was fetched, so that no evaluation ends then, nor is made again."""
    write(own, RUN.replace("my-llama", "hf:o/small") + "evaluation: {new_tokens: 1000}\n")
    facts = {"source": "hf:o/small", "family": "llama", "layers": 8, "tokens": 128256, "positions": 2048}
    write_json(own.folder / "config/run/mine.target.json", facts)
    before = own.plan(run="mine").evaluation_settings("mine")
    assert json.loads(before)["tasks"]["chats"]["context"] == [16, 2048 - 1000 - 64]
    write_json(Path("models") / recipe_of(own).model.name / "target/config.json", CONFIG)
    assert own.plan(run="mine").evaluation_settings("mine") == before


@pytest.mark.parametrize("measured", ["{tasks: {chats: TASK}}", "{bench: {tasks: {chats: TASK}}}"])
def test_data_may_be_measured_alone(own: Settings, measured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = "{data: chats, context: [16, 512]}"
    write(own, f"base: demo\ndata: {{chats: inputs/*.jsonl}}\nevaluation: {measured.replace('TASK', task)}\n")
    bench_of(own.plan(run="mine"))
    answered = "{source: inputs/*.jsonl, regenerate: {new_tokens: 64}}"
    write(own, f"base: demo\ndata: {{chats: {answered}}}\nevaluation: {measured.replace('TASK', task)}\n")
    plan = own.plan(run="mine")
    assert AnswersPlan(plan, bench_of(plan)).shards("demo", "chats"), "the rules make what the bench alone reads"
    monkeypatch.chdir(own.folder)
    write_json(Path("data/raw/chats/manifest.json"), {"settings": {"source": "other.jsonl"}})
    [line] = noticed(own)
    assert line.startswith("data.chats: its records here are of other.jsonl")


def test_a_run_that_derives_from_three_lines_has_their_stage(own: Settings) -> None:
    (own.folder / "inputs/books.jsonl").write_text(json.dumps(ROW) + "\n")
    for more, name in (
        ("stages: [train]", "chats"),
        ("data: {books: inputs/books.jsonl}\nstages: {train: {data: books}}", "books"),
    ):
        (own.folder / "config/run/more.yaml").write_text(f"base: mine\n{more}\n")
        assert [config.recipe.data.name for config in own.plan(run="more").configs.values()] == [name]
    (own.folder / "config/run/more.yaml").write_text("base: mine\nrecipe: {data: {name: puzzles}}\n")
    assert {config.recipe.data.name for config in own.plan(run="more").configs.values()} == {"puzzles"}


def test_shards_follow_from_the_size_of_files(own: Settings) -> None:
    with (own.folder / "inputs/large.jsonl").open("wb") as file:
        file.truncate(3 * 2**30)  # of nothing: it takes no room
    assert own.plan(run="mine").shards("chats") == 13


def test_a_target_of_the_hub_is_asked_once(own: Settings, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the run its facts are kept, and later plans ask nobody."""
    write(own, RUN.replace("my-llama", "hf:o/small"))
    kept = own.folder / "config/run/mine.target.json"
    monkeypatch.setenv("FETCH_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.add("o/small", {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"weights"})
    assert recipe_of(own).data.sequence_length == 2048
    assert not hub.asked_for(".safetensors")
    told = {"source": "hf:o/small", "family": "llama", "layers": 8, "tokens": 128256, "positions": 2048}
    assert json.loads(kept.read_text()) == told
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert recipe_of(own).model.family == "llama"
    write(own, RUN.replace("my-llama", "hf:o/other"))
    advice = "recipe: {model: {family: llama}}"
    own.refuses(f"{MINE}: target: hf:o/other", "ConnectError", "HF_TOKEN", advice, run="mine")
    named = f"{RUN.replace('my-llama', 'hf:o/other')}{advice[:-2]}, name: small}}}}\n"
    write_json(Path("models/small/target_manifest.json"), {"source": "hf:o/small"})
    write_json(Path("models/small/target/config.json"), CONFIG | {"model_type": "qwen2"})
    write(own, named)
    assert recipe_of(own).model.name == "small"  # not judged by the target that has the name now, and goes
    write(own, RUN.replace("my-llama", "hf:o/other") + advice + "\n")
    recipe = recipe_of(own)
    assert (recipe.model.source, recipe.data.sequence_length, recipe.method.vocabulary) == ("hf:o/other", 4096, 8192)


def test_a_gguf_file_says_its_family_and_its_positions(own: Settings) -> None:
    write_gguf(own.folder / "small.gguf", random_model("llama"), "F16")
    write(own, "target: small.gguf\ndata: {chats: inputs/*.jsonl}\n")
    write_facts("small.gguf", own.folder / "config/run/mine.target.json")  # as the plan has a process of its own do
    recipe = recipe_of(own, variant="sinkpi-slicing")
    kept = json.loads((own.folder / "config/run/mine.target.json").read_text())
    assert (recipe.model.source, recipe.data.sequence_length) == ("small.gguf", kept["positions"])
    made = Path("models") / recipe.model.name / "target_manifest.json"
    write_json(made, {"source": "small.gguf", "path": "target", "files": {"gone": {}}})
    assert noticed(own) == []
    os.utime("small.gguf", (later := made.stat().st_mtime + 9, later))
    [line] = noticed(own)
    check(line, "small.gguf: is newer", "-R dequantize_target")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("my-llama", "", (f"{MINE}: target", "missing", "hf:<owner>/<repository>")),
        ("my-llama", "no-llama", (f"{MINE}: target", "config/model/no-llama.yaml", "hf:<owner>/<repository>")),
        ("my-llama", "./no-llama", (f"{MINE}: target: ./no-llama", "folder (seen from")),
        ("eagle3", "eagle4", (f"{MINE}: method: 'eagle4'", "'eagle3'?")),
        ("inputs/*.jsonl", "inputs/*.jsonlines", (f"{MINE}: data.chats.source: inputs/*.jsonlines",)),
        ("{chats:", "{puzzles:", (f"{MINE}: data.puzzles", "config/workflow.yaml", "rename")),
        ("inputs/*.jsonl", "{source: inputs/*.jsonl, held_aut: 0.1}", (f"{MINE}: data.chats.held_aut", "'held_out'?")),
        ("method", "build: {layers: 2}\nmethod", (f"{MINE}: build",)),
    ],
)
def test_what_is_wrong_in_it_dies_at_the_plan(own: Settings, old: str, new: str, told: tuple[str, ...]) -> None:
    write(own, RUN.replace(old, new))
    own.refuses(*told, run="mine")


@pytest.mark.parametrize("data", ["*.jsonl", "in/chat[0-9].jsonl", "in/a, b.jsonl", "in/a #b.jsonl", "hf:o/n"])
def test_new_writes_any_name_of_files_as_yaml_reads_it(data: str) -> None:
    written = TEMPLATE.format(schema="s", comment="c", file="f", target="t", name="r", data=scalar(data), method="glide")
    assert yaml.safe_load(written)["data"] == {"r": data}


def test_a_target_that_moves_keeps_its_folders_under_its_old_name(own: Settings) -> None:
    """docs/own-model.md: then the recipe differs in the place alone, which counts for nothing beside the files' hash."""
    before, rows = recipe_of(own), own.plan(run="mine").all_rows("mine")
    (own.folder / "my-llama").rename(own.folder / "moved")
    write(own, RUN.replace("my-llama", "moved"))
    assert own.plan(run="mine").all_rows("mine") != rows
    write(own, RUN.replace("my-llama", "moved") + f"recipe: {{model: {{name: {before.model.name}}}}}\n")
    assert own.plan(run="mine").all_rows("mine") == rows
    identities = [{"recipe": plain(recipe), "target": "its files"} for recipe in (before, recipe_of(own))]
    assert identities[0] != identities[1]
    assert changes(*identities) == []


def test_a_further_stage_as_a_run_of_its_own_trains_nothing_else(own: Settings) -> None:
    """docs/eagle3.md: it takes the finished draft's vocabulary, where a stage more in the same run changes what is counted."""
    draft, file = own.folder / "results/mine/ttt/final_draft", own.folder / "config/run/more.yaml"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (own.folder / "inputs/books.txt.jsonl").write_text(json.dumps(ROW) + "\n")
    data, longer = "data: {books: inputs/books.txt.jsonl}\n", "longer: {data: books, recipe: {data: {sequence_length: 1024}}}"
    begins = "recipe: {init: results/mine/ttt/final_draft}\n"
    file.write_text(f"base: mine\n{data}stages: {{{longer}}}\n{begins}")
    plan = own.plan(run="more")
    assert list(plan.configs) == [("more", "ttt", "longer")]
    assert plan.taken_vocabulary("more", "ttt", "32000") == ["results/more/ttt/imported/draft/draft_vocabulary.json"]
    file.write_text(f"base: mine\n{data}stages: {{train: {{data: chats}}, {longer}}}\n")
    assert len(own.plan(run="more").named_rows("more", "ttt")) == 1 + len(own.plan(run="mine").named_rows("mine", "ttt"))
