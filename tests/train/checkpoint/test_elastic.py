"""What a job saves, any job goes on from: the same ranks bit by bit, others within rounding. Real ranks, real engines.

Estimates of acceptance on held-out text are right, and change not a bit of the weights.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longspec import jsonl
from longspec.atomic_files import read_json
from longspec.config import compose
from longspec.data.chat.encoding import Encoder, load_tokenizer
from longspec.draft.folder import write_draft
from longspec.methods.draft_files import PTH, SAFETENSORS
from longspec.methods.glide.layer import published_layout
from longspec.methods.glide.trainer import Qwen2Glide
from longspec.train.checkpoint.save_load import draft_state_dict
from tests.corpus import LENGTH, Corpus, sentences
from tests.jobs import RECIPE, finish, start, torchrun
from tests.train.test_held_out_estimate import make_packed

pytestmark = pytest.mark.slow
SAVE_AT, POISON, STEPS, LAGS = 3, 3, 6, 4  # the first step after a checkpoint has a gradient that is no number
# ZeRO stage, where the optimizer is, precision
SETTINGS = [
    (0, "none", "bf16"),
    (1, "none", "bf16"),  # what stages for large targets have
    (1, "none", "fp32"),
    (1, "cpu", "bf16"),
    (2, "none", "fp32"),
    (3, "none", "bf16"),
    (3, "cpu", "fp32"),
]
ESTIMATED = ["runtime.held_out_every=2", "runtime.held_out_rows=3"]
MUON = "muon-bf16"
LIMITED = "limited"
FP32 = [(stage, offload) for stage, offload, precision in SETTINGS if precision == "fp32"]


def overrides(stage: int, offload: str, precision: str = "fp32") -> list[str]:
    sharding = [f"runtime.deepspeed.zero_stage={stage}", f"runtime.deepspeed.offload_optimizer={offload}"]
    return [*sharding, f"recipe.precision={precision}"]


def name_of(*parts: object) -> str:
    return "-".join(map(str, parts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """Rows whose held-out records are shorter than a row, as long, and longer."""
    held_out = [{"text": "the old cat meets the red fox. " * n} for n in (1, 4, 30, 2, 9)]
    return make_packed(tmp_path_factory.mktemp("held_out"), corpus, "base", sentences(200), held_out)


def launch(folder: Path, target: Path, packed: Path, ranks: int, cases: list[dict[str, Any]]) -> None:
    """Run cases on so many ranks."""
    cases = [{"steps": STEPS, "poison": POISON} | case for case in cases]
    plan = {"target": read_json(target)["path"], "data": str(packed), "folder": str(folder), "cases": cases}
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    text, code = finish(start([*torchrun(ranks), "-m", "tests.train.checkpoint.resume_program", str(path)], folder))
    assert code == 0, text[-5000:]


@pytest.fixture(scope="module")
def two_ranks(folder: Path, target: Path, packed: Path) -> Path:
    """All settings on two ranks: straight through, and gone on with in the middle; and a disk that is full for one rank.

    What goes on also estimates acceptance: on three rows, so that one rank has one too few.
    """
    cases: list[dict[str, Any]] = []
    for setting in SETTINGS:
        name, asked = name_of(2, *setting), overrides(*setting)
        cases.append({"name": name, "overrides": asked, "save_at": SAVE_AT})
        cases.append({"name": f"{name}-on", "overrides": [*asked, *ESTIMATED], "go_on": name})
    asked = [*overrides(0, "none", "bf16"), "recipe.optimizer.name=muon"]
    cases.append({"name": MUON, "overrides": asked, "save_at": SAVE_AT})
    cases.append({"name": f"{MUON}-on", "overrides": asked, "go_on": MUON})
    cases.append({"name": LIMITED, "overrides": overrides(1, "none"), "save_at": SAVE_AT, "trouble": SAVE_AT + 1})
    launch(folder, target, packed, 2, cases)
    return folder


def read(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("name", [*(name_of(2, *setting) for setting in SETTINGS), MUON])
def test_the_same_ranks_go_on_bit_by_bit(two_ranks: Path, name: str) -> None:
    (straight, weights), (resumed, again) = (read(two_ranks, f"{name}{suffix}") for suffix in ("", "-on"))
    assert list(resumed["losses"]) == [str(step) for step in range(SAVE_AT, STEPS)]
    assert all(straight["losses"][step] == loss for step, loss in resumed["losses"].items())
    assert straight["losses"]["0"] > straight["losses"][str(STEPS - 1)] + 0.5
    torch.testing.assert_close(again, weights, rtol=0, atol=0)
    assert resumed["lr"] == straight["lr"]
    assert (resumed["found"]["step"], resumed["found"]["trackers"]) == (SAVE_AT, {"wandb": "abc"})


def test_estimates_are_those_of_single_forwards(two_ranks: Path, packed: Path, target: Path, corpus: Corpus) -> None:
    """One process, one lag at a time, over the tokens of the records themselves."""
    result, weights = read(two_ranks, f"{name_of(2, *FP32[-1], 'fp32')}-on")
    recipe = compose("train", RECIPE).recipe
    glide = Qwen2Glide.from_pretrained(read_json(target)["path"], dtype=torch.float32, draft=recipe.draft)
    glide.draft_model.load_state_dict({name.removeprefix("draft_model."): value for name, value in weights.items()})
    tokenizer = load_tokenizer(corpus.tokenizer)[0]
    records = list(jsonl.read(packed.parents[1] / "raw/held_out.jsonl"))
    texts = [Encoder(tokenizer).documents(records[place])[-1].ids[:LENGTH].tolist() for place in (0, 2, 4)]
    shares, loss, labels = [], 0.0, sum(len(text) - 1 for text in texts)
    with torch.no_grad():
        for lag in range(1, LAGS + 1):
            agreed = 0.0
            for text in texts:
                ids = torch.tensor([text])
                output = glide(ids, ids, lag=lag)
                agreed += float(output.agreement) * (len(text) - 1)
                loss += float(output.loss) * (len(text) - 1) * (lag == 1)
            shares.append(agreed / labels)
    assert list(result["held_out"]) == ["4", str(STEPS)]
    found = result["held_out"][str(STEPS)]
    assert [found[f"acceptance_{lag}"] for lag in range(1, LAGS + 1)] == pytest.approx(shares)
    assert found["loss"] == pytest.approx(loss / labels, rel=1e-5)
    a, b, c, d = shares
    assert found["expected_tokens"] == pytest.approx(1 + a + a * b + a * b * c + a * b * c * d)


@pytest.mark.parametrize("suffix", ["", "-on"])
def test_zero3_really_shares_the_parameters(two_ranks: Path, suffix: str) -> None:
    """After every step, also of a job that has gone on: matrices are spread, norms are whole."""
    for whole in read(two_ranks, f"{name_of(2, 3, 'none', 'bf16')}{suffix}")[0]["whole"]:
        assert len(whole) > 10
        assert all(is_whole == ("norm" in name or name.endswith("bias")) for name, is_whole in whole.items()), whole


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_stages_train_alike(two_ranks: Path, precision: str) -> None:
    """In bfloat16 up to the rounding of sums. A gradient that is not finite, of which one rank knows, all leave out."""
    runs = [read(two_ranks, name_of(2, *setting))[0] for setting in SETTINGS if setting[2] == precision]
    assert [run["skipped"] for run in runs] == [1] * len(runs)
    curves = torch.tensor([list(run["losses"].values()) for run in runs])
    tolerance = 1e-5 if precision == "fp32" else 5e-3
    torch.testing.assert_close(curves, curves[:1].expand_as(curves), rtol=tolerance, atol=0)
    assert curves[0, -1] < curves[0, 0] - 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_extraction_in_process_and_from_the_checkpoint_agree(
    two_ranks: Path, setting: tuple[int, str, str], tmp_path: Path
) -> None:
    """Byte by byte: put together by two live ranks, and read from their files by one."""
    name = name_of(2, *setting)
    live = load_file(two_ranks / f"{name}-saved.safetensors")
    state = {key.removeprefix("draft_model."): tensor for key, tensor in live.items()}
    write_draft(tmp_path / "live", published_layout(state), {})
    write_draft(tmp_path / "read", published_layout(draft_state_dict(two_ranks / name / "checkpoints/last")), {})
    for file in (SAFETENSORS, PTH):
        assert (tmp_path / "live" / file).read_bytes() == (tmp_path / "read" / file).read_bytes()


# From so many ranks to so many others, and from one ZeRO stage to another.
ELASTIC = {
    (2, 1): [*zip(FP32, FP32[1:] + FP32[:1], strict=True), (FP32[-1], FP32[-1])],
    (1, 2): [(FP32[1], FP32[-1]), (FP32[-1], FP32[1])],
}


def test_another_number_of_ranks_goes_on_within_rounding(two_ranks: Path, target: Path, packed: Path) -> None:
    """Random lags and offsets, float32."""
    begun = [{"name": name_of(1, *old, "fp32"), "overrides": overrides(*old), "steps": SAVE_AT} for old, _ in ELASTIC[1, 2]]
    gone_on: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for (before, after), pairs in ELASTIC.items():
        for old, new in pairs:
            name = name_of(before, *old, "fp32")
            gone_on[after].append({"name": f"{name}-{after}-{new[0]}", "overrides": overrides(*new), "go_on": name})
    launch(two_ranks, target, packed, 1, [*gone_on[1], *(case | {"save_at": SAVE_AT} for case in begun)])
    launch(two_ranks, target, packed, 2, gone_on[2])
    straight, weights = read(two_ranks, name_of(2, 1, "none", "fp32"))
    for case in gone_on[1] + gone_on[2]:
        resumed, again = read(two_ranks, case["name"])
        assert list(resumed["losses"]) == [str(step) for step in range(SAVE_AT, STEPS)]
        for step, loss in resumed["losses"].items():
            assert loss == pytest.approx(straight["losses"][step], rel=1e-5)
        assert max(float((weights[name] - tensor).abs().max()) for name, tensor in again.items()) < 1e-4


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_slot_before(two_ranks: Path) -> None:
    result, slots = read(two_ranks, LIMITED)[0], two_ranks / LIMITED / "checkpoints"
    told, second = result["told"]
    assert told == second
    assert f"{slots}: the checkpoint of step 4 could not be saved: rank 1: [Errno 27] File too large" in told
    assert result["left"] == ["last"]
    assert read_json(slots / "last/manifest.json")["step"] == SAVE_AT
    draft_state_dict(slots / "last")
