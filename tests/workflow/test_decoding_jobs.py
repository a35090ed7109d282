"""On how many ranks evaluations and answers decode: by the target's weights, by hand; what cannot be is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longspec.families import FAMILIES
from longspec.models.target import check_splits
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of
from longspec.workflow.jobs.decoding_jobs import DecodingJobs, Machine, Target, machine_of, ranks_of, read_target
from longspec.workflow.plan import Plan
from tests.workflow.planning import FILE, Settings

WEIGHTS = 8_000_000_000
CONFIG = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
NODE = Machine("evaluate", gpus=8, node_gres="gpu:8", gpu_mem=80_000)
QWQ, LLAMA = (Target(weights, "num_key_value_heads", 8) for weights in (32_763_876_352, 70_553_706_496))
RUN, OWN = ("demo", "sinkpi-slicing", "lookup"), ("answer", "", "demo", "own")


def place_target(folder: Path, **changed: Any) -> None:
    """A target of so many weights, whose file takes no room."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    with (folder / "model.safetensors").open("w") as weights:
        weights.truncate(2 * WEIGHTS)


@pytest.mark.parametrize(
    ("target", "element", "gpu_mem", "ranks"),
    [(QWQ, 2, 140_000, 1), (QWQ, 2, 80_000, 2), (QWQ, 4, 80_000, 4), (LLAMA, 2, 80_000, 4), (LLAMA, 2, 140_000, 2)],
)
def test_published_targets_take_the_fewest_ranks_that_hold_them(target: Target, element: int, gpu_mem: int, ranks: int) -> None:
    assert ranks_of("x", target, element, replace(NODE, gpu_mem=gpu_mem)) == ranks


def test_by_hand_stands_in_the_weights_place_and_what_cannot_be_is_refused() -> None:
    assert ranks_of("x", None, 2, NODE) == ranks_of("x", LLAMA, 2, replace(NODE, gpu_mem=0)) == 1
    assert ranks_of("x", None, 2, replace(NODE, ranks=2)) == ranks_of("x", QWQ, 2, replace(NODE, ranks=2)) == 2
    with pytest.raises(ValueError, match=r"set-resources: evaluate: ranks: 3: x: .* 8 num_key_value_heads .* 1, 2, 4, 8$"):
        ranks_of("x", QWQ, 2, replace(NODE, ranks=3))
    with pytest.raises(
        ValueError, match=r"^x: .* 141 GB; set-resources: evaluate: gpu_mem: 40000 MB .* 24 GB .* at most 2 GPUs"
    ):
        ranks_of("x", LLAMA, 2, replace(NODE, gpus=2, gpu_mem=40_000))


SHAPE = {"num_attention_heads": 16, "num_key_value_heads": 4}
KINDS = (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Phi3Config,
    GptOssConfig,
    Olmo2Config,
    Glm4Config,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.model_type)
def test_ranks_are_those_that_the_target_can_be_split_over(tmp_path: Path, kind: type[PretrainedConfig]) -> None:
    config = kind(**SHAPE)
    place_target(tmp_path, **config.to_dict())
    target = read_target(tmp_path)
    assert target is not None
    for ranks in range(2, 9):
        try:
            check_splits(config, ranks, "t")
        except ValueError:
            assert ranks not in target.fitting(8)
        else:
            assert ranks in target.fitting(16) or 16 % ranks, "other numbers are not taken"


def test_every_family_is_shown() -> None:
    assert {kind.model_type for kind in KINDS} == set(FAMILIES)


def test_a_target_is_known_when_it_is_whole(tmp_path: Path) -> None:
    assert read_target(tmp_path) is None
    place_target(tmp_path)
    assert read_target(tmp_path) == Target(WEIGHTS, "num_key_value_heads", 8)
    (tmp_path / "model.safetensors").unlink()
    assert read_target(tmp_path) is None, "as while it is fetched"


def test_the_machine_is_the_profiles() -> None:
    train = {"gres": "'gpu:h100:8'"}
    found = machine_of("answer", {"gpu_mem": "80000", "slurm_partition": "gpu"}, train)
    assert found == Machine("answer", 8, "", "gpu:h100:8", 80_000)
    assert (found.asked(1), found.asked(4)) == ("gpu:h100:1", "gpu:h100:4")
    assert machine_of("answer", {}, {"gres": "gpu:8"}).asked(2) == "gpu:2"
    assert machine_of("answer", {}, {}).asked(2) == ""
    own = machine_of("answer", {"gres": "'gpu:a40:4'", "ranks": "2"}, train)
    assert (own.gpus, own.ranks, own.asked(2)) == (4, 2, "gpu:a40:4")
    for block, told in (
        ({"gres": "gpu:1", "ranks": "2"}, r"ranks: 2 processes, .* gres of answer: gpu:1 has 1"),
        ({"ranks": "16"}, r"ranks: 16 processes, .* gres of train: gpu:h100:8 has 8"),
        ({"gpu_mem": "-1"}, r"gpu_mem: -1 is no whole number"),
    ):
        with pytest.raises(ValueError, match=f"^set-resources: answer: {told}"):
            machine_of("answer", block, train)


@pytest.fixture
def plan(settings: Settings) -> Plan:
    """The demo with such a target, whose last stage trains on its answers."""
    place_target(Path("models/demo/target"), num_hidden_layers=3, vocab_size=1024, max_position_embeddings=32768)
    Path("models/demo/target_manifest.json").touch()
    own = "own: {source: puzzles, records: 400, seed: 0, shards: 2, regenerate: {new_tokens: 256}}"
    settings.edit(str(FILE), r"^data:\n", f"data:\n  {own}\n")
    settings.edit("config/run/demo.yaml:longcot", "name: puzzles", "name: own")
    return settings.plan()


def jobs_of(plan: Plan, warn: Any = pytest.fail, **given: Any) -> DecodingJobs:
    """These jobs, on machines of eight GPUs."""
    rules = ("evaluate", "evaluate_bench", "answer")
    machines = {rule: Machine(rule, 8, node_gres="gpu:h100:8", **given) for rule in rules}
    return DecodingJobs(plan, bench_of(plan), AnswersPlan(plan), machines, warn)


def test_what_is_still_to_be_made_is_judged(plan: Plan) -> None:
    """A target that comes too large while jobs run is told of once; the jobs of the others go on."""
    jobs = jobs_of(plan, gpu_mem=20_000)
    assert (jobs.ranks("evaluate", "demo"), jobs.gpus(*OWN)) == (2, "gpu:h100:2")
    told: list[str] = []
    jobs = jobs_of(plan, told.append, gpu_mem=1000)
    assert [jobs.ranks("evaluate", "demo"), jobs.ranks("evaluate", "demo"), len(told)] == [8, 8, 1]
    with pytest.raises(ValueError, match=r"^run 'demo': evaluate: .* set-resources: evaluate: gpu_mem: 1000 MB"):
        jobs.judge("evaluate", *RUN)
    with pytest.raises(ValueError, match=r"^answers by demo to own: .* set-resources: answer: gpu_mem: 1000 MB"):
        jobs.judge("answer", model="demo", dataset="own")
    made = [Path(plan.evaluated.format(run="demo", variant="sinkpi-slicing", drafter="lookup"))]
    made.append(Path(AnswersPlan(plan).records("demo", "own")))
    for path in made:
        path.parent.mkdir(parents=True)
        path.touch()
    jobs.judge("evaluate", *RUN)
    jobs.judge("answer", model="demo", dataset="own")


def test_vllm_and_servers_are_one_process(plan: Plan, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspec.workflow.checks._check_engines", lambda _: None)
    settings.edit(str(FILE), r"^  engine: longspec", "  engine: vllm")
    for place, gpus in (('server: "serve {model} {port}"', "gpu:h100:1"), ('endpoint: "http://host:8000/v1"', "")):
        settings.edit(str(FILE), r"regenerate: \{new.*$", f"regenerate: {{new_tokens: 256, engine: endpoint, {place}}}}}")
        jobs = jobs_of(settings.plan(), gpu_mem=1000)
        assert (jobs.ranks("evaluate", "demo"), jobs.ranks(*OWN), jobs.gpus(*OWN)) == (1, 1, gpus)
    with pytest.raises(ValueError, match=r"^set-resources: evaluate: ranks: 2: .* evaluation\.engine: vllm is one process"):
        jobs_of(settings.plan(), ranks=2).judge("evaluate", *RUN)
