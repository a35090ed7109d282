"""Runs that are shipped: planned without their targets, on their own data, measured as their pages say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspec.atomic_files import write_json
from longspec.measure.tasks import HeldOut
from longspec.train.estimate import plan as estimate
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of
from tests.workflow.planning import Settings

pytestmark = pytest.mark.slow  # half a minute and more as a whole

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# By run: its target's name, its learning rate and its batch; its target's family, published sizes and further keys.
RUNS: dict[str, tuple[tuple[str, float, int], str, tuple[int, ...], dict[str, Any]]] = {
    "llama3.1-8b-eagle3": (("llama-3.1-8b", 1e-4, 8), "llama", (4096, 14336, 32, 32, 8, 128256), {}),
    "qwen3-8b-eagle3": (("qwen3-8b", 1e-4, 8), "qwen3", (4096, 12288, 36, 32, 8, 151936), {}),
    "qwen3-30b-a3b-eagle3": (("qwen3-30b-a3b", 5e-5, 16), "qwen3_moe", (2048, 6144, 48, 32, 4, 151936), EXPERTS),
    "llama3.3-70b-eagle3": (("llama-3.3-70b", 1e-4, 8), "llama", (8192, 28672, 80, 64, 8, 128256), {}),
}
STAGES = ["ultrachat", "sharegpt"]
VOCABULARY = 32000
PATTERNS = (r"PEAK of one rank, device +([\d.]+) GiB", r"PEAK of one rank, host +([\d.]+ [GM])iB", r"([\d.]+) hours in all")


@pytest.mark.parametrize("run", RUNS)
def test_one_run_reads_its_own_data_and_fits_eight_gpus_of_80_gb(
    settings: Settings, capsys: pytest.CaptureFixture[str], root: Path, run: str
) -> None:
    """As docs/serve.md has it: the memory of a GPU and of a node, the hours, and the draft's share of the weights read."""
    (target, lr, batch), family, sizes, more = RUNS[run]
    plan = settings.plan(runs=[run])
    assert (plan.stages[run], plan.variants[run], plan.fetched) == (STAGES, ["ttt"], [target])
    assert plan.evaluation_data(run) == sorted(plan.datasets_in_use()) == sorted(STAGES)
    assert plan.vocabulary(run, "ttt") == [f"results/{run}/ttt/draft_vocabulary_{VOCABULARY}.json"]
    for stage in STAGES:
        recipe = plan.configs[run, "ttt", stage].recipe
        assert plan.rows(run, "ttt", stage)[0].endswith(f"/{stage}-long-4096-truncate/manifest.json")  # answers alone
        assert (recipe.draft.steps, recipe.optimizer.lr, recipe.global_batch) == (7, lr, batch)
    config = {"model_type": family, "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 131072}
    write_json(settings.folder / "target/config.json", config | dict(zip(SIZES, sizes, strict=True)) | more)
    options = ["--target", str(settings.folder / "target"), "--ranks", "8", "--rows", *["60000"] * len(STAGES)]
    for section in ("recipe", "runtime"):
        options.append(f"--{section}")
        for stage in STAGES:
            (settings.folder / f"{stage}-{section}.yaml").write_text(plan.stage_yaml(run, "ttt", stage, section))
            options.append(str(settings.folder / f"{stage}-{section}.yaml"))
    assert estimate.main(options) == 0
    told = capsys.readouterr().out
    device, host, hours = (re.findall(pattern, told)[0] for pattern in PATTERNS)
    amount, unit = host.split()
    node = 8 * (float(amount) * {"G": 2**30, "M": 2**20}[unit] + 6 * 2**30) / 1e9  # 6 GiB for each process itself
    assert node < 900  # GB of a node, by profiles/slurm/profile.yaml
    hidden, inner, layers, heads, key_values, tokens = sizes
    layer = hidden * (2 * 128 * (heads + key_values) + 3 * inner)  # of experts those that a token passes, 8 x 768
    draft = (
        layer + 128 * hidden * (heads + 2 * key_values) + hidden * VOCABULARY
    )  # inputs of queries to values of twice the width
    share = draft / (layers * layer + hidden * tokens)
    source = plan.model_source(target).removeprefix("hf:")
    row = f"| `{run}` | {source} | {float(device):.1f} | {node:.0f} | {hours} | {share:.3f} |"
    assert row in (root / "docs/serve.md").read_text()


def test_of_one_data_set_alone_nothing_else_is_fetched_or_measured(settings: Settings) -> None:
    for run in ("llama3.1-8b-eagle3-sharegpt", "llama3.1-8b-eagle3-sharegpt-offline"):
        plan = settings.plan(runs=[run])
        assert [*plan.evaluation_of[run].tasks] == [*plan.datasets_in_use()] == ["sharegpt"]


SMOLLM2 = {"smollm2-glide": "sinkpi-slicing", "smollm2-eagle3": "ttt"}
GSM8K = "smollm2-eagle3-gsm8k"
QUESTIONS = "smollm2-questions"


def test_answers_are_shared_and_whole_questions_measured(settings: Settings) -> None:
    """As deep as was trained; apart too."""
    plan = settings.plan(runs=list(SMOLLM2))
    bench, answers = bench_of(plan), AnswersPlan(plan)
    for run, variant in SMOLLM2.items():
        draft = plan.configs[run, variant, "answers"].recipe.draft
        depth = draft.lag if run == "smollm2-glide" else draft.steps
        tree, _, chain = plan.evaluation_of[run].section["shapes"]
        assert (len(tree), chain) == (depth, depth)
        assert answers.evaluation_options(run)[0].startswith(f"{QUESTIONS}=data/answers/smollm2-135m/{QUESTIONS}/greedy-256-")
        for each, data in ((plan, QUESTIONS), (bench, "smollm2-long")):
            tasks = each.evaluation_of[run].tasks.values()
            assert all(isinstance(task, HeldOut) and task.whole_questions and task.data == data for task in tasks)


def test_gsm8k_is_read_where_its_file_is_and_the_other_runs_do_without(settings: Settings) -> None:
    place = "config/workflow.yaml: data.gsm8k-train.source: inputs/gsm8k_train.jsonl"
    settings.refuses(place, "such file", runs=[GSM8K])
    (settings.folder / "inputs").mkdir()
    (settings.folder / "inputs/gsm8k_train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    plan = settings.plan(runs=[GSM8K, "smollm2-eagle3"])
    assert plan.stages[GSM8K] == ["answers", "gsm8k"]
    assert plan.rows(GSM8K, "ttt", "answers") == plan.rows("smollm2-eagle3", "ttt", "answers")
    first, same = (plan.stage_yaml(run, "ttt", "answers", "recipe") for run in (GSM8K, "smollm2-eagle3"))
    assert first == same
    assert json.loads(plan.raw_settings("gsm8k-train"))["unanswered"] is True
    answers = AnswersPlan(plan)
    assert answers.records("smollm2-135m", "gsm8k-train").startswith("data/answers/smollm2-135m/gsm8k-train/greedy-256-")
    assert set(plan.evaluation_data(GSM8K)) == {QUESTIONS, "gsm8k-train"}


RUN = "config/run/published.yaml"


def test_the_published_run_is_measured_on_its_own_held_out_records_and_on_benchmarks(settings: Settings) -> None:
    plan = settings.plan(runs=["published"])
    assert plan.evaluation_data("published") == ["long-data", "longcot", "slimpajama"]
    sources = {task.source: task for task in plan.hub_prompts.values()}
    names = ["HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024", "openai/gsm8k", "zai-org/LongBench"]
    assert sorted("/".join(str(source).removeprefix("hf:").split("/")[:2]) for source in sources) == names
    assert plan.task_files("published") == sorted(Path(f"data/hub/{name}/manifest.json") for name in plan.hub_prompts)
    members = [task.member for task in plan.evaluation_of["published"].tasks.values() if getattr(task, "member", "")]
    assert sorted(members) == [f"data/{name}.jsonl" for name in ("gov_report", "lcc", "multi_news", "qmsum", "repobench-p")]


def test_prompts_that_are_trained_on_are_refused_and_another_split_is_not(settings: Settings) -> None:
    settings.edit(RUN, r"gsm8k: \{preset: gsm8k\}", "gsm8k: {source: 'hf:DKYoon/SlimPajama-6B/data/validation-*.parquet'}")
    assert settings.plan(runs=["published"]).hub_prompts
    settings.edit(RUN, "data/validation-", "data/train-")
    place = f"{RUN}: evaluation.tasks.gsm8k.source: hf:DKYoon/SlimPajama-6B/data/train-*.parquet"
    settings.refuses(place, "as data.slimpajama (", runs=["published"])
