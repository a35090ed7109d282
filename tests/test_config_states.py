"""recipe.states: what may be stored, and that a recipe at its default is frozen as before there were states."""

from pathlib import Path
from typing import Any

import pytest

from longspec.config import Recipe, compose, load, plain, to_yaml
from longspec.workflow.states import folder_name

GLIDE = ["run=demo", "stage=long", "variant=sinkpi-slicing"]
EAGLE3 = ["run=demo-eagle3", "stage=long"]
OFFLINE = "recipe.states.source=offline"


def recipe(*overrides: str) -> Any:
    return compose("train", list(overrides)).recipe


def test_the_default_is_not_written(root: Path, tmp_path: Path) -> None:
    """Nor is it where it is given by its words; what was frozen before is read as online."""
    frozen = (root / "tests/golden/demo/long.recipe.yaml").read_text()
    assert "states" not in frozen
    for more in ([], ["recipe.states.source=online"], ["recipe.states.dtype=bfloat16", "recipe.states.top_k=null"]):
        assert to_yaml(recipe(*GLIDE, *more)) == to_yaml(recipe(*GLIDE))
        assert "states" not in plain(recipe(*GLIDE, *more))
    (tmp_path / "recipe.yaml").write_text(frozen)
    read = load(tmp_path / "recipe.yaml", Recipe)
    assert (read.states.source, read.states.dtype, read.states.top_k) == ("online", "bfloat16", None)
    assert to_yaml(read) == frozen
    text = to_yaml(recipe(*GLIDE, OFFLINE, "recipe.states.top_k=64"))
    assert "states:\n  dtype: bfloat16\n  source: offline\n  top_k: 64\n" in text


ANCHORS = (
    r"recipe\.draft\.anchors: random: positions of rows of 128 tokens .* drawn anew in every step, .* train this stage with "
    r"recipe\.states\.source: online \(a run's other stages may stay offline\), or set recipe\.draft\.anchors: off"
)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([*GLIDE[:1], "stage=base", GLIDE[2], OFFLINE, "recipe.draft.start=random"], ANCHORS),
        ([*GLIDE, OFFLINE, "recipe.draft.loss=hard", "recipe.states.top_k=4"], r"recipe\.states\.top_k: 4: this draft learns"),
        (
            [*EAGLE3, OFFLINE, "recipe.states.top_k=769"],
            r"top_k: 769 tokens are more than the draft can propose, 768 \(recipe\.m",
        ),
        ([*GLIDE, "recipe.states.dtype=float8"], r"recipe\.states\.dtype: float8: nothing is stored; set .*source: offline"),
        ([*GLIDE, "recipe.states.top_k=8"], r"recipe\.states\.top_k: 8: nothing is stored"),
    ],
)
def test_refused_when_it_is_planned(overrides: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recipe(*overrides)


def test_the_name_of_a_folder() -> None:
    """Shared by all that read the same states; else another one."""
    long = recipe(*GLIDE, OFFLINE)
    same = recipe(*GLIDE, OFFLINE, "recipe.optimizer.lr=0.5", "recipe.draft.temperature=2", "recipe.draft.loss=mix")
    assert folder_name(long) == folder_name(same)
    assert folder_name(long).startswith("last-keys-values-final-bfloat16-")
    eagle3 = recipe(*EAGLE3, OFFLINE)
    assert folder_name(eagle3).startswith("hidden-0-1-2-final-bfloat16-")
    assert folder_name(eagle3, "a") == folder_name(eagle3, "b"), "a vocabulary counts for likeliest tokens alone"
    top = recipe(*EAGLE3, OFFLINE, "recipe.states.top_k=64")
    changed = [recipe(*GLIDE, OFFLINE, more) for more in ("recipe.states.dtype=float8", "recipe.draft.loss=hard")]
    changed += [recipe(*GLIDE, OFFLINE, more) for more in ("recipe.states.top_k=64", "recipe.precision=bf16")]
    changed += [recipe(*GLIDE, OFFLINE, "recipe.states.top_k=64", "recipe.draft.temperature=2"), long, eagle3]
    names = [folder_name(each) for each in changed] + [folder_name(top, "a"), folder_name(top, "b")]
    assert len(set(names)) == len(names)
