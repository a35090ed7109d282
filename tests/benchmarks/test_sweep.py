"""The sweep's settings: each changes of the recipe what it names, and nothing else."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sweep
from benchmarks.workflow_copy import WorkflowCopy
from longspec.config import compose_stage, plain
from longspec.report.tables import flatten

STAGES = {"demo": ("base", "long", "longcot"), "smollm2": ("answers",)}


@pytest.fixture(params=STAGES)
def size(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A size of the sweep, whose runs are written into a folder of the test."""
    name = str(request.param)
    made = WorkflowCopy(tmp_path)
    made.refresh()
    monkeypatch.setitem(sweep.SIZES, name, dataclasses.replace(sweep.SIZES[name], copy=made))
    return name


def recipe(size: str, run: str, method: str, stage: str) -> dict[str, Any]:
    """The recipe that Snakemake would freeze, in which AdamW goes without saying."""
    variant, config = sweep.SIZES[size].runs[method][1], sweep.SIZES[size].copy.folder / "config"
    return {"optimizer.name": "adamw"} | flatten(plain(compose_stage(run, variant, stage, config).recipe))


@pytest.mark.parametrize("method", sweep.SETTINGS)
def test_a_setting_changes_what_it_names(size: str, method: str) -> None:
    demo = flatten(plain(compose_stage(*sweep.DEMO[method], "base").recipe))
    settings = {  # on SmolLM2 the plan refuses some of the draft: from stored states no layer of the target can be copied
        setting: values for setting, values in sweep.SETTINGS[method].items() if size == "demo" or "draft" not in values
    }
    names = {setting: sweep.run_of(size, method, setting, 7, STAGES[size]) for setting in settings}
    assert len(set(names.values())) == len(names)
    for stage in STAGES[size]:
        before = recipe(size, sweep.SIZES[size].runs[method][0], method, stage)
        adamw = recipe(size, names[sweep.ADAMW], method, stage)
        assert adamw == before | {"seed": 7, "optimizer.name": "adamw"}
        for setting, values in settings.items():
            changed, wanted = recipe(size, names[setting], method, stage), flatten(values)
            factor = wanted.pop("optimizer.lr", demo["optimizer.lr"]) / demo["optimizer.lr"]
            assert changed.pop("optimizer.lr") == pytest.approx(factor * adamw["optimizer.lr"], rel=1e-12), setting
            assert changed == {key: value for key, value in adamw.items() if key != "optimizer.lr"} | wanted, setting
            if setting != sweep.ADAMW and stage == "base":
                assert factor != 1 or changed != {key: value for key, value in adamw.items() if key != "optimizer.lr"}, setting


def test_the_table_pairs_with_adamw_of_the_same_seed() -> None:
    def cell(setting: str, seed: int, tokens: float) -> dict[str, Any]:
        return {"method": "glide", "setting": setting, "seed": seed, "tokens_a_round": {"all": tokens, "cot": 2 * tokens}}

    cells = [cell(sweep.ADAMW, 1, 2.0), cell(sweep.ADAMW, 2, 3.0), cell("linear", 2, 3.5), cell("rate 0.03", 3, 1.0)]
    told = sweep.table(cells)
    assert told["eagle3"] == {}
    assert list(told["glide"]) == ["linear", sweep.ADAMW, "rate 0.03"]
    assert told["glide"]["linear"]["cot"]["to AdamW"]["each"] == [1.0]
    assert "to AdamW" not in told["glide"]["rate 0.03"]["all"]
