"""The sweep's settings: each changes of today's recipe what it names, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import sweep
from benchmarks.workflow_copy import WorkflowCopy
from longspec.config import compose_stage, plain
from longspec.report.tables import flatten

STAGES = ("base",)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> WorkflowCopy:
    made = WorkflowCopy(tmp_path_factory.mktemp("sweep"))
    made.refresh()
    return made


def recipe(method: str, setting: str, copy: WorkflowCopy) -> dict[str, Any]:
    """The recipe that Snakemake would freeze."""
    name = sweep.run_of(method, setting, 7, STAGES)
    config: Path = copy.folder / "config"
    return flatten(plain(compose_stage(name, sweep.RUNS[method][1], *STAGES, config).recipe))


@pytest.mark.parametrize("method", sweep.SETTINGS)
def test_a_setting_changes_what_it_names(method: str, copy: WorkflowCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "COPY", copy)
    run, variant = sweep.RUNS[method]
    demo = flatten(plain(compose_stage(run, variant, *STAGES).recipe))
    today = recipe(method, sweep.TODAY, copy)
    assert today == demo | {"seed": 7}
    for setting, values in sweep.SETTINGS[method].items():
        changed = recipe(method, setting, copy)
        wanted = flatten(values)
        assert changed == today | wanted, setting
        assert all(today.get(key) != value for key, value in wanted.items()), f"{setting}: as today"


def test_settings_have_runs_of_their_own(copy: WorkflowCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "COPY", copy)
    names = [sweep.run_of(method, setting, 7, STAGES) for method in sweep.SETTINGS for setting in sweep.SETTINGS[method]]
    assert len(set(names)) == len(names)


def test_the_table_pairs_with_today_of_the_same_seed() -> None:
    def cell(setting: str, seed: int, tokens: float) -> dict[str, Any]:
        return {"method": "glide", "setting": setting, "seed": seed, "tokens_a_round": {"all": tokens, "cot": 2 * tokens}}

    cells = [cell(sweep.TODAY, 1, 2.0), cell(sweep.TODAY, 2, 3.0), cell("linear", 2, 3.5), cell("rate 0.03", 3, 1.0)]
    told = sweep.table(cells)
    assert told["eagle3"] == {}
    assert list(told["glide"]) == ["linear", sweep.TODAY, "rate 0.03"]
    assert told["glide"]["linear"]["cot"]["to today"]["each"] == [1.0]
    assert "to today" not in told["glide"]["rate 0.03"]["all"]
