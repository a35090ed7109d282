"""Replayed stages and mixed data sets in the plan: who reads what, what is refused, and that other runs plan as before."""

import re
from pathlib import Path

import pytest

from longspec.workflow.states import StatesPlan
from tests.workflow.planning import Copied, Settings

BASE = "variant 'sinkpi-slicing', stage 'base': recipe.data.name"
PACKED = "data/packed/demo/{}-longcot-2048-split/manifest.json"


def stage_file(folder: Path, shares: str) -> None:
    """A third stage of its own that replays."""
    numbers = (
        f"recipe:\n  data: {{name: puzzles, sequence_length: 2048, overlong: split, replay: {shares}}}\n  global_batch: 2\n"
        "  steps: 80\nruntime: {held_out_every: 80}\n"
    )
    Copied(folder).edit("config/run/demo.yaml:longcot", r"(?s)\A.*\Z", numbers)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ("{basis: 0.2}", (".basis", "'base'?")),
        ("{longcot: 0.2}", (".longcot", "this stage", "earlier stages")),
        ("{base: -0.1}", (".base", "above 0 to below 1, is -0.1")),
        ("{base: 0.5, long: 0.5}", (": the shares of base, long are 1", "leave some")),
        ("{base: much}", (".base: Value 'much'", "Float")),
    ],
)
def test_what_cannot_be_replayed_dies_at_the_plan(settings: Settings, shares: str, told: tuple[str, ...]) -> None:
    stage_file(settings.folder, shares)
    settings.refuses(f"run 'demo', variant 'sinkpi-slicing', stage 'longcot': recipe.data.replay{told[0]}", *told[1:])


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        ("{stdlib: 0.7, puzles: 0.3}", ("stage 'base': recipe.data.name.puzles", "'puzzles'?")),
        ("{stdlib: 1.2, puzzles: -0.2}", (f"{BASE}.stdlib", "above 0 to below 1, is 1.2")),
        ("{stdlib: 0.7, puzzles: 0.2}", (f"{BASE}: the shares of stdlib, puzzles are 0.9", "sum is 1")),
        ("[stdlib, puzzles]", (f"{BASE}: ['stdlib', 'puzzles']", "such as {chats: 0.7")),
    ],
)
def test_what_cannot_be_mixed_dies_at_the_plan(settings: Settings, mix: str, told: tuple[str, ...]) -> None:
    settings.edit("config/run/demo.yaml:base", "name: stdlib", f"name: {mix}")
    settings.refuses(f"run 'demo', {told[0]}", *told[1:])


def test_a_mix_is_planned_as_its_page_has_it(settings: Settings, root: Path) -> None:
    """Rows and states of each data set, which another run shares; a stage that replays the mix has its data sets."""
    [run] = re.findall(r"`config/run/mixed\.yaml`:\n\n```yaml\n(.*?)```", (root / "docs/data.md").read_text(), re.DOTALL)
    runs = settings.folder / "config/run"
    (runs / "mixed.yaml").write_text(run)
    mixed = ("mixed", "sinkpi-slicing")
    plan = settings.plan(runs=["mixed"])
    puzzles, stdlib = (f"data/packed/demo/{name}-base-128-split/manifest.json" for name in ("puzzles", "stdlib"))
    assert plan.rows(*mixed, "base") == [puzzles, stdlib]
    assert plan.named_rows(*mixed)[:2] == [f"base/puzzles={puzzles}", f"base/stdlib={stdlib}"]
    named = [f"base/puzzles={PACKED.format('puzzles')}", f"base/stdlib={PACKED.format('stdlib')}"]
    replayed = plan.replayed_rows(*mixed, "longcot")
    assert plan.replay_options(*mixed, "longcot", replayed)[1:3] == named
    assert plan.configs[*mixed, "longcot"].recipe.data.replay == {"base/puzzles": 0.06, "base/stdlib": 0.14, "long": 0.6}
    assert {puzzles, stdlib, *replayed} < set(plan.trained_rows("mixed"))
    own = "  base: {data: {stdlib: 0.7, puzzles: 0.3}}\n  long:\n"
    assert own in run
    other = run.replace(own, "  base:\n  long: {data: {stdlib-long: 0.7, puzzles: 0.3}}\n")
    (runs / "stored.yaml").write_text(other.replace("base: demo\n", "base: demo-offline\n"))
    states = StatesPlan(settings.plan(runs=["stored", "demo-offline"]))
    stage, alone = ("stored", "sinkpi-slicing", "long"), ("demo-offline", "sinkpi-slicing", "long")
    folders = {folder.split("/")[3]: folder for folder, stages in states.readers.items() if stage in stages}
    packed = "long-nomask-4096-split"
    first, second = (folders[f"{name}-{packed}"] for name in ("puzzles", "stdlib-long"))
    assert states.readers[folders[f"stdlib-long-{packed}"]] == [stage, alone]
    shards = [f"{folder}/{part}-of-2/shard.json" for folder in (first, second) for part in range(2)]
    shards += [f"{folder}/held-out-1/shard.json" for folder in (first, second)]
    assert states.options(*stage) == ["--states", *shards]
    (runs / "other.yaml").write_text(run.replace("longcot:\n", "longcot: {recipe: {data: {replay: {base/stdlb: 0.1}}}}\n"))
    place = "run 'other', variant 'sinkpi-slicing', stage 'longcot': recipe.data.replay.base/stdlb: stage 'base'"
    settings.refuses(place, "'stdlib'?", runs=["other"])


def test_states_of_replayed_rows_are_stored_and_read_beside_the_stages_own(settings: Settings) -> None:
    run = ("demo-offline", "sinkpi-slicing", "longcot")
    stage_file(settings.folder, "{long: 0.2, base: 0.3}")
    states = StatesPlan(settings.plan(runs=["demo-offline"]))
    folders = {folder.split("/")[3]: folder for folder, stages in states.readers.items() if run in stages}
    own, base, long = (folders[f"{name}-longcot-2048-split"] for name in ("puzzles", "stdlib", "stdlib-long"))
    shards = [f"{folder}/{part}-of-2/shard.json" for folder in (own, base, long) for part in range(2)]
    assert states.read("/".join(run)) == [*shards, f"{own}/held-out-1/shard.json"]
