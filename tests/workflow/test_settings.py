"""Values of config/workflow.yaml that are wrong, by key; the functions that the rules ask, without Snakemake."""

import copy
import datetime
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake.cli import parse_config

from longspec.config import CONFIG_DIR, yaml_files
from longspec.config.faults import check
from longspec.data import presets
from longspec.measure import tasks
from longspec.workflow.settings.workflow_file import WorkflowFile, check_text, typed_call
from tests.refusals import refused

NAN, INF, HUGE = math.nan, math.inf, 10**12
NAMES = ["x$(touch INJECTED)", "../x", "a b", ".a", "-rf", "", "a\n", "a_b", "x" * 101, 1, None]
WRONG: dict[str, list[Any]] = {
    "runs": [[], "demo", ["demo", "demo"]],
    "runs.0": NAMES,
    "variants.0": NAMES,
    "data.stdlib.shards": [0, HUGE, True, 1.5],
    "data.stdlib.source": ["", [], [""], 5, datetime.date(2026, 1, 1)],
    "data.puzzles.seed": [-1, 10**40, 2**63, 0.5],
    "data.puzzles.regenerate": [{}, {"new_tokens": 8, "temprature": 1}],
    "data.stdlib-long.as": ["book", "", None],
    "data.longcot.max_rejected": [NAN, -0.1, 1.1],
    "data.longcot.align": [[{"set": {"text": NAN}}], [{"set": {"day": datetime.date(2026, 1, 1)}}], [{"set": {1: "a"}}], "set"],
    "evaluation.temperatures": [[], [NAN], [INF], [-INF], [-1], [1e-30], [1e6], ["0"], [False], [True], 0],
    "evaluation.shapes": [[], [0], [10**8], [[]], [[1, 10**8]], [[1] * 65], [[4, 0]], [2.5], [NAN]],
    "evaluation.tasks": [{}, {"a b": {"data": "stdlib", "context": [1, 2]}}, {"../x": {"data": "stdlib", "context": [1, 2]}}],
    "evaluation.tasks.short.context": [[1024, 10**9], [0, 1], [1], [1, 2, 3], [NAN, 2]],
    "evaluation.tasks.short.whole_questions": [1, 0, "yes", None],
    "gates.forgetting": [NAN, INF, -0.1, 1.1, "0.1"],
    "extra": [1],
}
CASES = [(key, value) for key, values in WRONG.items() for value in values]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The file as it stands in the repository, its presets laid out, with the demo's tasks."""
    found = yaml_files.read(CONFIG_DIR / "workflow.yaml")
    found["data"] = {name: presets.expand(name, entry) for name, entry in found["data"].items()}
    found["evaluation"] |= yaml_files.read(CONFIG_DIR / "run/demo.yaml")["evaluation"]
    check(WorkflowFile, found)
    return found


@pytest.mark.parametrize(("key", "value"), CASES, ids=[f"{key}={value!r}"[:60] for key, value in CASES])
def test_a_wrong_value_is_refused_with_its_key(settings: dict[str, Any], key: str, value: Any) -> None:
    wrong = copy.deepcopy(settings)
    *above, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
    place: Any = wrong
    for part in above:
        place = place[part]
    place[last] = value
    with refused(re.compile(rf"{key}\b")) as caught:
        check(WorkflowFile, wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["", "data.puzzles.", "evaluation.", "evaluation.tasks.short.", "gates."])
def test_a_token_is_refused_by_its_name_and_not_shown(settings: dict[str, Any], place: str) -> None:
    wrong: Any = copy.deepcopy(settings)
    section = wrong
    for part in place.split(".")[:-1]:
        section = section[part]
    section["hf_token"] = "hf_secretOfNobody"
    with refused(f"{place}hf_token: unknown key") as caught:
        check(WorkflowFile, wrong)
    assert "secretOfNobody" not in str(caught.value)


def test_values_of_a_call_are_those_that_a_file_would_have() -> None:
    """Snakemake reads every value in braces as text; what reads as no number, true, false or null stays one."""
    given = {
        "evaluation": "{prompts: 7, temperatures: [0, 0.5], shapes: [3, [4, 16]], draft_vocabulary: null}",
        "data": "{x: {source: ['1.jsonl'], revision: v2, shards: 4, held_out: 0.1, max_rejected: '['}}",
        "gates": "{forgetting: many}",
        "keep_states": "true",
    }
    read = parse_config([f"{key}={text}" for key, text in given.items()])
    assert read["evaluation"]["prompts"] == "7"
    assert typed_call(read) == {key: yaml.safe_load(text) for key, text in given.items()}
    assert typed_call({}) == {}
    texts = {"runs": ["2024", "no"], "data": {"x": {"revision": "1.0", "align": [{"filter": {"field": "a", "equals": "1"}}]}}}
    assert typed_call(texts) == texts


def test_a_tree_of_too_many_nodes_is_refused(settings: dict[str, Any]) -> None:
    """Each level may have so many, all of them together may not."""
    section = settings["evaluation"] | {"shapes": [[1, *[1000] * 5]]}
    with refused("evaluation.shapes", "5001 nodes; 1024 is"):
        tasks.parse(section)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"runs: [a]\nruns: [b]\n", [": line 2: key 'runs'", "line 1"]),
        (b"__use_yte__: true\nruns: [?open('x')]\n", [": __use_yte__"]),
        (b"a: !!python/object/apply:os.system [x]\n", [": line 1", "constructor", "tag"]),
        (b"- a\n", ["", "mapping", "keys such"]),
        (b"a: [1\nb: 2\n", [": line 2", "',' or ']'"]),
        (b"a: 1\n\tb: 2\n", [": line 2", "character '\\t'"]),
        (b"a: \x00\n", ["", "special characters"]),
        (b"a: 1\nb: \xff\n", [": line 2: byte 0xff", "UTF-8"]),
    ],
)
def test_a_file_that_snakemake_would_misread_is_refused_with_the_line(tmp_path: Path, text: bytes, told: list[str]) -> None:
    path = tmp_path / "workflow.yaml"
    path.write_bytes(text)
    with refused(f"{path}{told[0]}", *told[1:]) as caught:
        check_text(path)
    assert "\n" not in str(caught.value)
