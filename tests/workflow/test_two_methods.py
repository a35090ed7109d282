"""Runs of two methods in one call: variants by run, and draft vocabularies from their count to whoever reads them."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from longspec.config import yaml_files
from longspec.workflow.states import StatesPlan
from tests.workflow.planning import FILE, Settings

pytestmark = pytest.mark.slow  # half a minute and more as a whole

BOTH = ["demo", "demo-eagle3"]
EAGLE3 = ("demo-eagle3", "ttt")
SIZE = 512
RUN = "config/run/demo-eagle3.yaml"
VOCABULARY = f"results/demo-eagle3/ttt/draft_vocabulary_{SIZE}.json"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The settings, whose numbers of EAGLE-3 do not depend on how the demo is tuned."""
    settings.edit(RUN, r"^  method: .*$", f"  method: {{layers: [0, 1, 2], vocabulary: {SIZE:04}}}")
    settings.edit(RUN, rf"vocabulary: {SIZE:04}", f"vocabulary: {SIZE}")
    return settings


def another(settings: Settings, name: str, **method: object) -> None:
    """A run as demo-eagle3 with some settings of its method, in the variants ttt and short."""
    (settings.folder / "config/variant/short.yaml").write_text("# @package recipe.draft\nsteps: 2\ndecay: 0.8\n")
    text = (settings.folder / RUN).read_text().replace("variants: [ttt]", "variants: [short, ttt]")
    told = json.dumps({"layers": [0, 1, 2], "vocabulary": SIZE} | method)
    (settings.folder / f"config/run/{name}.yaml").write_text(re.sub(r"(?m)^  method: .*$", f"  method: {told}", text))


def test_variants_of_one_run_may_be_of_two_methods(settings: Settings, root: Path) -> None:
    """Its states are stored, those of EAGLE-3 once for both."""
    settings.add_benchmarks(root)
    run = "smollm2-methods"
    variants = ["smollm2-glide", "smollm2-eagle3", "smollm2-eagle3-window", "smollm2-dflash"]
    plan = settings.plan(runs=[run])
    assert plan.variants[run] == variants
    assert [plan.first_recipe(run, variant).method.name for variant in variants] == ["glide", "eagle3", "eagle3", "dflash"]
    assert len({str([plan.rows(run, variant, stage) for stage in plan.stages[run]]) for variant in variants}) == 1
    assert plan.report_variants(run) == [f"--variant {variant}=results/{run}/{variant}" for variant in variants]
    stored = [{stage[:2] for stage in stages if stage[0] == run} for stages in StatesPlan(plan).readers.values()]
    assert stored == [{(run, variants[0])}, {(run, variants[1]), (run, variants[2]), (run, variants[3])}]


def test_two_runs_are_compared_by_all_that_their_reports_read(settings: Settings) -> None:
    plan = settings.plan(runs=BOTH, variants=["base", "sinkpi-slicing"])
    options = plan.compared_options("demo", "demo-eagle3")
    named = [f"demo/{name}=results/demo/{name}" for name in ("base", "sinkpi-slicing")]
    named.append("demo-eagle3/ttt=results/demo-eagle3/ttt")
    assert [value for option, value in pairwise(options) if option == "--variant"] == named
    assert options[options.index("--vocabulary") + 1] == VOCABULARY
    assert not any(json.loads(options[options.index("--gates") + 1]).values())  # which may differ between the runs
    assert set(plan.report_records("demo") + plan.trained_rows("demo-eagle3")) < set(options)


def test_glide_may_draft_over_a_vocabulary_and_its_training_does_not_know(settings: Settings) -> None:
    """Neither do the drafts of another method, whose own vocabulary holds, nor the settings of any evaluation."""
    before = settings.plan(runs=BOTH)
    settings.edit(str(FILE), r"draft_vocabulary: null", "draft_vocabulary: 100")
    plan, glide = settings.plan(runs=BOTH), ("demo", "sinkpi-slicing")
    path = "results/demo/sinkpi-slicing/draft_vocabulary_100.json"
    assert plan.vocabulary(*glide) == plan.drafter_vocabulary(*glide, "lookup") == []
    assert plan.drafter_vocabulary(*glide, "untrained") == plan.drafter_vocabulary(*glide, "base") == [path]
    assert plan.report_vocabularies("demo") == [path]
    assert plan.taken_vocabulary(*glide, "100") == []
    assert plan.drafter_vocabulary(*EAGLE3, "base") == [VOCABULARY]
    assert plan.evaluation_settings("demo") == before.evaluation_settings("demo")
    assert "draft_vocabulary" not in plan.evaluation_settings("demo")


def test_another_runs_vocabulary_is_taken_in_the_variant_of_that_name(settings: Settings) -> None:
    """Of a run that is not chosen, too."""
    another(settings, "lender")
    another(settings, "borrower", vocabulary_from="lender")
    another(settings, "last", vocabulary_from="demo")
    plan = settings.plan(runs=["borrower"])
    assert (plan.runs, list(plan.files)) == (["borrower"], ["borrower", "lender"])
    for variant in ("short", "ttt"):
        taken = plan.taken_vocabulary("borrower", variant, str(SIZE))
        assert taken == [f"results/lender/{variant}/draft_vocabulary_{SIZE}.json"]
        assert plan.taken_vocabulary("lender", variant, str(SIZE)) == []
    drafts = {path.partition("/final_draft/")[0] + "/final_draft" for path in plan.all_final_drafts()}
    assert drafts == {f"results/borrower/{name}/final_draft" for name in ("short", "ttt")}
    glide = settings.plan(runs=["last"]).taken_vocabulary("last", "ttt", str(SIZE))
    assert glide == [f"results/demo/sinkpi-slicing/draft_vocabulary_{SIZE}.json"]
    folder = settings.folder / "else"  # a file with data of its own, by its path, as a chosen run, and by the one beside it
    folder.mkdir()
    (folder / "own.jsonl").write_text('{"text": "a"}\n')
    text = (settings.folder / "config/run/lender.yaml").read_text().replace("name: puzzles,", "name: own,")
    (folder / "apart.yaml").write_text(f"{text}data: {{own: else/own.jsonl}}\n")
    for name, runs in (("else/apart.yaml", ["borrower"]), ("apart", ["else/apart.yaml", "borrower"])):
        another(settings, "borrower", vocabulary_from=name)
        taken = settings.plan(runs=runs).taken_vocabulary("borrower", "ttt", str(SIZE))
        assert taken == [f"results/apart/ttt/draft_vocabulary_{SIZE}.json"]
    (settings.folder / "config/run/borrower.yaml").rename(folder / "beside.yaml")
    assert list(settings.plan(runs=["else/beside.yaml"]).files) == ["beside", "apart"]


KEY, LENT = "run 'demo-eagle3', variant 'ttt'", "recipe.method.vocabulary_from"
STAGE = "run 'demo-eagle3', stage 'base': recipe.method"
# By what is wrong: what the run says of its method, and the key that is named, with facts.
WRONG: dict[str, tuple[Any, ...]] = {
    "a run that is none": ({"vocabulary_from": "dmo"}, f"{KEY}: {LENT}", "config/run/dmo.yaml", "'demo'?"),
    "another target": ({"vocabulary_from": "published"}, f"{KEY}: {LENT}: 'published'", "'qwq-32b-preview'"),
    "all tokens of another": ({"vocabulary": None, "vocabulary_from": "demo"}, f"{KEY}, stage 'base': {LENT}", "is null"),
    "more tokens than there are": ({"vocabulary": 1024}, f"{STAGE}.vocabulary: 1024", "1024 tokens"),
    "layers that are not there": ({"layers": [0, 1, 3]}, f"{STAGE}.layers: [0, 1, 3]", "layers 0 to 2"),
    "no layers": ({"layers": None}, f"{STAGE}.layers", "3 layers, such as [0, 1, 2]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vocabulary_or_layers_that_do_not_fit_die_at_the_plan(settings: Settings, case: str) -> None:
    changed, place, *facts = WRONG[case]
    told = json.dumps({"layers": [0, 1, 2], "vocabulary": SIZE} | changed)
    settings.edit(RUN, r"^  method: .*$", f"  method: {told}")
    settings.refuses(place, *facts, runs=["demo-eagle3"])


def test_a_fetched_targets_size_is_known_once_it_is_there(settings: Settings) -> None:
    settings.edit(RUN, "target: demo", "target: qwen3-8b")
    settings.edit(RUN, r"^  long:\n(?:    .*\n)+(?:  longcot:\n)(?:    .*\n)+", "")
    settings.plan(runs=["demo-eagle3"])
    folder = settings.folder / "models/qwen3-8b/target"
    folder.mkdir(parents=True)
    told = {"model_type": "qwen3", "num_hidden_layers": 36, "vocab_size": 100, "max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(told))
    settings.refuses(f"{STAGE}.vocabulary: 512", "100 tokens", runs=["demo-eagle3"])


def test_a_vocabulary_to_draft_with_must_leave_something_out(settings: Settings) -> None:
    settings.edit(str(FILE), "draft_vocabulary: null", "draft_vocabulary: 1024")
    settings.plan(runs=["demo-eagle3"])  # not used
    settings.refuses(f"{FILE}: evaluation.draft_vocabulary: 1024", "run 'demo', stage 'base'", "1024 tokens", runs=BOTH)


def test_levels_that_a_vocabulary_cannot_fill_die_at_the_plan(settings: Settings) -> None:
    """Of the evaluation's for GLIDE, of its own for EAGLE-3."""
    settings.edit(RUN, f"vocabulary: {SIZE}", "vocabulary: 4")
    evaluation = yaml_files.read(FILE)["evaluation"] | {"draft_vocabulary": 4}
    for run, key in (("demo", "evaluation.draft_vocabulary"), ("demo-eagle3", "recipe.method.vocabulary")):
        settings.plan(runs=[run], evaluation=evaluation | {"shapes": [4, [4, 16]]})
        place, evaluated = f"{FILE}: evaluation.shapes: shape (16, 16): level 1", evaluation | {"shapes": [4, [16, 16]]}
        settings.refuses(place, f"4 ({key} of run '{run}'", runs=[run], evaluation=evaluated)


def test_stages_of_two_drafts_are_refused(settings: Settings) -> None:
    settings.edit("config/run/demo-eagle3.yaml:long", "^recipe:$", "recipe:\n  method: {vocabulary: 256}")
    place = f"{KEY}, stage 'long': recipe.method.vocabulary: 512 -> 256"
    settings.refuses(place, "stage 'base'", f"in {RUN}", runs=["demo-eagle3"])
    settings.edit("config/run/demo.yaml:long", "^recipe:$", "recipe:\n  draft: {final_norm: true}")
    place = "run 'demo', variant 'sinkpi-slicing', stage 'long': recipe.draft.final_norm: False -> True"
    settings.refuses(place, "stage 'base'", runs=["demo"])


def test_wrong_variants_of_a_run_are_refused(settings: Settings) -> None:
    settings.edit(RUN, r"^variants: .*$", "variants: [tt]")
    settings.refuses(f"{RUN}: variants", "config/variant/tt.yaml", runs=["demo-eagle3"])
